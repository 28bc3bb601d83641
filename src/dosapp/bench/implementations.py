"""DoSAPP and the baseline, with the same random weights, masks and batches."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dosapp.bench.baseline import BaselineDoSAPP
from dosapp.bench.model import random_clip, random_images
from dosapp.data.base import Prompts
from dosapp.functional.masks import Mask, Scores, top_fraction
from dosapp.methods.dosapp import DoSAPP
from dosapp.runtime.process_memory import retain_freed_memory
from dosapp.settings import PAPER_LR
from dosapp.student.student import Student
from dosapp.student.text_head import TextHead
from dosapp.student.trainable_weights import Selection

WEIGHT_DECAY, SPARSITY = 0.2, 0.1
PROMPTS = Prompts(train="{}", evaluate=("{}",))


class Implementations:
    """Both implementations, built once; `set_size` sets the batch and the number of classes.

    Args:
        config: Fields of a `CLIPConfig`.
        double: Compute in float64.
        lr: Learning rate.
    """

    def __init__(
        self, config: Mapping[str, Any], *, double: bool = False, lr: float = PAPER_LR
    ) -> None:
        retain_freed_memory()  # as every learner does; the baseline gains as much
        backbone, baseline_backbone = random_clip(config), random_clip(config)
        if double:
            backbone.model.double()
            baseline_backbone.model.double()
        self.student = Student(backbone, lr=lr, weight_decay=WEIGHT_DECAY)
        self.method = DoSAPP()
        self.method.setup(self.student)
        self.baseline = BaselineDoSAPP(baseline_backbone, lr=lr, weight_decay=WEIGHT_DECAY)
        self.set_random_mask(0)

    def set_random_mask(self, seed: int) -> None:
        """Train another tenth of the candidates, as a new session would."""
        generator = torch.Generator().manual_seed(seed)
        weights = self.student.backbone.first_mlp_weights()
        scores = {n: torch.rand(w.shape, generator=generator) for n, w in weights.items()}
        self.mask: Mask = top_fraction(scores, SPARSITY)
        self.student.select_for_session(Selection(tuple(self.mask), self.mask))
        self.baseline.set_mask(self.mask)

    def set_size(self, batch_size: int, classes: int) -> "Implementations":
        """Set the number of images per batch and of classes; returns self."""
        names = [f"class {n}" for n in range(classes)]
        self.student.text_head = TextHead()
        self.student.text_head.add_classes(names, PROMPTS)
        self.baseline.add_classes(names)
        self.pixels = random_images(batch_size, self.student.backbone.image_size)
        self.labels = torch.arange(batch_size) % classes
        return self

    # The pairs that are compared

    def stream_step(self) -> Tensor:
        """One unlabelled step; returns the pseudo-labels."""
        result = self.method.stream_loss(self.student, self.pixels)
        assert result.loss is not None
        self.student.step(result.loss)
        self.method.after_stream_step(self.student)
        return result.labels

    def baseline_stream_step(self) -> None:
        """One unlabelled step of the baseline."""
        self.baseline.adapt(self.pixels)

    def training_step(self) -> None:
        """One labelled step."""
        self.student.step(self.student.clip_loss(self.pixels, self.labels))
        self.method.after_step(self.student)

    def baseline_training_step(self) -> None:
        """One labelled step of the baseline."""
        self.baseline.training_step(self.pixels, self.labels)

    def select_mask(self) -> Mask:
        """Score the candidates with one batch and select the mask."""
        losses = (self.student.clip_loss(self.pixels, self.labels) for _ in range(1))
        scores: Scores = self.student.gradient_scores(
            self.student.backbone.first_mlp_weights(), losses
        )
        return top_fraction(scores, SPARSITY)

    def baseline_select_mask(self) -> Mask:
        """The same with the baseline."""
        return self.baseline.select_mask([(self.pixels, self.labels)], SPARSITY)

    @torch.inference_mode()
    def evaluate(self) -> Tensor:
        """Predict two batches after the teacher has changed: captions are encoded once."""
        teacher, text_head = self.method.teacher, self.student.text_head
        teacher.revision += 1
        texts = [text_head.class_embeddings(teacher) for _ in range(2)]
        logits = [teacher.encode_image(self.pixels) @ text.T for text in texts]
        return torch.cat(logits).argmax(dim=1)

    @torch.inference_mode()
    def baseline_evaluate(self) -> Tensor:
        """The same with the baseline."""
        return self.baseline.predict([self.pixels, self.pixels])

    # Bare forwards: ours is the unit of `limit`, the baseline's are what its steps are counted in

    @torch.inference_mode()
    def encode_images(self) -> Tensor:
        """One image forward, ours."""
        return self.student.backbone.encode_image(self.pixels)

    @torch.inference_mode()
    def baseline_encode_images(self) -> Tensor:
        """One image forward of the library."""
        return self.baseline.encode_images(self.baseline.student, self.pixels)

    @torch.inference_mode()
    def baseline_encode_texts(self) -> Tensor:
        """One text forward of the library, for the captions of all classes."""
        return self.baseline.encode_texts(self.baseline.student, self.baseline.ids)

    @torch.inference_mode()
    def baseline_encode_captions(self) -> Tensor:
        """One text forward of the library, for one caption per image."""
        return self.baseline.encode_texts(self.baseline.student, self.baseline.ids[self.labels])

    # Memory beyond one inference-only model, in bytes

    def extra_bytes(self) -> int:
        """Teacher, gradients, optimizer state, masks and indices."""
        weights, teacher = self.student.backbone.weights(), self.method.teacher.weights()
        copied = [teacher[n] for n in teacher if teacher[n] is not weights[n]]
        largest = max(p.weight.nbytes for p in self.student.trainable.values())
        # One dense gradient exists at a time.
        return storage_bytes([*copied, *self.student.held_tensors()]) + largest

    def baseline_extra_bytes(self) -> int:
        """The same for the baseline."""
        weights = self.baseline.weights()
        tensors: list[Tensor | None] = [*self.baseline.teacher.parameters(), *self.mask.values()]
        tensors += [weights[name].grad for name in self.baseline.names]
        states = self.baseline.optimizer.state.values()
        tensors += [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return storage_bytes(tensors)

    def score_bytes(self) -> int:
        """One score per candidate, which both need for the union of masks."""
        return storage_bytes(self.student.backbone.first_mlp_weights().values())

    def allreduce_share(self) -> float:
        """Gradients that a step sends to other processes, as a share of all candidates."""
        sent = sum(p.values.numel() for p in self.student.trainable.values())
        return sent / sum(w.numel() for w in self.student.backbone.first_mlp_weights().values())

    def update_share(self, repeats: int) -> float:
        """Median share of optimizer and EMA in the time of a stream step."""
        shares = []
        for _ in range(repeats):
            with _timed_methods(self.student, "update_weights", "ema_update") as seconds:
                start = time.perf_counter()
                self.stream_step()
                shares.append(sum(seconds) / (time.perf_counter() - start))
        return statistics.median(shares)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all storages, each counted once however many tensors share it.

    Example:
        >>> row = torch.zeros(10)
        >>> storage_bytes([row, row[:5], None])
        40
    """
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@contextmanager
def _timed_methods(instance: object, *names: str) -> Iterator[list[float]]:
    """Collect the seconds of every call of these methods of one object."""
    seconds: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        return wrapped

    for name in names:
        setattr(instance, name, timed(getattr(instance, name)))
    try:
        yield seconds
    finally:
        for name in names:
            delattr(instance, name)
