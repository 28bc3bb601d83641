"""Both ways do the same, or there is nothing to compare."""

from typing import Any

import torch

from dosapp.bench.implementations import Implementations
from dosapp.bench.model import pictures, small

EXACT, NEAR = 1e-9, 1e-3  # in float64, of weights; in float32, of a gradient's length


class NotEquivalentError(RuntimeError):
    """The two implementations do not do the same."""


def exact() -> dict[str, float]:
    """In float64 on a small model: the largest gap between the weights of both students and both
    teachers after three steps of each phase, with another mask in each."""
    sides = Implementations(small(), double=True, lr=1e-3).sized(6, 7)
    student, method, plain, loss_gap = sides.student, sides.method, sides.plain, 0.0
    for step in range(3):
        pixels, labels = pictures(6, 32, f"lesson {step}"), torch.tensor([0, 1, 2, 0, 1, 1])
        loss = student.clip_loss(pixels, labels)
        loss_gap = max(loss_gap, abs(loss.item() - plain.lesson(pixels, labels).item()))
        student.step(loss)
        method.after_step(student)
    sides.masked(1)
    for step in range(3):
        pixels = pictures(5, 32, f"stream {step}")
        guess = method.stream_loss(student, pixels)
        theirs, labels = plain.adapt(pixels)
        if not torch.equal(guess.labels, labels) or guess.loss is None:
            raise NotEquivalentError(f"pseudo-labels {guess.labels.tolist()} and {labels.tolist()}")
        loss_gap = max(loss_gap, abs(guess.loss.item() - theirs.item()))
        student.step(guess.loss)
        method.after_stream_step(student)
    return _checked(
        {
            "losses": loss_gap,
            "student": _apart(student.backbone, plain.student),
            "teacher": _apart(method.teacher, plain.teacher),
        },
        EXACT,
        "in float64",
    )


def near(sides: Implementations) -> dict[str, float]:
    """In float32, before anything is learned and with a teacher that differs: loss and gradients
    (weights would not do: Adam makes a whole step of the sign of a gradient near zero), and how
    far below the best a pseudo-label of ours is on the plain side."""
    student, method, plain = sides.student, sides.method, sides.plain
    other = dict(plain.teacher.named_parameters())
    with torch.no_grad():
        shifted = {n: w.detach() * 1.01 for n, w in student.backbone.first_mlp_weights().items()}
        student.load_copy(method.teacher, shifted)
        for name, weight in shifted.items():
            other[name].copy_(weight)
    guess = method.stream_loss(student, sides.pixels)
    assert guess.loss is not None
    _, cosines = plain.guess(sides.pixels)
    loss = plain.loss(sides.pixels, guess.labels)
    theirs = dict(zip(plain.names, torch.autograd.grad(loss, plain.candidates()), strict=True))
    weights = student.backbone.first_mlp_weights()
    (mine,) = student.iter_gradients([guess.loss], weights)
    gaps = [((mine[n] - g).norm() / g.norm()).item() for n, g in theirs.items()]
    best = cosines.max(dim=1).values
    missed = best - cosines.gather(1, guess.labels[:, None]).squeeze(1)
    found = {
        "losses": abs(guess.loss.item() - loss.item()) / loss.item(),
        "labels": missed.max().item(),
        "gradients": max(gaps),
    }
    with torch.no_grad():
        student.sync_copy(method.teacher)
        for name, weight in weights.items():
            other[name].copy_(weight)
    return _checked(found, NEAR, "in float32")


def _apart(ours: Any, theirs: Any) -> float:
    other = dict(theirs.named_parameters())
    gaps = [(w - other[n]).abs().max().item() for n, w in ours.weights().items()]
    return float(max(gaps))


def _checked(found: dict[str, float], most: float, where: str) -> dict[str, float]:
    for name, gap in found.items():
        if not gap <= most:
            raise NotEquivalentError(f"{name} of the two implementations differ by {gap:g} {where}")
    return found
