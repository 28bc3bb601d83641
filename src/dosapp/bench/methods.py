"""What a step on the stream costs, method against method, on a CLIP with random weights."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dosapp.bench.implementations import storage_bytes
from dosapp.bench.measure import ProgressCallback, time_alternating
from dosapp.bench.model import random_clip, random_images
from dosapp.data.preprocess import to_bytes
from dosapp.errors import InputError
from dosapp.learner.learner import Learner
from dosapp.settings import LearnerSettings

SESSIONS, IMAGES_PER_CLASS = 2, 2  # two, so that there are earlier classes whose features drifted


def compare_methods(
    config: Mapping[str, Any],
    methods: Sequence[str],
    *,
    batch_size: int = 64,
    classes: int = 100,
    repeats: int = 7,
    on_progress: ProgressCallback = lambda message: None,
) -> dict[str, dict[str, float]]:
    """Time a stream step of several methods in turns, after two short sessions of each.

    Args:
        config: Fields of a `CLIPConfig`.
        methods: Names of methods; the first one is the unit.
        batch_size: Images of a step.
        classes: Known classes.
        repeats: Timed rounds.
        on_progress: Called with a message before each part.

    Returns:
        Per method `time`, the ratio of medians to the first method; `spread`, half the distance
        between the quartiles as a share of the median; `copies_mb`, weights of other experts that
        differ from the student's; `head_mb`, class statistics.

    Raises:
        InputError: A method does not adapt.

    Example:
        >>> from dosapp.bench.model import small
        >>> costs = compare_methods(
        ...     small(), ["dosapp", "stream-gda"], batch_size=2, classes=4, repeats=1
        ... )
        >>> costs["dosapp"]["time"]
        1.0
    """
    learners: dict[str, Learner] = {}
    for name in methods:
        on_progress(f"two sessions of {name}")
        learners[name] = _train(config, name, classes)
    on_progress("a stream step of each, in turns")
    pixels = random_images(batch_size, next(iter(learners.values())).preprocess.image_size)
    steps = {name: partial(learner.adapt, pixels) for name, learner in learners.items()}
    time_alternating(steps, 1)  # a warm-up
    timings = time_alternating(steps, repeats)
    unit = timings[methods[0]].median
    return {
        name: {
            "time": timings[name].median / unit,
            "spread": timings[name].spread,
            "copies_mb": _copied_bytes(learner) / 1e6,
            "head_mb": storage_bytes(learner.class_head.state_dict().values()) / 1e6,
        }
        for name, learner in learners.items()
    }


def _train(config: Mapping[str, Any], method: str, classes: int) -> Learner:
    settings = LearnerSettings(method=method, epochs=1, batch_size=8, lr=1e-6)
    learner = Learner(settings, random_clip(config))
    if not learner.adapts:
        raise InputError(f"'{method}' does not adapt; compare methods that use the stream")
    size = learner.preprocess.image_size
    for session in range(SESSIONS):
        names = [f"class {n}" for n in range(session, classes, SESSIONS)]
        images = {name: to_bytes(random_images(IMAGES_PER_CLASS, size, name)) for name in names}
        learner.learn(images)
    return learner


def _copied_bytes(learner: Learner) -> int:
    """Bytes of weights that teachers and earlier experts do not share with the student."""
    own = {weight.data_ptr() for weight in learner.student.backbone.weights().values()}
    frozen = learner.student.frozen_copy
    copies = [
        *learner.method.shared_copies().values(),
        *learner.class_head.shared_copies().values(),
    ]
    copies += [] if frozen is None else [frozen]
    weights = [w for copy in copies for w in copy.weights().values()]
    return storage_bytes(w for w in weights if w.data_ptr() not in own)
