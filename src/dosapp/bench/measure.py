"""Ratios of medians, from repetitions that alternate in one process; absolute seconds vary.

ttl_…          a step on the stream, plain ÷ ours (plain: the baseline)
supervised_…   a step with labels, plain ÷ ours; frozen tensors have no gradient in either
limit          ours on the stream ÷ 3.33 image forwards of the same batch, the arithmetic limit
memory         what ours holds beyond one model ÷ what the baseline holds beyond one
update_share   optimizer and EMA, as a share of our step at batch 8
allreduce      bytes a step sends with several processes ÷ bytes of the dense candidates

Also: mask selection and evaluation, plain ÷ ours; `plain_…`, the baseline's step ÷ its counted
forwards and backwards, each as long as a bare one; memory with the scores of past sessions, which
both implementations keep.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dosapp.bench.equivalence import check_float32, check_float64
from dosapp.bench.implementations import Implementations

BACKWARD = 1.33  # forwards: gradients of inputs cost one, those of the fc1 weights a third
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
Runnable = Callable[[], object]


@dataclass
class Timings:
    """Seconds of repetitions that alternated with others."""

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


def time_alternating(
    functions: Mapping[str, Runnable],
    repeats: int,
    prepare: Callable[[str], object] = lambda name: None,
) -> dict[str, Timings]:
    """Time functions in rounds, each once per round, in alternating order.

    Args:
        functions: Name → function; a warm-up is the caller's task.
        repeats: Number of rounds.
        prepare: Called with a function's name before each of its calls; not timed.

    Returns:
        Name → seconds of every call.

    Example:
        >>> len(time_alternating({"a": lambda: None, "b": lambda: None}, 3)["b"].seconds)
        3
    """
    timings = {name: Timings() for name in functions}
    for round_ in range(repeats):
        for name in functions if round_ % 2 else reversed(list(functions)):
            prepare(name)
            start = time.perf_counter()
            functions[name]()
            timings[name].seconds.append(time.perf_counter() - start)
    return timings


def run_benchmark(
    config: Mapping[str, Any],
    *,
    quick: bool = False,
    repeats: int | None = None,
    on_progress: ProgressCallback = lambda message: None,
) -> dict[str, Any]:
    """Check that both implementations agree, then measure all ratios.

    Args:
        config: Fields of a `CLIPConfig`, for example one of `dosapp.bench.model.MODELS`.
        quick: Two repetitions, and nothing at batch 64.
        repeats: Timed rounds; 7 by default.
        on_progress: Called with a message before each part.

    Returns:
        The content of `bench.json`.

    Raises:
        NotEquivalentError: If the two implementations differ.
    """
    repeats = repeats or (2 if quick else 7)
    on_progress("checking that both implementations agree")
    checks = {"float64": check_float64()}
    pair = Implementations(config)
    checks["float32"] = check_float32(pair.set_size(4, 10))
    ratios: dict[str, float | None] = dict.fromkeys(KEYS)
    more: dict[str, float] = {}
    seconds: dict[str, dict[str, Any]] = {}

    def measure(
        what: str, batch_size: int, classes: int, **functions: Runnable
    ) -> tuple[str, dict[str, float]]:
        """Name of the comparison and median seconds of each function."""
        name = f"{what}_batch{batch_size}_classes{classes}"
        on_progress(name.replace("_", " "))
        pair.set_size(2, classes)  # a small warm-up: at batch 64 a step takes most of a minute
        time_alternating(functions, 1)
        pair.set_size(batch_size, classes)
        timings = time_alternating(functions, repeats)
        seconds[name] = {n: {"median": t.median, "spread": t.spread} for n, t in timings.items()}
        return name, {n: t.median for n, t in timings.items()}

    images, captions = pair.baseline_encode_images, pair.baseline_encode_captions

    def measure_stream(batch_size: int, classes: int) -> dict[str, float]:
        name, medians = measure(
            "ttl", batch_size, classes, ours=pair.stream_step, plain=pair.baseline_stream_step,
            bare=pair.encode_images, images=images, texts=pair.baseline_encode_texts,
            captions=captions,
        )  # fmt: skip
        ratios[name] = medians["plain"] / medians["ours"]
        counted = (3 + BACKWARD) * medians["images"] + 2 * medians["texts"]
        counted += (1 + BACKWARD) * medians["captions"]
        more[f"plain_{name}"] = medians["plain"] / counted
        return medians

    measure_stream(8, 200)
    ours, plain, scores = pair.extra_bytes(), pair.baseline_extra_bytes(), pair.score_bytes()
    ratios["memory"] = ours / plain
    more["memory_with_scores"] = (ours + scores) / (plain + scores)
    ratios["update_share"] = pair.update_share(repeats)
    ratios["allreduce"] = pair.allreduce_share()
    if not quick:
        medians = measure_stream(64, 100)
        ratios["limit"] = medians["ours"] / (FORWARDS * medians["bare"])
        name, medians = measure(
            "supervised", 64, 10, ours=pair.training_step, plain=pair.baseline_training_step,
            images=images, captions=captions,
        )  # fmt: skip
        ratios[name] = medians["plain"] / medians["ours"]
        forward = medians["images"] + medians["captions"]
        more[f"plain_{name}"] = medians["plain"] / ((1 + BACKWARD) * forward)
    size = (8, 200) if quick else (64, 100)
    for what, function, baseline_function in (
        ("selection", pair.select_mask, pair.baseline_select_mask),
        ("evaluation", pair.evaluate, pair.baseline_evaluate),
    ):
        name, medians = measure(what, *size, ours=function, plain=baseline_function)
        more[name] = medians["plain"] / medians["ours"]
    return {
        "ratios": ratios,
        "more": more,
        "seconds": seconds,
        "bytes": {"ours": pair.extra_bytes(), "plain": pair.baseline_extra_bytes()},
        "checks": checks,
        "repeats": repeats,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
