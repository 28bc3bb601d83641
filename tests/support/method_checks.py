"""Properties every method and every pair must have. A new method gets them all for free."""

import warnings
from pathlib import Path

import torch

from dosapp.backbones.clip import CLIPBackbone
from dosapp.experiments.plan import build_scenario
from dosapp.experiments.run import run
from dosapp.learner.learner import Learner
from dosapp.scenario import Session
from dosapp.settings import RunSettings


def lived(settings: RunSettings, net: CLIPBackbone, sessions: int = 2) -> tuple[Learner, object]:
    """A learner after so many sessions of learning and adapting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = Learner(settings.learner(), net.shared_copy(unshared=list(net.weights())))
    stream = build_scenario(settings, net.preprocess)
    for t in range(sessions):
        session = stream.session(t)
        learner.learn(session)
        for pixels in session.unlabelled.batches(settings.stream_batch_size):
            learner.adapt(pixels)
    return learner, stream


def everything_holds(settings: RunSettings, net: CLIPBackbone, folder: Path) -> None:
    """All of the below at the price of few lives, for the many pairs."""
    one, stream = lived(settings, net)
    two, _ = lived(settings, net)
    assert one.digest() == two.digest(), "the same seed must give the same learner"
    before, chance = one.digest(), torch.get_rng_state()
    pixels = stream.session(1).unlabelled.read(range(8))
    untouched = pixels.clone()
    answers = one.predict(pixels)
    one.adapt(pixels[:0])
    one.adapt([])
    assert one.digest() == before, "predicting and an empty stream must change nothing"
    assert torch.equal(torch.get_rng_state(), chance)
    one.save(folder)
    again = Learner.load(folder)
    assert again.predict(pixels) == answers, "a loaded learner must answer the same"
    same_next_steps(one, again, pixels, stream.session(0))
    assert torch.equal(pixels, untouched), "inputs must not be modified"
    odd_batches(two, pixels[:1].repeat(5, 1, 1, 1))


def inputs_are_not_modified(settings: RunSettings, net: CLIPBackbone) -> None:
    learner, stream = lived(settings, net, 1)
    pixels = stream.session(0).unlabelled.read(range(8))
    before = pixels.clone()
    learner.adapt(pixels)
    learner.predict(pixels)
    assert torch.equal(pixels, before)


def predicting_changes_nothing(settings: RunSettings, net: CLIPBackbone) -> None:
    learner, stream = lived(settings, net, 1)
    before, chance = learner.digest(), torch.get_rng_state()
    learner.predict(stream.tasks[0].test.read(range(6)))
    assert learner.digest() == before
    assert torch.equal(torch.get_rng_state(), chance)


def same_seed_same_matrix(settings: RunSettings, folder: Path) -> None:
    one, two = (run(settings, folder / name) for name in "ab")
    assert one.matrices == two.matrices
    assert one.metrics == two.metrics
    assert one.weights == two.weights


def load_of_save_answers_and_learns_the_same(
    settings: RunSettings, net: CLIPBackbone, folder: Path
) -> None:
    learner, stream = lived(settings, net)
    test, more = stream.tasks[0].test.read(range(6)), stream.session(1).unlabelled.read(range(8))
    learner.save(folder)
    again = Learner.load(folder)
    assert again.digest() == learner.digest()
    assert again.predict(test) == learner.predict(test)
    same_next_steps(learner, again, more, stream.session(0))


def same_next_steps(one: Learner, two: Learner, pixels: torch.Tensor, session: Session) -> None:
    for each in (one, two):
        each.adapt(pixels)
        each.adapt(pixels.flip(0))
    assert one.digest() == two.digest()
    for each in (one, two):
        each.learn(session)  # more lessons of known classes
    assert one.digest() == two.digest()


def an_empty_stream_changes_nothing(settings: RunSettings, net: CLIPBackbone) -> None:
    learner, _ = lived(settings, net, 1)
    before = learner.digest()
    learner.adapt(torch.zeros(0, 3, 32, 32))
    learner.adapt([])
    assert learner.digest() == before


def odd_batches_work(settings: RunSettings, net: CLIPBackbone) -> None:
    """One image, one class, and a stream in which classes are missing."""
    learner, stream = lived(settings, net, 1)
    odd_batches(learner, stream.session(1).unlabelled.read([0] * 5))


def odd_batches(learner: Learner, one_class: torch.Tensor) -> None:
    learner.adapt(one_class[:1])
    learner.adapt(one_class)
    lesson = Session.from_images({"violet spiral": torch.zeros(3, 3, 32, 32, dtype=torch.uint8)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three pictures are fewer than a batch
        learner.learn(lesson)
    learner.adapt(one_class)
    assert len(learner.predict(one_class)) == 5


def weights_outside_the_candidates_stay(settings: RunSettings, net: CLIPBackbone) -> None:
    before = {n: w.detach().clone() for n, w in net.weights().items()}
    learner, _ = lived(settings, net)
    candidates = set(net.first_mlp_weights())
    for expert in learner.method.experts(learner.student).values():
        for name, weight in expert.weights().items():
            if name not in candidates:
                assert torch.equal(weight, before[name]), name
