"""Side by side in one process: repetitions take turns, medians are compared, seconds are not.

ttl_…          a step on the stream, plain ÷ ours
supervised_…   a step with labels, plain ÷ ours; frozen tensors have no gradient in either
limit          ours on the stream ÷ 3.33 image forwards of the same batch, what the arithmetic needs
memory         what ours holds beside one model ÷ what the plain one holds beside it
update_share   optimizer and averaging, as a share of our step at batch 8
allreduce      bytes a step sends with several processes ÷ bytes of the dense candidates
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dosapp.bench.model import pictures, random_clip
from dosapp.bench.plain import Plain
from dosapp.core.masks import Mask, top_fraction
from dosapp.data.base import Prompts
from dosapp.methods.dosapp import DoSAPP
from dosapp.student import Selection, Student

FORWARDS = 3.33  # student forward and backward to its inputs and candidates, teacher forward


@dataclass
class Timed:
    """Seconds of repetitions that took turns with others."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def race(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Timed]:
    """One round warms up; then everybody once per round, in alternating order."""
    found = {name: Timed() for name in sides}
    for turn in range(repeats + 1):
        for name in sides if turn % 2 else reversed(list(sides)):
            start = time.perf_counter()
            sides[name]()
            if turn:
                found[name].seconds.append(time.perf_counter() - start)
    return found


class Sides:
    """Ours and the plain one, from the same random weights, with the same masks and batches."""

    def __init__(self, config: Mapping[str, Any], classes: int, batch: int) -> None:
        names = [f"class {n}" for n in range(classes)]
        net, other = random_clip(config), random_clip(config)
        self.floor = random_clip(config)
        self.student = Student(net, lr=7.5e-6, weight_decay=0.2)
        self.student.meet(names, Prompts(train="{}", evaluate=("{}",)))
        self.method = DoSAPP()
        self.method.start(self.student)
        self.plain = Plain(other, names, lr=7.5e-6, weight_decay=0.2)
        self.mask = self._mask()
        self.student.train_only(Selection(tuple(self.mask), self.mask))
        self.plain.begin(self.mask)
        self.pixels = pictures(batch, net.pixels)
        self.labels = torch.arange(batch) % min(classes, 10)

    def _mask(self) -> Mask:
        generator = torch.Generator().manual_seed(0)
        weights = self.student.net.first_mlp()
        return top_fraction(
            {n: torch.rand(w.shape, generator=generator) for n, w in weights.items()}, 0.1
        )

    def ours_on_the_stream(self) -> Tensor:
        guess = self.method.stream_loss(self.student, self.pixels)
        assert guess.loss is not None
        self.student.step(guess.loss)
        self.method.after_stream_step(self.student)
        return guess.labels

    def ours_with_labels(self) -> None:
        self.student.step(self.student.clip_loss(self.pixels, self.labels))
        self.method.after_step(self.student)

    @torch.inference_mode()
    def bare(self) -> Tensor:
        return self.floor.encode_image(self.pixels)

    # What is held beside one model, in bytes

    def ours_held(self) -> int:
        mine, theirs = self.student.net.weights(), self.method.teacher.weights()
        entries, chosen = self.student._entries.values(), self.student.selection
        kept: list[Tensor | None] = [theirs[n] for n in theirs if theirs[n] is not mine[n]]
        kept += [t for e in entries for t in (e.values, e.values.grad, e.where)]
        kept += [*self.student.optimizer_state().values(), *self.student._apart.values()]
        kept += [*(chosen.mask or {}).values(), *(chosen.scores or {}).values()]
        largest = max(mine[n].numel() * mine[n].element_size() for n in chosen.names)
        return held(kept) + largest  # one dense gradient is alive at a time

    def plain_held(self) -> int:
        weights = self.plain.weights()
        kept: list[Tensor | None] = [*self.plain.teacher.parameters(), *self.mask.values()]
        kept += [weights[name].grad for name in self.plain.names]
        states = self.plain.optimizer.state.values()
        kept += [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return held(kept)

    def reduced(self) -> float:
        """Gradients that a step sends, as a share of all candidates."""
        sent = sum(e.values.numel() for e in self.student._entries.values())
        return sent / sum(w.numel() for w in self.student.net.first_mlp().values())

    def update_share(self, repeats: int) -> float:
        """The optimizer's part and the averaging, inside whole steps."""
        shares = []
        for _ in range(repeats):
            with _stopwatch(self.student) as spent:
                start = time.perf_counter()
                self.ours_on_the_stream()
                shares.append(spent[0] / (time.perf_counter() - start))
        return statistics.median(shares)


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
    watched = [(student, "smooth"), (student._optimizer, "step")]
    watched += [(e, name) for e in student._entries.values() for name in ("gather", "scatter")]
    for owner, name in watched:
        setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name in watched:
            delattr(owner, name)


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of all their storages, each counted once however many tensors look at it."""
    found = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def bench(
    config: Mapping[str, Any],
    *,
    quick: bool = False,
    watch: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:
    """All figures, as one JSON object."""
    repeats = 3 if quick else 7
    ratios: dict[str, float | None] = {}
    seconds: dict[str, dict[str, Any]] = {}

    def stream(batch: int, classes: int) -> tuple[Sides, dict[str, Timed]]:
        watch(f"a step on the stream, batch {batch}, {classes} classes")
        sides = Sides(config, classes, batch)
        found = race(
            {
                "ours": sides.ours_on_the_stream,
                "plain": lambda: sides.plain.adapt(sides.pixels),
                "bare": sides.bare,
            },
            repeats,
        )
        name = f"ttl_batch{batch}_classes{classes}"
        ratios[name] = found["plain"].median / found["ours"].median
        seconds[name] = _told(found)
        return sides, found

    for name in ("ttl_batch64_classes100", "supervised_batch64_classes10", "limit"):
        ratios[name] = None
    sides, _ = stream(8, 200)
    ratios["memory"] = sides.ours_held() / sides.plain_held()
    ratios["update_share"] = sides.update_share(repeats)
    ratios["allreduce"] = sides.reduced()
    if not quick:
        _, found = stream(64, 100)
        ratios["limit"] = found["ours"].median / (FORWARDS * found["bare"].median)
        watch("a step with labels, batch 64, 10 classes")
        sides = Sides(config, 10, 64)
        found = race(
            {
                "ours": sides.ours_with_labels,
                "plain": lambda: sides.plain.lesson(sides.pixels, sides.labels),
            },
            repeats,
        )
        ratios["supervised_batch64_classes10"] = found["plain"].median / found["ours"].median
        seconds["supervised_batch64_classes10"] = _told(found)
    return {"ratios": ratios, "seconds": seconds, "threads": torch.get_num_threads()}


def _told(found: Mapping[str, Timed]) -> dict[str, Any]:
    return {n: {"median": t.median, "spread": t.spread} for n, t in found.items()}
