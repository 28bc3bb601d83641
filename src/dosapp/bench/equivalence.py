"""Checks that DoSAPP and the baseline compute the same; otherwise there is nothing to compare."""

from typing import Any

import torch

from dosapp.bench.implementations import Implementations
from dosapp.bench.model import random_images, small

EXACT, NEAR = 1e-9, 1e-3  # float64: of weights; float32: relative to a gradient's norm


class NotEquivalentError(RuntimeError):
    """The two implementations do not compute the same."""


def check_float64() -> dict[str, float]:
    """Compare three steps of each phase in float64 on a small model, with one mask per phase.

    Returns:
        The largest gaps between the losses, the students' weights and the teachers' weights.

    Raises:
        NotEquivalentError: If pseudo-labels differ or a gap exceeds `EXACT`.
    """
    pair = Implementations(small(), double=True, lr=1e-3).set_size(6, 7)
    student, method, baseline, loss_gap = pair.student, pair.method, pair.baseline, 0.0
    for step in range(3):
        pixels, labels = random_images(6, 32, f"step {step}"), torch.tensor([0, 1, 2, 0, 1, 1])
        loss = student.clip_loss(pixels, labels)
        loss_gap = max(loss_gap, abs(loss.item() - baseline.training_step(pixels, labels).item()))
        student.step(loss)
        method.after_step(student)
    pair.set_random_mask(1)
    for step in range(3):
        pixels = random_images(5, 32, f"stream {step}")
        result = method.stream_loss(student, pixels)
        baseline_loss, labels = baseline.adapt(pixels)
        if not torch.equal(result.labels, labels) or result.loss is None:
            raise NotEquivalentError(
                f"pseudo-labels {result.labels.tolist()} and {labels.tolist()}"
            )
        loss_gap = max(loss_gap, abs(result.loss.item() - baseline_loss.item()))
        student.step(result.loss)
        method.after_stream_step(student)
    gaps = {
        "losses": loss_gap,
        "student": _max_gap(student.backbone, baseline.student),
        "teacher": _max_gap(method.teacher, baseline.teacher),
    }
    return _check(gaps, EXACT, "in float64")


def check_float32(pair: Implementations) -> dict[str, float]:
    """Compare loss, gradients and pseudo-labels in float32, with a teacher that differs.

    Weights after a step are not compared: Adam turns the sign of a gradient near zero into a whole
    step. The teachers equal the students again afterwards.

    Args:
        pair: Both implementations, before any step.

    Returns:
        The relative gaps of losses and gradients, and how far a pseudo-label of ours is below the
        best logit of the baseline.

    Raises:
        NotEquivalentError: If a gap exceeds `NEAR`.
    """
    student, method, baseline = pair.student, pair.method, pair.baseline
    baseline_teacher = dict(baseline.teacher.named_parameters())
    with torch.no_grad():
        shifted = {n: w.detach() * 1.01 for n, w in student.backbone.first_mlp_weights().items()}
        student.load_copy(method.teacher, shifted)
        for name, weight in shifted.items():
            baseline_teacher[name].copy_(weight)
    result = method.stream_loss(student, pair.pixels)
    assert result.loss is not None
    _, logits = baseline.pseudo_labels(pair.pixels)
    loss = baseline.loss(pair.pixels, result.labels)
    baseline_grads = torch.autograd.grad(loss, baseline.candidates())
    weights = student.backbone.first_mlp_weights()
    (grads,) = student.iter_gradients(weights, [result.loss])
    gaps = [
        ((grads[name] - grad).norm() / grad.norm()).item()
        for name, grad in zip(baseline.names, baseline_grads, strict=True)
    ]
    below_best = logits.max(dim=1).values - logits.gather(1, result.labels[:, None]).squeeze(1)
    with torch.no_grad():
        student.sync_copy(method.teacher)
        for name, weight in weights.items():
            baseline_teacher[name].copy_(weight)
    relative_gaps = {
        "losses": abs(result.loss.item() - loss.item()) / loss.item(),
        "labels": below_best.max().item(),
        "gradients": max(gaps),
    }
    return _check(relative_gaps, NEAR, "in float32")


def _max_gap(backbone: Any, model: Any) -> float:
    baseline_weights = dict(model.named_parameters())
    gaps = [(w - baseline_weights[n]).abs().max().item() for n, w in backbone.weights().items()]
    return float(max(gaps))


def _check(gaps: dict[str, float], limit: float, precision: str) -> dict[str, float]:
    for name, gap in gaps.items():
        if not gap <= limit:  # also true for NaN
            raise NotEquivalentError(
                f"{name} of the two implementations differ by {gap:g} {precision}"
            )
    return gaps
