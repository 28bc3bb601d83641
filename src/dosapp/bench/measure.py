"""Side by side in one process: repetitions take turns, medians are compared, seconds are not.

ttl_…          a step on the stream, plain ÷ ours
supervised_…   a step with labels, plain ÷ ours; frozen tensors have no gradient in either
limit          ours on the stream ÷ 3.33 image forwards of the same batch, what the arithmetic needs
memory         what ours holds beside one model ÷ what the plain one holds beside it
update_share   optimizer and averaging, as a share of our step at batch 8
allreduce      bytes a step sends with several processes ÷ bytes of the dense candidates

Besides these: mask selection and evaluation, plain ÷ ours; `plain_…`, the plain step ÷ its counted
forwards and backwards, each as long as a bare one; memory with the scores of past sessions, which
both sides keep alike.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dosapp.bench.equivalence import exact, near
from dosapp.bench.implementations import Implementations

BACKWARD = 1.33  # to inputs and candidates: as much as the forward, and its fc1 part once more
FORWARDS = 2 + BACKWARD  # student forward and backward, teacher forward
KEYS = (
    "ttl_batch64_classes100",
    "ttl_batch8_classes200",
    "supervised_batch64_classes10",
    "limit",
    "memory",
    "update_share",
    "allreduce",
)
ProgressCallback = Callable[[str], None]
Found = tuple[str, dict[str, float]]  # what was raced, and its medians


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


def race(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, Timed]:
    """Everybody once per round, in alternating order. What happens `before` somebody's turn is not
    timed; whoever needs a warm-up has had it."""
    found = {name: Timed() for name in sides}
    for turn in range(repeats):
        for name in sides if turn % 2 else reversed(list(sides)):
            before(name)
            start = time.perf_counter()
            sides[name]()
            found[name].seconds.append(time.perf_counter() - start)
    return found


def bench(
    config: Mapping[str, Any],
    *,
    quick: bool = False,
    repeats: int | None = None,
    watch: ProgressCallback = lambda words: None,
) -> dict[str, Any]:
    """All figures, as one JSON object."""
    repeats = repeats or (2 if quick else 7)
    watch("checking that both do the same")
    checks = {"float64": exact()}
    sides = Implementations(config)
    checks["float32"] = near(sides.sized(4, 10))
    ratios: dict[str, float | None] = dict.fromkeys(KEYS)
    more: dict[str, float] = {}
    seconds: dict[str, dict[str, Any]] = {}

    def raced(what: str, batch: int, classes: int, **runners: Callable[[], object]) -> Found:
        """A small round warms up: at batch 64 a step takes most of a minute."""
        name = f"{what}_batch{batch}_classes{classes}"
        watch(name.replace("_", " "))
        sides.sized(2, classes)
        race(runners, 1)
        sides.sized(batch, classes)
        found = race(runners, repeats)
        seconds[name] = {n: {"median": t.median, "spread": t.spread} for n, t in found.items()}
        return name, {n: t.median for n, t in found.items()}

    def stream(batch: int, classes: int) -> dict[str, float]:
        floors = {"images": sides.images, "texts": sides.texts, "captions": sides.captions}
        ours, plain = sides.stream, sides.plain_stream
        name, found = raced(
            "ttl", batch, classes, ours=ours, plain=plain, bare=sides.bare, **floors
        )
        ratios[name] = found["plain"] / found["ours"]
        counted = (3 + BACKWARD) * found["images"] + 2 * found["texts"]
        more[f"plain_{name}"] = found["plain"] / (counted + (1 + BACKWARD) * found["captions"])
        return found

    stream(8, 200)
    ratios["memory"] = sides.held() / sides.plain_held()
    more["memory_with_scores"] = (sides.held() + sides.scored()) / (
        sides.plain_held() + sides.scored()
    )
    ratios["update_share"] = sides.update_share(repeats)
    ratios["allreduce"] = sides.reduced()
    if not quick:
        found = stream(64, 100)
        ratios["limit"] = found["ours"] / (FORWARDS * found["bare"])
        ours, plain = sides.lesson, sides.plain_lesson
        floors = {"images": sides.images, "captions": sides.captions}
        name, found = raced("supervised", 64, 10, ours=ours, plain=plain, **floors)
        ratios[name] = found["plain"] / found["ours"]
        once = found["images"] + found["captions"]
        more[f"plain_{name}"] = found["plain"] / ((1 + BACKWARD) * once)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "selection": (sides.selection, sides.plain_selection),
        "evaluation": (sides.evaluation, sides.plain_evaluation),
    }
    for what, (mine, theirs) in pairs.items():
        name, found = raced(what, *((8, 200) if quick else (64, 100)), ours=mine, plain=theirs)
        more[name] = found["plain"] / found["ours"]
    return {
        "ratios": ratios,
        "more": more,
        "seconds": seconds,
        "bytes": {"ours": sides.held(), "plain": sides.plain_held()},
        "checks": checks,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
