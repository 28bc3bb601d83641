"""DoSAPP written down directly, without any saving: the baseline of the benchmark.

77 tokens per caption, one caption per image, a second model for the teacher, one forward of the
student for pseudo-labels and another for the loss, dense AdamW and dense EMA over all candidates,
gradients masked after the backward.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dosapp.backbones.clip import CLIPBackbone
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import Mask

CONTEXT_LENGTH = 77


class BaselineDoSAPP:
    """Student, teacher, mask and optimizer of the plain implementation.

    Args:
        backbone: The pretrained model; becomes the student.
        lr: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        gamma: EMA decay inside the mask, with labels.
        lam: EMA decay inside the mask, without labels.
        delta: EMA decay outside the mask.
    """

    def __init__(
        self,
        backbone: CLIPBackbone,
        *,
        lr: float,
        weight_decay: float,
        gamma: float = 0.8,
        lam: float = 0.9,
        delta: float = 0.9999,
    ) -> None:
        self.student: Any = backbone.model
        self.tokenizer = backbone.tokenizer
        self.mean, self.std = backbone.image_mean, backbone.image_std
        self.lr, self.weight_decay = lr, weight_decay
        self.gamma, self.lam, self.delta = gamma, lam, delta
        candidates = set(backbone.first_mlp_weights())
        for name, weight in self.student.named_parameters():
            weight.requires_grad_(name in candidates)
        self.names = [n for n, _ in self.student.named_parameters() if n in candidates]
        self.teacher: Any = copy.deepcopy(self.student)

    def add_classes(self, classes: Sequence[str]) -> None:
        """Tokenize one caption per class, padded to the full context length."""
        length = min(CONTEXT_LENGTH, self.student.config.text_config.max_position_embeddings)
        ids = torch.tensor(self.tokenizer(classes)["input_ids"])
        pad = torch.zeros(len(ids), length - ids.shape[1], dtype=ids.dtype)
        self.ids = torch.cat([ids, pad], dim=1)  # [C, 77]

    def set_mask(self, mask: Mask) -> None:
        """Begin a phase: another mask and a new optimizer."""
        self.mask = mask
        self.optimizer = torch.optim.AdamW(
            self.candidates(), lr=self.lr, weight_decay=self.weight_decay
        )

    def select_mask(self, batches: Sequence[tuple[Tensor, Tensor]], fraction: float) -> Mask:
        """Select the candidates with the largest mean gradient (Eq. 1)."""
        total = [torch.zeros_like(weight) for weight in self.candidates()]
        for pixels, labels in batches:
            grads = torch.autograd.grad(self.loss(pixels, labels), self.candidates())
            total = [old + grad for old, grad in zip(total, grads, strict=True)]
        mask = {}
        for name, grad in zip(self.names, total, strict=True):
            flat = (grad / len(batches)).abs().flatten()
            keep = torch.zeros_like(flat, dtype=torch.bool)
            keep[flat.topk(int(fraction * len(flat))).indices] = True
            mask[name] = keep.view_as(grad)
        return mask

    def training_step(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Train on a labelled batch; returns the loss."""
        loss = self.loss(pixels, labels)
        self._update(loss, self.gamma)
        return loss.detach()

    def adapt(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Train on an unlabelled batch; returns the loss and the pseudo-labels."""
        labels, _ = self.pseudo_labels(pixels)
        loss = self.loss(pixels, labels)
        self._update(loss, self.lam)
        return loss.detach(), labels

    @torch.no_grad()
    def pseudo_labels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels `[B]` of the expert with the larger maximum, and the larger logits `[B, C]`."""
        teacher, student = (
            self.encode_images(model, pixels) @ self.encode_texts(model, self.ids).T
            for model in (self.teacher, self.student)
        )
        t, s = teacher.max(dim=1), student.max(dim=1)
        labels = torch.where(t.values >= s.values, t.indices, s.indices)
        return labels, torch.maximum(teacher, student)

    def predict(self, batches: Sequence[Tensor]) -> Tensor:
        """The teacher's class indices for all images of the batches."""
        texts = self.encode_texts(self.teacher, self.ids)
        logits = [self.encode_images(self.teacher, pixels) @ texts.T for pixels in batches]
        return torch.cat(logits).argmax(dim=1)

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """CLIP's loss of the student, one caption per image."""
        images = self.encode_images(self.student, pixels)
        texts = self.encode_texts(self.student, self.ids[labels])
        return clip_loss(images, texts, self.student.logit_scale.exp())

    def _update(self, loss: Tensor, active: float) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        weights, teacher = self.weights(), dict(self.teacher.named_parameters())
        with torch.no_grad():
            before = {name: weights[name].clone() for name in self.names}
            for name in self.names:
                weights[name].grad.mul_(self.mask[name])
            self.optimizer.step()
            for name in self.names:
                weights[name].copy_(torch.where(self.mask[name], weights[name], before[name]))
                p = torch.where(self.mask[name], active, self.delta).to(weights[name])
                teacher[name].mul_(p).add_((1 - p) * weights[name])

    def weights(self) -> dict[str, Any]:
        """All weights of the student by name."""
        return dict(self.student.named_parameters())

    def candidates(self) -> list[Any]:
        """The weights of the first MLP layers, which may train."""
        weights = self.weights()
        return [weights[name] for name in self.names]

    def encode_images(self, model: Any, pixels: Tensor) -> Tensor:
        """Unit image features `[B, D]`."""
        pixels = pixels.to(model.logit_scale)
        pixels = (pixels - self.mean.to(pixels)) / self.std.to(pixels)
        pooled = model.vision_model(pixel_values=pixels).pooler_output
        return normalize(model.visual_projection(pooled), dim=-1)

    def encode_texts(self, model: Any, ids: Tensor) -> Tensor:
        """Unit text features of token ids `[N, 77]`."""
        pooled = model.text_model(input_ids=ids).pooler_output
        return normalize(model.text_projection(pooled), dim=-1)
