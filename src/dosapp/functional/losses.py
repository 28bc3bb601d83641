"""CLIP's contrastive loss, and the terms that methods add to it."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax

Named = Mapping[str, Tensor]


def clip_loss(
    images: Tensor, texts: Tensor, scale: Tensor | float, negatives: Tensor | None = None
) -> Tensor:
    """Symmetric InfoNCE over B pairs of unit features `[B, D]`, targets on the diagonal.

    Equal captions in a batch are each other's negatives, as in FLYP and SPU: with all B captions
    equal the loss is log B, and a batch of one has loss zero.

    Args:
        images: Image features `[B, D]`.
        texts: Features of the images' captions `[B, D]`.
        scale: exp(logit_scale).
        negatives: Features of captions that no image of the batch has `[R, D]`; with them a batch
            of a single class has a gradient.

    Returns:
        The scalar loss.

    Example:
        >>> features = torch.eye(2)
        >>> round(clip_loss(features, features, 1.0).item(), 4)
        0.3133
    """
    logits = scale * images @ texts.T  # [B, B]
    target = torch.arange(len(logits), device=logits.device)
    columns = logits
    if negatives is not None:
        columns = torch.cat([logits, scale * images @ negatives.T], dim=1)
    return (cross_entropy(columns, target) + cross_entropy(logits.T, target)) / 2


def distillation_loss(new: Tensor, old: Tensor, temperature: float) -> Tensor:
    """KL(old ‖ new) of softened rows `[B, C]`, summed; no T² factor (LwF as in SPU's code)."""
    return kl_div(
        log_softmax(new / temperature, dim=1), (old / temperature).softmax(dim=1), reduction="sum"
    )


def relation_distillation_loss(new: Tensor, old: Tensor, temperature: float) -> Tensor:
    """PRD: keep the ranking of the batch's images for each caption; logits `[B, B]`.

    The mean over captions of the cross-entropy between the old and the new softmax over images.
    """
    target = (old.T / temperature).softmax(dim=1)
    return cross_entropy(new.T / temperature, target)


def entropy(logits: Tensor) -> Tensor:
    """Of each row's softmax, in nats `[B]`."""
    logs = log_softmax(logits, dim=1)
    return -(logs.exp() * logs).sum(dim=1)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """-Σ target · log softmax(logits), per row `[B]`; targets are probabilities `[B, C]`."""
    return -(target * log_softmax(logits, dim=1)).sum(dim=1)


def symmetric_cross_entropy(new: Tensor, old: Tensor) -> Tensor:
    """½ CE(old → new) + ½ CE(new → old) of logits `[B, C]`, per row `[B]` (RMT's Eq. 3)."""
    there = soft_cross_entropy(new, old.softmax(dim=1))
    back = soft_cross_entropy(old, new.softmax(dim=1))
    return (there + back) / 2


def complementary_loss(logits: Tensor, excluded: Tensor) -> Tensor:
    """-log(1 - p), averaged over the excluded classes of each row `[B]`."""
    logs = log_softmax(logits, dim=1)
    away = -torch.log1p(-logs.exp().clamp(max=1 - 1e-6))
    return (away * excluded).sum(dim=1) / excluded.sum(dim=1).clamp(min=1)


def masked_cross_entropy(logits: Tensor, labels: Tensor, allowed: Tensor) -> Tensor:
    """Cross-entropy over the allowed classes of each row, `allowed [B, C]`."""
    return cross_entropy(logits.masked_fill(~allowed, -torch.inf), labels)


def supervised_contrastive_loss(views: Tensor, temperature: float) -> Tensor:
    """SupCon over V unit views of B instances `[V, B, D]`: views of one instance attract.

    Every view is an anchor ("all" mode); its positives are the instance's other views.
    """
    count, instances = views.shape[:2]
    flat = views.reshape(count * instances, -1)
    same = torch.arange(instances, device=views.device).repeat(count)
    logits = flat @ flat.T / temperature
    itself = torch.eye(len(flat), dtype=torch.bool, device=views.device)
    positive = (same[:, None] == same[None]) & ~itself
    logs = log_softmax(logits.masked_fill(itself, -torch.inf), dim=1)
    return -(logs.masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1)).mean()


def quadratic_penalty(weights: Named, anchor: Named, cost: Named) -> Tensor:
    """Σ cost · (θ - θ*)² over the weights that have a cost (MAS, EATA, PSMT)."""
    terms = [(c * (weights[n] - anchor[n]).square()).sum() for n, c in cost.items()]
    return torch.stack(terms).sum() if terms else torch.zeros(())
