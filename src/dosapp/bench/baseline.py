"""DoSAPP as one writes it down first: correct, and nothing is saved.

77 tokens per caption, one caption per image, a second model for the teacher, a forward of the
student for labels and another for the loss, dense AdamW and dense averaging over all candidates,
gradients masked afterwards.
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

ROOM = 77


class BaselineDoSAPP:
    def __init__(
        self,
        net: CLIPBackbone,
        *,
        lr: float,
        weight_decay: float,
        gamma: float = 0.8,
        lam: float = 0.9,
        delta: float = 0.9999,
    ) -> None:
        self.student: Any = net.model
        self.tokenizer, self.mean, self.std = net.tokenizer, net._mean, net._std
        self.lr, self.weight_decay = lr, weight_decay
        self.gamma, self.lam, self.delta = gamma, lam, delta
        wanted = set(net.first_mlp_weights())
        for name, weight in self.student.named_parameters():
            weight.requires_grad_(name in wanted)
        self.names = [n for n, _ in self.student.named_parameters() if n in wanted]
        self.teacher: Any = copy.deepcopy(self.student)

    def add_classes(self, classes: Sequence[str]) -> None:
        room = min(ROOM, self.student.config.text_config.max_position_embeddings)
        ids = torch.tensor(self.tokenizer(classes)["input_ids"])
        pad = torch.zeros(len(ids), room - ids.shape[1], dtype=ids.dtype)
        self.ids = torch.cat([ids, pad], dim=1)  # [C, 77]

    def begin(self, mask: Mask) -> None:
        """A phase: another mask, a fresh optimizer."""
        self.mask = mask
        self.optimizer = torch.optim.AdamW(
            self.candidates(), lr=self.lr, weight_decay=self.weight_decay
        )

    def choose(self, batches: Sequence[tuple[Tensor, Tensor]], share: float) -> Mask:
        """The candidates with the largest mean gradient."""
        total = [torch.zeros_like(weight) for weight in self.candidates()]
        for pixels, labels in batches:
            grads = torch.autograd.grad(self.loss(pixels, labels), self.candidates())
            total = [old + grad for old, grad in zip(total, grads, strict=True)]
        mask = {}
        for name, grad in zip(self.names, total, strict=True):
            flat = (grad / len(batches)).abs().flatten()
            keep = torch.zeros_like(flat, dtype=torch.bool)
            keep[flat.topk(int(share * len(flat))).indices] = True
            mask[name] = keep.view_as(grad)
        return mask

    def lesson(self, pixels: Tensor, labels: Tensor) -> Tensor:
        loss = self.loss(pixels, labels)
        self._step(loss, self.gamma)
        return loss.detach()

    def adapt(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        labels, _ = self.guess(pixels)
        loss = self.loss(pixels, labels)
        self._step(loss, self.lam)
        return loss.detach(), labels

    @torch.no_grad()
    def guess(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Labels of the surer expert, and the larger of their cosines `[B, C]`."""
        teacher, student = (
            self.images(model, pixels) @ self.texts(model, self.ids).T
            for model in (self.teacher, self.student)
        )
        t, s = teacher.max(dim=1), student.max(dim=1)
        labels = torch.where(t.values >= s.values, t.indices, s.indices)
        return labels, torch.maximum(teacher, student)

    def answers(self, batches: Sequence[Tensor]) -> Tensor:
        texts = self.texts(self.teacher, self.ids)
        found = [self.images(self.teacher, pixels) @ texts.T for pixels in batches]
        return torch.cat(found).argmax(dim=1)

    def loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        images = self.images(self.student, pixels)
        texts = self.texts(self.student, self.ids[labels])
        return clip_loss(images, texts, self.student.logit_scale.exp())

    def _step(self, loss: Tensor, active: float) -> None:
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
        return dict(self.student.named_parameters())

    def candidates(self) -> list[Any]:
        weights = self.weights()
        return [weights[name] for name in self.names]

    def images(self, model: Any, pixels: Tensor) -> Tensor:
        pixels = pixels.to(model.logit_scale)
        pixels = (pixels - self.mean.to(pixels)) / self.std.to(pixels)
        seen = model.vision_model(pixel_values=pixels).pooler_output
        return normalize(model.visual_projection(seen), dim=-1)

    def texts(self, model: Any, ids: Tensor) -> Tensor:
        read = model.text_model(input_ids=ids).pooler_output
        return normalize(model.text_projection(read), dim=-1)
