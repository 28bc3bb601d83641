"""The student: a backbone with classes, and the only object through which weights change.

A method says which weights train and what the loss is; the learner's loops hand both to
`select_for_session` and `step`. Later selections (for the stream, for stages after the epochs, when
restored) go through `set_trainable`. A method never writes a weight itself: values that are no
optimizer step, such as averages, go through `ema_update` and `assign`. Shared copies of the student
(teachers, and models as they were before a session) are created, updated and restored here too.
Equations are those of the paper (docs/paper-notes.md). An expert is any model that predicts: the
student's backbone, a teacher, an ensemble of both, or one of these with a head.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone, Captions, Expert, Pixels
from dosapp.errors import DivergedError
from dosapp.functional import ema, losses, masks
from dosapp.functional.masks import Mask, Scores
from dosapp.functional.named_tensors import bits_differ, select_prefix
from dosapp.heads.base import Head, score_with_expert
from dosapp.runtime import distributed
from dosapp.runtime.rng import torch_rng
from dosapp.settings import PAPER_LR
from dosapp.student.sparse_parameter import (
    SparseParameter,
    mask_indices,
    none_if_dense,
    union_indices,
)
from dosapp.student.text_head import TextHead
from dosapp.student.trainable_weights import Selection

INITIAL_LOSS_SCALE = 2.0**10  # for float16


class Student:
    """A backbone that trains.

    Args:
        backbone: The model; all its weights are frozen until some are selected.
        lr: Learning rate of AdamW.
        weight_decay: Of AdamW, on the backbone's own weights.
        seed: Of all random numbers that methods draw.
        loss_scaling: Scale losses, because matrix products are in float16.
        all_class_negatives: Add the captions of absent classes to the CLIP loss with labels.

    Example:
        >>> from dosapp import Prompts, Selection, Student, load_backbone
        >>> student = Student(load_backbone("tiny"), lr=1e-3)
        >>> student.text_head.add_classes(["red plain circle", "blue plain star"], Prompts())
        >>> student.set_trainable(Selection(tuple(student.backbone.first_mlp_weights())))
        >>> student.step(student.clip_loss(torch.rand(2, 3, 32, 32), torch.tensor([0, 1])))
        True
    """

    def __init__(
        self,
        backbone: Backbone,
        *,
        lr: float = PAPER_LR,
        weight_decay: float = 0.2,
        seed: int = 0,
        loss_scaling: bool = False,
        all_class_negatives: bool = False,
    ) -> None:
        self.backbone, self.text_head = backbone, TextHead()
        # Class statistics that predict instead of captions, for methods that label the stream with
        # them. Where a learner has some, it sets them before every stream step.
        self.head: Head | None = None
        # A copy that never trains, set once by `ClassHead.setup` if the head scores `[B, 2 D]`: the
        # features of the model that predicts, then this copy's.
        self.frozen_copy: Backbone | None = None
        self.lr, self.weight_decay, self.seed = lr, weight_decay, seed
        self.selection = Selection()  # the weights that train now
        # What the session selected: the same object as `selection`, unless a stage after the epochs
        # trains (a checkpoint relies on this). A stage replaces `selection` only. A method's
        # `begin_stream` starts from this one, and then the learner sets it to the stream's.
        self.session_selection = Selection()
        # Class skew of the stream in [0, 1]; at 1 teachers use δ everywhere. Set by `Mitigations`,
        # and zero unless `skew_aware_ema` is on.
        self.stream_skew = 0.0
        self.steps = 0  # optimizer steps so far
        self.all_class_negatives = all_class_negatives
        # Whether weights were replaced since the last step, by an average or by merging. At the end
        # of the session a teacher is then made equal to the student (`DoSAPP.end_session`), not
        # averaged. `assign` sets it; merging sets it again after the steps of an alignment.
        self.weights_assigned = False
        self.ever_selected: set[str] = set()  # names of weights; versions store only these
        # By name, of the current selection. `values` are copies of the entries that a mask selects,
        # which AdamW updates; a hook gathers their gradient, and after the step they are written to
        # the weight. Without a mask they are the weight itself.
        self.trainable: dict[str, SparseParameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        device = backbone.logit_scale.device.type
        self._scaler = torch.amp.GradScaler(
            device, init_scale=INITIAL_LOSS_SCALE, enabled=loss_scaling
        )
        self._copies: weakref.WeakSet[Backbone] = weakref.WeakSet()
        # By weight: flat indices of the entries in which a copy can differ from the student. None:
        # all of them (also above a quarter: then a dense pass costs no more). No key: none.
        self.differing_indices: dict[str, Tensor | None] = {}
        for weight in backbone.weights().values():
            weight.requires_grad_(False)

    @property
    def classes(self) -> list[str]:
        """The class names; a label is an index of this list."""
        return self.text_head.classes

    def rng(self, *purpose: object) -> torch.Generator:
        """A random generator for a purpose at this step: repeating the step repeats its numbers."""
        return torch_rng(*purpose, self.seed, self.steps)

    # Forward passes and losses

    def encode_captions(self, expert: Expert | None = None) -> Tensor:
        """Features `[C, D]` of the training caption of every class."""
        return (expert or self.backbone).encode_text(self.text_head.captions())

    def score_with_head(self, pixels: Pixels, features: Tensor, text_features: Tensor) -> Tensor:
        """Score image features by the head, or by cosines with captions if there is none.

        Args:
            pixels: Images, or what the trunk made of them.
            features: Features `[B, D]` of these images, by the student or a teacher.
            text_features: Features `[C, D]` of one caption per class, by the same model.

        Returns:
            The head's logits `[B, C]`, or unscaled cosines: for their order, not for a softmax.
        """
        if self.head is not None:
            if self.frozen_copy is not None:
                features = torch.cat([features, self.frozen_copy.encode_image(pixels)], dim=1)
            return self.head.score(features, text_features)
        return features @ text_features.T

    def encode_shared_trunk(self, pixels: Tensor, copy: Backbone) -> tuple[Pixels, Captions]:
        """Run a batch and all captions through the trunk once, for the student and a copy.

        The trunk ends where the first block's MLP begins. DoSAPP trains the first MLP layer of
        every block, so nothing before it changes.

        Args:
            pixels: Images `[B, 3, H, W]` in [0, 1].
            copy: A shared copy of the student.

        Returns:
            Outputs of the trunk, which `encode_image` and `encode_text` of both models accept; the
            images and captions themselves if the trunks differ. So do `encode_*_trunk` of a model
            that gains nothing by sharing (`DataParallelBackbone`).
        """
        captions = self.text_head.captions()
        trunk, other = self.backbone.trunk_weights(), copy.trunk_weights()
        if any(other[name] is not weight for name, weight in trunk.items()):
            return pixels, captions
        return self.backbone.encode_image_trunk(pixels), self.backbone.encode_text_trunk(captions)

    def encode_pairs(
        self, pixels: Tensor, labels: Tensor, backbone: Backbone | None = None
    ) -> tuple[Tensor, Tensor]:
        """Encode images and their captions; each caption is encoded once.

        Args:
            pixels: Images `[B, 3, H, W]` in [0, 1].
            labels: Indices `[B]` of the student's classes.
            backbone: The model that encodes, if not the student's.

        Returns:
            Features `[B, D]` of the images, and of the captions.
        """
        backbone = backbone or self.backbone
        present, index = labels.unique(return_inverse=True)
        texts = backbone.encode_text(self.text_head.captions(present.tolist()))
        return backbone.encode_image(pixels), texts[index]

    def encode_absent_captions(self, labels: Tensor) -> Tensor | None:
        """Features `[absent, D]` of captions of classes that a batch lacks, if they are used."""
        present = set(labels.tolist())
        absent = [label for label in range(len(self.classes)) if label not in present]
        if not self.all_class_negatives or not absent:
            return None
        return self.backbone.encode_text(self.text_head.captions(absent))

    def clip_loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """CLIP's loss of images and the captions of their classes.

        Args:
            pixels: Images `[B, 3, H, W]` in [0, 1].
            labels: Indices `[B]` of the student's classes.
        """
        images, texts = self.encode_pairs(pixels, labels)
        negatives = self.encode_absent_captions(labels)
        return losses.clip_loss(images, texts, self.backbone.logit_scale, negatives)

    def score_images(self, pixels: Tensor, expert: Expert | None = None) -> Tensor:
        """Unscaled cosines of images with the training captions, or the scores of an expert's head.

        For losses: predictions use the evaluation prompts (`Learner.score_images`).

        Args:
            pixels: Images `[B, 3, H, W]` in [0, 1].
            expert: The model that encodes and scores, if not the student; a `HeadExpert` has a head
                of its own. `self.head` is not used here.

        Returns:
            Scores `[B, C]`.
        """
        expert = expert or self.backbone
        return score_with_expert(expert, expert.encode_image(pixels), self.encode_captions(expert))

    def scaled_image_logits(self, pixels: Tensor) -> Tensor:
        """Scaled logits `[B, C]` with a gradient for the image tower only."""
        with torch.no_grad():
            texts = self.encode_captions()
        return self.backbone.logit_scale.detach() * self.backbone.encode_image(pixels) @ texts.T

    # Gradients without a step

    def gradient_scores(
        self, weights: Mapping[str, Tensor], batch_losses: Iterable[Tensor]
    ) -> Scores:
        """|mean gradient| of every entry (Eq. 1); no weight changes.

        Args:
            weights: By name.
            batch_losses: Computed one by one.

        Returns:
            A tensor like each weight.
        """
        return masks.gradient_scores(self.iter_gradients(weights, batch_losses))

    def iter_gradients(
        self, weights: Mapping[str, Tensor], batch_losses: Iterable[Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """The gradient of each loss in turn, equal in every process; no weight changes.

        Args:
            weights: Those whose gradients are needed, by name.
            batch_losses: Computed one by one, as the iterator is advanced.

        Raises:
            DivergedError: A gradient is not finite.
        """
        # A fixed scale: the scaler's own grows until a gradient overflows.
        scale = INITIAL_LOSS_SCALE if self._scaler.is_enabled() else 1.0
        if not weights:
            return
        with _gradients_enabled(weights):
            for gradients in masks.iter_gradients(weights, (loss * scale for loss in batch_losses)):
                distributed.average_gradients(list(gradients.values()))
                if not all(bool(g.isfinite().all()) for g in gradients.values()):
                    raise DivergedError(
                        f"a gradient is not finite after {self.steps} steps with learning rate "
                        f"{self.lr:g}; try a smaller one, or --precision float32"
                    )
                yield gradients if scale == 1 else {n: g / scale for n, g in gradients.items()}

    # Selection

    def select_for_session(self, selection: Selection) -> None:
        """Train these weights in a session, and on its stream unless the method selects others."""
        self.session_selection = selection
        self.set_trainable(selection)

    def drop_gradient_scores(self) -> None:
        """Free the scores of the session's selection, which are as large as the weights."""
        was_same = self.session_selection is self.selection
        self.session_selection = replace(self.session_selection, scores=None)
        if was_same:
            self.selection = self.session_selection

    def set_trainable(self, selection: Selection) -> None:
        """Train these weights from now on, with a new optimizer."""
        for parameter in self.trainable.values():
            parameter.stop_training()
        weights = self.backbone.weights()
        for copy in self._copies:
            copied = copy.weights()
            copy.unshare([n for n in selection.names if copied[n] is weights[n]])
        self.selection = selection
        self.ever_selected.update(selection.names)
        mask = selection.mask or {}
        self.trainable = {n: SparseParameter(weights[n], mask.get(n)) for n in selection.names}
        for name, parameter in self.trainable.items():
            known = self.differing_indices.get(name, parameter.indices)  # no key: the new ones
            union = union_indices(known, parameter.indices)  # None is all entries
            self.differing_indices[name] = none_if_dense(union, parameter.weight.numel())
        self._optimizer = None
        if self.trainable:
            decayed = self.backbone.own_weights()  # not those of prompts and adapters
            groups = [
                {
                    "params": [parameter.values],
                    "base_lr": self.lr * selection.lr_scales.get(name, 1.0),
                    "weight_decay": self.weight_decay if name in decayed else 0.0,
                }
                for name, parameter in self.trainable.items()
            ]
            self._optimizer = torch.optim.AdamW(groups)

    def change_lr(self, lr: float) -> None:
        """Train with another learning rate; Adam's moments stay."""
        groups = self._optimizer.param_groups if self._optimizer else []
        for group in groups:
            group["base_lr"] *= lr / self.lr
        self.lr = lr

    def change_mask(self, mask: Mask) -> None:
        """Train other entries of the same weights.

        Entries in both masks keep their Adam moments. New ones start from zero moments but with the
        weight's step count, so bias correction does not scale them: their first updates can be a
        few times as large as Adam's usual first update.
        """
        dense_moments = {
            name: {
                key: self.trainable[name].to_dense(value) if value.ndim else value
                for key, value in state.items()
            }
            for name, state in self._optimizer_moments().items()
        }
        was_same = self.session_selection is self.selection  # then it gets this mask, too
        self.set_trainable(replace(self.selection, mask={**(self.selection.mask or {}), **mask}))
        if was_same:
            self.session_selection = self.selection
        assert self._optimizer is not None
        for name, state in dense_moments.items():
            parameter = self.trainable[name]
            self._optimizer.state[parameter.values] = {
                key: parameter.gather(value) if value.ndim else value
                for key, value in state.items()
            }

    # Steps

    def step(self, loss: Tensor, lr_scale: float = 1.0) -> bool:
        """Take one optimizer step; entries outside the selection stay bit-identical.

        A loss of exactly zero (a contrastive batch of one image) gives no step, so that weight
        decay and old moments do not act alone.

        Args:
            loss: A scalar with a graph.
            lr_scale: Factor on the learning rate of this step.

        Returns:
            Whether the weights changed.

        Raises:
            DivergedError: The loss is infinite or NaN.
        """
        if not torch.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss.item()} at step {self.steps} with learning rate "
                f"{self.lr:g}; try a smaller one, for example --lr {self.lr / 10:g}"
            )
        if self._optimizer is None or loss.item() == 0 or lr_scale == 0:
            return False
        self._optimizer.zero_grad(set_to_none=True)
        self._scaler.scale(loss).backward()
        return self.update_weights(lr_scale)

    def update_weights(self, lr_scale: float = 1.0) -> bool:
        """The part of `step` after the backward pass; false if a float16 gradient overflowed.

        Apart from `step`, so that the benchmark can time it.
        """
        assert self._optimizer is not None
        values = [parameter.values for parameter in self.trainable.values()]
        distributed.average_gradients([v.grad for v in values if v.grad is not None])
        for parameter in self.trainable.values():
            parameter.read_from_weight()  # `assign` may have changed it
        for group in self._optimizer.param_groups:
            group["lr"] = group["base_lr"] * lr_scale
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < scale:  # the scaler has skipped the step
            return False
        for parameter in self.trainable.values():
            parameter.write_to_weight()
        self.steps += 1
        self.backbone.revision += 1  # invalidates cached text features
        self.weights_assigned = False
        return True

    def last_gradients(self) -> dict[str, Tensor]:
        """Dense gradients of the last step, zero outside the selection; freed by the next step."""
        return {
            name: parameter.to_dense(parameter.values.grad)
            for name, parameter in self.trainable.items()
            if parameter.values.grad is not None
        }

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor], mask: Mask | None = None) -> None:
        """Set weights in place, to values that are no optimizer step: averages, restored entries.

        Args:
            values: By name, of weights that were selected before: one that a copy still shares
                would change in the copy, too.
            mask: Set only entries that are True; it must lie inside the selection.
        """
        weights = self.backbone.weights()
        for name, value in values.items():
            weight = weights[name]
            weight.copy_(value if mask is None else torch.where(mask[name], value, weight))
            if mask is None:
                self.differing_indices[name] = None
        self.backbone.revision += 1
        self.weights_assigned = True

    # Shared copies: teachers, and models as they were before a session

    def shared_copy(self) -> Backbone:
        """A copy of the backbone that shares each weight until it becomes trainable."""
        copy = self.backbone.shared_copy(unshared=self.selection.names)
        self._copies.add(copy)
        return copy

    @torch.no_grad()
    def load_copy(self, copy: Backbone, values: Mapping[str, Tensor]) -> None:
        """Set weights of a copy.

        Entries outside `differing_indices` must become equal to the student's, since `ema_update`
        skips them; else call `rebuild_differing_indices` afterwards.

        Args:
            copy: A shared copy.
            values: By name, of weights that the copy does not share.
        """
        weights = copy.weights()
        for name, value in values.items():
            weights[name].copy_(value)
        copy.revision += 1

    def sync_copy(self, copy: Backbone) -> None:
        """Make a copy equal to the student."""
        weights, copied = self.backbone.weights(), copy.weights()
        self.load_copy(copy, {n: w.detach() for n, w in weights.items() if copied[n] is not w})

    def ema_update(
        self, teacher: Backbone, *, active_momentum: float, frozen_momentum: float
    ) -> None:
        """Update a teacher by an exponential moving average of the student (Eq. 3 and 6).

        Args:
            teacher: A shared copy of the student.
            active_momentum: Of the selected entries: γ in the labelled phase, λ on the stream.
            frozen_momentum: Of all other entries: δ.
        """
        active_momentum += (frozen_momentum - active_momentum) * self.stream_skew
        weights, copied = self.backbone.weights(), teacher.weights()
        unshared = {n: w for n, w in copied.items() if w is not weights[n]}
        names, mask = self.selection.names, self.selection.mask or {}
        # A selected weight without a mask is active as a whole; one that is not selected is frozen.
        is_active = {n: mask.get(n, n in names) for n in unshared}
        # A weight that is not in `differing` is averaged as a whole, so those with None are left
        # out. Every unshared weight has a key: it was selected once.
        differing = {n: at for n, at in self.differing_indices.items() if at is not None}
        ema.ema_update(
            unshared,
            weights,
            is_active,
            active=active_momentum,
            frozen=frozen_momentum,
            differing=differing,
        )
        teacher.revision += 1

    def rebuild_differing_indices(self) -> None:
        """Compare copies with the student entry by entry, after both were restored.

        Only in weights that train now. Restoring went through `assign`, after which every weight
        that it wrote counts as different in all entries (None).
        """
        weights = self.backbone.weights()
        for name, parameter in self.trainable.items():
            weight = weights[name]
            copied = [copy.weights()[name] for copy in self._copies]
            unequal = [bits_differ(other, weight) for other in copied if other is not weight]
            empty = torch.zeros_like(weight, dtype=torch.bool)
            differs = torch.stack([empty, *unequal]).any(dim=0)
            union = union_indices(mask_indices(differs), parameter.indices)
            self.differing_indices[name] = none_if_dense(union, weight.numel())

    # State of the optimizer

    def optimizer_state(self) -> dict[str, Tensor]:
        """Moments of the optimizer and the loss scale."""
        moments = {
            f"{name}/{key}": value
            for name, state in self._optimizer_moments().items()
            for key, value in state.items()
        }
        scaler = self._scaler.state_dict()  # empty unless it is enabled
        return moments | {f"scaler/{key}": torch.tensor(value) for key, value in scaler.items()}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore `optimizer_state`; the selection must be the same."""
        scaler = select_prefix("scaler/", state)
        self._scaler.load_state_dict({key: value.item() for key, value in scaler.items()})
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name == "scaler":
                continue
            assert self._optimizer is not None
            self._optimizer.state[self.trainable[name].values][key] = value.clone()

    def _optimizer_moments(self) -> dict[str, dict[str, Tensor]]:
        if self._optimizer is None:
            return {}
        states = self._optimizer.state
        return {n: states[p.values] for n, p in self.trainable.items() if p.values in states}

    def held_tensors(self) -> list[Tensor]:
        """What training holds: values, gradients, optimizer state, masks, scores, indices.

        For measuring memory. The values of a weight without a mask are the weight itself.
        """
        held = [*self.optimizer_state().values(), *self.differing_indices.values()]
        for parameter in self.trainable.values():
            held += [parameter.values, parameter.values.grad, parameter.indices]
        held += [*(self.selection.mask or {}).values(), *(self.selection.scores or {}).values()]
        return [tensor for tensor in held if tensor is not None]


@contextmanager
def _gradients_enabled(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let gradients of frozen weights be computed."""
    frozen = [weight for weight in weights.values() if not weight.requires_grad]
    for weight in frozen:
        weight.requires_grad_(True)
    try:
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
