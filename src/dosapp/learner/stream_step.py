"""The unlabelled phase: one step on a batch of the stream."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dosapp.methods.base import AdaptResult

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner


def adapt_batch(learner: "Learner", pixels: Tensor) -> AdaptResult | None:
    """Take one step on a batch of the stream.

    Args:
        learner: It changes.
        pixels: Images `[B, 3, H, W]` in [0, 1], on its device.

    Returns:
        Pseudo-labels and what was done; None if neither method nor head adapts.
    """
    student, method, class_head = learner.student, learner.method, learner.class_head
    check = learner.mitigations.check_batch(student, method, pixels)
    trusted = check.select_trusted(pixels)  # all of them, unless a confidence gate is on
    if class_head.kind is not None:
        student.head = class_head.wrap_expert(learner.method_expert).head
    result = method.stream_loss(student, trusted) if len(trusted) else None
    # A head that follows the stream shifts its class means by what this step does to the
    # features of the batch.
    follows = class_head.follows_stream
    features_before = _encode_before(learner, pixels, result) if follows else None
    if result is not None and result.loss is not None:
        base_scale = (learner.settings.stream_lr or student.lr) / student.lr
        stepped = student.step(result.loss, check.lr_scale * base_scale)
        if stepped:
            method.after_stream_step(student)
            learner.mitigations.after_stream_step(student)
        result = replace(result, loss=result.loss.detach(), stepped=stepped)
    if features_before is not None:
        # All images show the drift, also those that are not trusted as examples of a class.
        class_head.move_means(pixels, features_before, learner.method_expert)
        if not method.adapts:
            return AdaptResult(_head_labels(learner, pixels), stepped=True)
        if result is not None:
            result = replace(result, stepped=True)  # predictions change even if no weight did
    # Images that the gate held back get their pseudo-labels too, and no loss.
    return check.add_skipped_labels(result) if method.adapts else None


@torch.no_grad()
def _encode_before(learner: "Learner", pixels: Tensor, result: AdaptResult | None) -> Tensor:
    """Features of the method's expert before the step; its loss may have computed them."""
    features = None if result is None else result.features
    if features is not None and len(features) == len(pixels):
        return features
    return learner.method_expert.encode_image(pixels)


@torch.no_grad()
def _head_labels(learner: "Learner", pixels: Tensor) -> Tensor:
    """The most likely classes `[B]` by the head."""
    labels = learner.score_images(pixels, learner.answering_expert[1]).argmax(dim=1)
    return labels.clone()  # autograd takes no inference tensor
