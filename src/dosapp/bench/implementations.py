"""Ours and the plain one, from the same random weights, with the same masks and batches."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dosapp.bench.baseline import BaselineDoSAPP
from dosapp.bench.model import pictures, random_clip
from dosapp.data.base import Prompts
from dosapp.functional.masks import Mask, Scores, top_fraction
from dosapp.methods.dosapp import DoSAPP
from dosapp.runtime.process_memory import retain_freed_memory
from dosapp.settings import PAPER_LR
from dosapp.student.selection import Selection
from dosapp.student.student import Student

RATE, DECAY, SHARE = PAPER_LR, 0.2, 0.1
PROMPTS = Prompts(train="{}", evaluate=("{}",))


class Implementations:
    """Models are built once; `sized` says with how many classes and images they work."""

    def __init__(
        self, config: Mapping[str, Any], *, double: bool = False, lr: float = RATE
    ) -> None:
        retain_freed_memory()  # as every learner does; the plain side gains as much
        net, other = random_clip(config), random_clip(config)
        if double:
            net.model.double()
            other.model.double()
        self.student = Student(net, lr=lr, weight_decay=DECAY)
        self.method = DoSAPP()
        self.method.setup(self.student)
        self.plain = BaselineDoSAPP(other, lr=lr, weight_decay=DECAY)
        self.masked(0)

    def masked(self, seed: int) -> None:
        """A session has chosen another tenth of the candidates."""
        generator = torch.Generator().manual_seed(seed)
        weights = self.student.backbone.first_mlp_weights()
        scores = {n: torch.rand(w.shape, generator=generator) for n, w in weights.items()}
        self.mask: Mask = top_fraction(scores, SHARE)
        self.student.select(Selection(tuple(self.mask), self.mask))
        self.plain.begin(self.mask)

    def sized(self, batch: int, classes: int) -> "Implementations":
        names = [f"class {n}" for n in range(classes)]
        self.student.classes, self.student.prompts = [], {}
        self.student.add_classes(names, PROMPTS)
        self.plain.add_classes(names)
        self.pixels = pictures(batch, self.student.backbone.image_size)
        self.labels = torch.arange(batch) % classes
        return self

    # What is compared

    def stream(self) -> Tensor:
        guess = self.method.stream_loss(self.student, self.pixels)
        assert guess.loss is not None
        self.student.step(guess.loss)
        self.method.after_stream_step(self.student)
        return guess.labels

    def plain_stream(self) -> None:
        self.plain.adapt(self.pixels)

    def lesson(self) -> None:
        self.student.step(self.student.clip_loss(self.pixels, self.labels))
        self.method.after_step(self.student)

    def plain_lesson(self) -> None:
        self.plain.lesson(self.pixels, self.labels)

    def selection(self) -> Mask:
        """One batch of the pass that scores the candidates, and the choice."""
        losses = (self.student.clip_loss(self.pixels, self.labels) for _ in range(1))
        scores: Scores = self.student.score_weights(
            self.student.backbone.first_mlp_weights(), losses
        )
        return top_fraction(scores, SHARE)

    def plain_selection(self) -> Mask:
        return self.plain.choose([(self.pixels, self.labels)], SHARE)

    @torch.inference_mode()
    def evaluation(self) -> Tensor:
        """Two batches after the teacher has moved: captions are read once."""
        teacher, student = self.method.teacher, self.student
        teacher.revision += 1
        names = dict.fromkeys(student.classes, PROMPTS)
        texts = [student.class_embeddings(teacher, names) for _ in range(2)]
        found = [teacher.encode_image(self.pixels) @ text.T for text in texts]
        return torch.cat(found).argmax(dim=1)

    @torch.inference_mode()
    def plain_evaluation(self) -> Tensor:
        return self.plain.answers([self.pixels, self.pixels])

    @torch.inference_mode()
    def bare(self) -> Tensor:
        """An image forward and nothing else."""
        return self.student.backbone.encode_image(self.pixels)

    # Bare forwards of the plain side's towers, by the library: what its own work is counted in

    @torch.inference_mode()
    def images(self) -> Tensor:
        return self.plain.images(self.plain.student, self.pixels)

    @torch.inference_mode()
    def texts(self) -> Tensor:
        """The captions of all classes."""
        return self.plain.texts(self.plain.student, self.plain.ids)

    @torch.inference_mode()
    def captions(self) -> Tensor:
        """One caption per image."""
        return self.plain.texts(self.plain.student, self.plain.ids[self.labels])

    # What is held beside one model, in bytes

    def held(self) -> int:
        mine, theirs = self.student.backbone.weights(), self.method.teacher.weights()
        entries, chosen = self.student._parameters.values(), self.student.selection
        kept: list[Tensor | None] = [theirs[n] for n in theirs if theirs[n] is not mine[n]]
        kept += [t for e in entries for t in (e.values, e.values.grad, e.where)]
        kept += [*self.student.optimizer_state().values(), *self.student._differing.values()]
        kept += [*(chosen.mask or {}).values(), *(chosen.scores or {}).values()]
        largest = max(mine[n].numel() * mine[n].element_size() for n in chosen.names)
        return storages(kept) + largest  # one dense gradient is alive at a time

    def plain_held(self) -> int:
        weights = self.plain.weights()
        kept: list[Tensor | None] = [*self.plain.teacher.parameters(), *self.mask.values()]
        kept += [weights[name].grad for name in self.plain.names]
        states = self.plain.optimizer.state.values()
        kept += [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return storages(kept)

    def scored(self) -> int:
        """Scores of past sessions, one for each candidate: both sides need them for the union."""
        return storages(self.student.backbone.first_mlp_weights().values())

    def reduced(self) -> float:
        """Gradients that a step sends to other processes, as a share of all candidates."""
        sent = sum(e.values.numel() for e in self.student._parameters.values())
        return sent / sum(w.numel() for w in self.student.backbone.first_mlp_weights().values())

    def update_share(self, repeats: int) -> float:
        """The optimizer's part and the averaging, inside whole steps of the stream."""
        shares = []
        for _ in range(repeats):
            with _stopwatch(self.student) as spent:
                start = time.perf_counter()
                self.stream()
                shares.append(spent[0] / (time.perf_counter() - start))
        return statistics.median(shares)


def storages(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all their storages, each counted once however many tensors look at it."""
    found = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


@contextmanager
def _stopwatch(student: Student) -> Iterator[list[float]]:
    """Seconds in everything of a step that is not forward or backward."""
    spent = [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                spent[0] += time.perf_counter() - start

        return wrapped

    assert student._optimizer is not None
    watched = [(student, "ema_update"), (student._optimizer, "step")]
    watched += [(e, name) for e in student._parameters.values() for name in ("refresh", "scatter")]
    for owner, name in watched:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name in watched:
            delattr(owner, name)
