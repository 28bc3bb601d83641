"""Gradient scores → mask of the top fraction → union over tasks (Eq. 1, m and m_u)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Scores = dict[str, Tensor]
Mask = dict[str, Tensor]  # bool, True for entries that train

Merge = Literal["max", "sum", "last", "normalised"]
Scope = Literal["tensor", "global"]


def iter_gradients(weights: Weights, losses: Iterable[Tensor]) -> Iterator[dict[str, Tensor]]:
    """The gradient of each loss in turn; zeros for weights that a loss does not use."""
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        yield {
            name: torch.zeros_like(weights[name]) if gradient is None else gradient
            for name, gradient in zip(weights, gradients, strict=True)
        }


def gradient_scores(gradients: Iterable[Weights]) -> Scores:
    """|mean gradient| of every entry over one pass of the data: F in Eq. 1.

    The absolute value comes last, so that gradients of opposite sign cancel.
    """
    total: dict[str, Tensor] = {}
    count = 0
    for by_name in gradients:
        for name, gradient in by_name.items():
            total[name] = total[name] + gradient if name in total else gradient
        count += 1
    if count == 0:
        raise ValueError("cannot score weights without losses")
    return {name: (gradient / count).abs() for name, gradient in total.items()}


def top_count(fraction: float, numel: int) -> int:
    """floor(c · n), tolerant to the last bit of c, and at least 1."""
    return max(1, int(fraction * numel + 1e-6))


def top_fraction(scores: Scores, fraction: float, scope: Scope = "tensor") -> Mask:
    """Mask of the highest scores, in each tensor or over all tensors; zeros are never selected."""
    if scope == "global":
        flat = torch.cat([score.flatten() for score in scores.values()])
        parts = _top_mask(flat, fraction).split([score.numel() for score in scores.values()])
        return {name: m.view_as(scores[name]) for name, m in zip(scores, parts, strict=True)}
    return {name: _top_mask(s.flatten(), fraction).view_as(s) for name, s in scores.items()}


def _top_mask(flat: Tensor, fraction: float) -> Tensor:
    mask = torch.zeros_like(flat, dtype=torch.bool)
    mask[flat.topk(top_count(fraction, flat.numel())).indices] = True
    return mask & (flat > 0)


def merge_scores(merged: Scores, scores: Scores, mask: Mask, how: Merge = "max") -> Scores:
    """Merge a task's scores into those of the tasks before it; zero outside m_1 ∪ … ∪ m_t.

    One tensor stands for the list of masks: its support is their union, and m_u is its top
    fraction. The paper leaves open how scores of several tasks merge (docs/paper-notes.md#union).
    """
    result: Scores = {}
    for name, score in scores.items():
        new, old = score * mask[name], merged.get(name, torch.zeros_like(score))
        if how == "normalised":
            new = new / new.max().clamp(min=torch.finfo(new.dtype).tiny)
        if how == "sum":
            result[name] = old + new
        elif how == "last":
            result[name] = torch.where(mask[name], new, old)
        else:
            result[name] = torch.maximum(old, new)
    return result


def reactivate_entries(
    mask: Mask, scores: Scores, source_session: Mapping[str, Tensor], fraction: float, rotation: int
) -> Mask:
    """Swap a fraction of the mask for entries that earlier sessions selected and it has lost.

    Every session gets an equal part of the fraction and fills it with its entries outside the mask,
    by score; the next rotation continues where this one stopped. As many entries of the mask, those
    with the lowest scores, are swapped out.

    Args:
        mask: The mask of the stream.
        scores: Best score of every entry over all sessions.
        source_session: The session, from 1, of that score; 0 if the entry was never selected.
        fraction: Share of the mask that is swapped.
        rotation: Number of the rotation, from 0.

    Returns:
        A mask with as many entries as before.
    """
    result: Mask = {}
    for name, weight_mask in mask.items():
        flat, score, session_of = (
            t.flatten() for t in (weight_mask, scores[name], source_session[name])
        )
        lost = ~flat & (session_of > 0)
        sessions = session_of[lost].unique().tolist()
        room = int(fraction * flat.sum()) // max(1, len(sessions))
        swapped_in: list[Tensor] = []
        for session in sessions:
            candidates = (lost & (session_of == session)).nonzero().squeeze(1)
            candidates = candidates[score[candidates].argsort(descending=True)]
            start = rotation * room % len(candidates)
            swapped_in.append(candidates.roll(-start)[:room])
        own = flat.nonzero().squeeze(1)
        active = torch.cat([*swapped_in, own[:0]])
        swapped_out = own[score[own].argsort()[: len(active)]]
        changed = flat.clone()
        changed[swapped_out], changed[active] = False, True
        result[name] = changed.view_as(weight_mask)
    return result
