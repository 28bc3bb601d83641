"""Properties that every method and every pair of methods must have.

They run on the embedded backbone and a small generated dataset, in seconds and offline. A failed
property raises an `AssertionError` that says what does not hold.
"""

import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.registry import load_backbone
from dosapp.experiments.plan import build_scenario
from dosapp.experiments.run import run
from dosapp.learner.learner import Learner
from dosapp.methods.base import Method, check_declaration
from dosapp.methods.registry import METHODS
from dosapp.scenario import Scenario, Session
from dosapp.settings import RunSettings

# Small enough for a second, large enough for two sessions with three classes each.
SMALL_RUN: Mapping[str, Any] = {
    "classes": 6,
    "tasks": 2,
    "epochs": 2,
    "batch_size": 8,
    "stream_batch_size": 8,
    "train_images": 8,
    "test_images": 8,
    "lr": 1e-3,
}

MethodCheck = Callable[[RunSettings, DualEncoder, Path], None]


def check_method(
    method: type[Method], options: Mapping[str, Any] | None = None, **settings: Any
) -> None:
    """Run all checks on a method; an adapter is checked after SPU.

    Args:
        method: A subclass of `Method`, registered or not.
        options: Hyper-parameters that it needs.
        settings: Further settings of the small run, for example `buffer_size=6`.

    Raises:
        AssertionError: A property does not hold.
        InputError: It is no method, or its declaration is wrong.

    Example:
        >>> from dosapp import METHODS
        >>> check_method(METHODS["self-training"])
    """
    check_declaration(method)
    name = next((known for known, cls in METHODS.items() if cls is method), "")
    registered = name or f"checked-{method.__name__}"
    names = {"method": registered}
    if method.phase == "unlabelled":
        names = {"method": "spu", "adapt": registered}
    METHODS[registered] = method
    try:
        values = {**SMALL_RUN, **names, "options": dict(options or {}), **settings}
        for check in METHOD_CHECKS:
            with tempfile.TemporaryDirectory() as folder:
                check(RunSettings.parse(values), load_backbone("tiny"), Path(folder))
    finally:
        if not name:
            del METHODS[registered]


def train_learner(
    settings: RunSettings, backbone: DualEncoder, sessions: int = 2
) -> tuple[Learner, Scenario]:
    """A learner after some sessions with their streams, and its scenario."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = list(backbone.weights())
        learner = Learner(settings.learner(), backbone.shared_copy(own))
    scenario = build_scenario(settings, backbone.preprocess)
    for t in range(sessions):
        session = scenario.session(t)
        learner.learn(session)
        learner.adapt_stream(session.unlabelled, batch_size=settings.stream_batch_size)
    return learner, scenario


def check_inputs_unmodified(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """Adapting and predicting do not write to the images they get."""
    learner, scenario = train_learner(settings, backbone, 1)
    pixels = scenario.session(0).unlabelled.read(range(8))
    before = pixels.clone()
    learner.adapt(pixels)
    learner.predict(pixels)
    assert torch.equal(pixels, before), "the input images were modified"


def check_predict_is_pure(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """Predicting changes neither the learner nor torch's random state."""
    learner, scenario = train_learner(settings, backbone, 1)
    digest, random_state = learner.digest(), torch.get_rng_state()
    learner.predict(scenario.tasks[0].test.read(range(6)))
    assert learner.digest() == digest, "predicting changed the learner"
    assert torch.equal(torch.get_rng_state(), random_state), "predicting drew random numbers"


def check_deterministic(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """The same seed gives the same weights and the same accuracies."""
    first, second = (run(settings, folder / name) for name in "ab")
    assert first.matrices == second.matrices, "the same seed gave other accuracies"
    assert first.metrics == second.metrics, "the same seed gave other metrics"
    assert first.weights == second.weights, "the same seed gave other weights"


def check_save_and_load(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """A loaded learner predicts and continues exactly like the saved one."""
    learner, scenario = train_learner(settings, backbone)
    test = scenario.tasks[0].test.read(range(6))
    pixels = scenario.session(1).unlabelled.read(range(8))
    learner.save(folder / "learner")
    loaded = Learner.load(folder / "learner")
    assert loaded.digest() == learner.digest(), "a loaded learner has another state"
    assert loaded.predict(test) == learner.predict(test), "a loaded learner predicts otherwise"
    check_same_steps(learner, loaded, pixels, scenario.session(0))


def check_same_steps(one: Learner, two: Learner, pixels: Tensor, session: Session) -> None:
    """Two learners in the same state take the same steps on the stream and in a session."""
    for learner in (one, two):
        learner.adapt(pixels)
        learner.adapt(pixels.flip(0))
    assert one.digest() == two.digest(), "two equal learners adapt differently"
    for learner in (one, two):
        learner.learn(session)
    assert one.digest() == two.digest(), "two equal learners learn differently"


def check_empty_stream(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """An empty batch changes nothing."""
    learner, _ = train_learner(settings, backbone, 1)
    digest = learner.digest()
    learner.adapt(torch.zeros(0, 3, backbone.image_size, backbone.image_size))
    learner.adapt([])
    assert learner.digest() == digest, "an empty batch changed the learner"


def check_unusual_batches(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """One image, one class, and a session that is smaller than a batch work."""
    learner, scenario = train_learner(settings, backbone, 1)
    try:
        use_unusual_batches(learner, scenario.session(1).unlabelled.read([0] * 5))
    except Exception as error:
        raise AssertionError(f"an unusual batch cannot be used: {error}") from error


def use_unusual_batches(learner: Learner, one_class: Tensor) -> None:
    """Adapt to one image and to one class, and learn a class with three images."""
    size = learner.preprocess.image_size
    learner.adapt(one_class[:1])
    learner.adapt(one_class)
    images = torch.zeros(3, 3, size, size, dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three images are fewer than a batch
        learner.learn(Session.from_images({"violet spiral": images}))
    learner.adapt(one_class)
    assert len(learner.predict(one_class)) == len(one_class), "not every image got a prediction"


METHOD_CHECKS: tuple[MethodCheck, ...] = (
    check_inputs_unmodified,
    check_predict_is_pure,
    check_deterministic,
    check_save_and_load,
    check_empty_stream,
    check_unusual_batches,
)
