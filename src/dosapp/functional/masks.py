"""Which weights may move: gradient scores → top fraction → union over tasks (Eq. 1, m and m_u)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
Scores = dict[str, Tensor]
Mask = dict[str, Tensor]  # bool, True where a weight moves

Combine = Literal["max", "sum", "last", "normalised"]
Scope = Literal["tensor", "global"]


def gradient_scores(gradients: Iterable[Weights]) -> Scores:
    """|mean gradient| of every weight over one pass of the data: F in Eq. 1.

    The absolute value comes last, so that gradients of opposite sign cancel.
    """
    total: dict[str, Tensor] = {}
    count = 0
    for found in gradients:
        for name, grad in found.items():
            total[name] = total[name] + grad if name in total else grad
        count += 1
    if count == 0:
        raise ValueError("cannot score weights on an empty stream of losses")
    return {name: (grad / count).abs() for name, grad in total.items()}


def iter_gradients(weights: Weights, losses: Iterable[Tensor]) -> Iterator[dict[str, Tensor]]:
    """The gradient of each loss in turn."""
    for loss in losses:
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        yield {
            name: torch.zeros_like(weights[name]) if grad is None else grad
            for name, grad in zip(weights, grads, strict=True)
        }


def top_count(fraction: float, numel: int) -> int:
    """floor(c · n), forgiving the last bit of c, and never nothing."""
    return max(1, int(fraction * numel + 1e-6))


def top_fraction(scores: Scores, fraction: float, scope: Scope = "tensor") -> Mask:
    """True for the highest-scoring `fraction` of each tensor (or of all); zeros never count."""
    if scope == "global":
        everything = torch.cat([score.flatten() for score in scores.values()])
        kept = _top(everything, fraction).split([score.numel() for score in scores.values()])
        return {name: keep.view_as(scores[name]) for name, keep in zip(scores, kept, strict=True)}
    return {name: _top(s.flatten(), fraction).view_as(s) for name, s in scores.items()}


def _top(flat: Tensor, fraction: float) -> Tensor:
    keep = torch.zeros_like(flat, dtype=torch.bool)
    keep[flat.topk(top_count(fraction, flat.numel())).indices] = True
    return keep & (flat > 0)


def merge_scores(best: Scores, scores: Scores, mask: Mask, how: Combine = "max") -> Scores:
    """Scores of the tasks so far, zero outside m_1 ∪ … ∪ m_t.

    One tensor instead of a list of masks: its support is the union, and m_u is its top fraction.
    The paper leaves open how the scores of several tasks combine (docs/paper-notes.md#union).
    """
    result: Scores = {}
    for name, score in scores.items():
        new, old = score * mask[name], best.get(name, torch.zeros_like(score))
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
    mask: Mask, scores: Scores, owner: Mapping[str, Tensor], fraction: float, turn: int
) -> Mask:
    """The mask with a share of it lent to entries that earlier sessions chose and it has lost.

    Each session whose entries `owner` names (from 1) gets an equal part of the share, filled with
    its entries outside the mask by score; the next turn goes on where this one stopped. As many of
    the mask's own entries, those with the lowest scores, rest meanwhile.
    """
    result: Mask = {}
    for name, own in mask.items():
        flat, score, whose = own.flatten(), scores[name].flatten(), owner[name].flatten()
        lost = ~flat & (whose > 0)
        sessions = whose[lost].unique().tolist()
        room = int(fraction * flat.sum()) // max(1, len(sessions))
        lent: list[Tensor] = []
        for session in sessions:
            waiting = (lost & (whose == session)).nonzero().squeeze(1)
            waiting = waiting[score[waiting].argsort(descending=True)]
            start = turn * room % len(waiting)
            lent.append(waiting.roll(-start)[:room])
        mine = flat.nonzero().squeeze(1)
        back = torch.cat([*lent, mine[:0]])
        resting = mine[score[mine].argsort()[: len(back)]]
        now = flat.clone()
        now[resting], now[back] = False, True
        result[name] = now.view_as(own)
    return result
