"""The replay buffer, and replayed images in a training batch."""

import json

import torch

from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.learner.replay import ReplayBuffer


def test_with_more_sessions_than_capacity_the_newest_keep_an_image(tiny, small) -> None:
    buffer = ReplayBuffer(capacity=3)
    train = build_scenario(small(), tiny.preprocess).session(0).train
    for t in range(5):
        buffer.add_session(train, torch.full((len(train),), t))
    assert [labels.tolist() for labels in buffer.labels] == [[2], [3], [4]]
    pixels, labels = buffer.sample(8, 0)
    assert (len(pixels), sorted(labels.tolist())) == (3, [2, 3, 4])


def test_sessions_are_balanced_and_the_description_says_images_are_stored(
    small, tiny, tmp_path
) -> None:
    settings = small(method="flyp", buffer_size=7)
    learner = Learner(settings.learner(), tiny)
    scenario = build_scenario(settings, tiny.preprocess)
    for t in range(2):
        learner.learn(scenario.session(t))
    assert [len(labels) for labels in learner.replay_buffer.labels] == [3, 3]
    assert learner.replay_buffer.labels[1].min() >= 3  # the second session's own classes
    learner.save(tmp_path / "x")
    assert json.loads((tmp_path / "x" / "learner.json").read_text())["stores_images"]
    assert learner.state().facts["stored_images"] == 6


def test_replay_doubles_the_batch_and_marks_its_rows(small, tiny) -> None:
    settings = small(method="flyp", buffer_size=30)
    learner = Learner(settings.learner(), tiny)
    scenario = build_scenario(settings, tiny.preprocess)
    learner.learn(scenario.session(0))
    batches, loss = [], learner.method.loss
    object.__setattr__(
        learner.method, "loss", lambda student, batch: batches.append(batch) or loss(student, batch)
    )
    learner.learn(scenario.session(1))
    assert batches
    assert all(len(b.labels) == 16 and int(b.replayed.sum()) == 8 for b in batches)
    assert all((b.labels[b.replayed] < 3).all() for b in batches)


def test_a_rollback_drops_the_images_of_classes_that_it_undoes(small, tiny, tmp_path) -> None:
    scenario = build_scenario(small(), tiny.preprocess)
    learner = Learner(small(buffer_size=6).learner(), tiny)
    for t in (0, 1):
        learner.learn(scenario.session(t))
        learner.save(tmp_path / "x")
    for number in (1, 2, 1):
        learner = Learner.rollback(tmp_path / "x", number)
        assert len(learner.replay_buffer) == 3  # what the second session left of the first
        assert all((labels < 3).all() for labels in learner.replay_buffer.labels)
    assert len(learner.classes) == 3
    learner.learn(scenario.session(1))
