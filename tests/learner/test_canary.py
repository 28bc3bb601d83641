"""The canary: which images are kept, what is measured, and what survives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dosapp.experiments.plan import build_scenario
from dosapp.learner.canary import SET_IMAGES, Canary
from dosapp.learner.learner import Learner
from dosapp.scenario import Session
from dosapp.settings import RunSettings
from support.settings import SMALL


def draw(count: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))


@pytest.fixture(scope="module")
def settings() -> RunSettings:
    return RunSettings.parse(SMALL)


@pytest.fixture(scope="module")
def scenario(settings, loaded_tiny):
    return build_scenario(settings, loaded_tiny.preprocess)


@pytest.fixture
def learner(settings, scenario, loaded_tiny) -> Learner:
    backbone = loaded_tiny.shared_copy(unshared=list(loaded_tiny.weights()))
    learner = Learner(settings.learner(), backbone)
    learner.learn(scenario.session(0), canary_share=0.25)
    return learner


class TestHoldOut:
    def test_images_are_either_trained_or_kept(self) -> None:
        canary, images = Canary(), {"fox": draw(10), "owl": draw(5, 1)}
        session = canary.take_share(Session.from_images(images), 0.2)
        labels = session.train.labels.tolist()
        assert (labels.count(0), labels.count(1)) == (8, 4)
        kept = {canary.labels[key]: len(found) for key, found in canary.images.items()}
        assert kept == {"fox": 2, "owl": 1}

    def test_a_class_of_few_images_is_measured_on_training_images(self) -> None:
        canary = Canary()
        session = canary.take_share(Session.from_images({"fox": draw(2)}), 0.2)
        assert len(session.train) == 2
        assert canary.classes == {"fox"}

    def test_a_class_has_a_limit(self) -> None:
        canary = Canary()
        for seed in (0, 1):
            left = canary.take_share(Session.from_images({"fox": draw(200, seed)}), 0.2)
            assert len(left.train) == 200 - SET_IMAGES * (seed == 0)
        assert sum(map(len, canary.images.values())) == SET_IMAGES

    def test_corrections_are_trained(self) -> None:
        canary, images = Canary(), torch.cat([draw(10), draw(10, 1)])
        session = canary.take_share(Session.from_images({"fox": images}), 0.5, {"fox": 10})
        kept = torch.cat(list(canary.images.values()))
        assert all(any(torch.equal(image, own) for own in images[:10]) for image in kept)
        assert len(session.train) == 15

    def test_a_share_of_zero_keeps_nothing(self) -> None:
        canary = Canary()
        session = canary.take_share(Session.from_images({"fox": draw(2)}), 0.0)
        assert (len(session.train), canary.stores_images) == (2, False)


class TestMargins:
    def test_they_are_positive_where_the_prediction_is_right(self, learner) -> None:
        margins = learner.canary.measure(learner)
        images = torch.cat(list(learner.canary.images.values()))
        right = [
            p.label == label
            for p, label in zip(learner.predict(images), margins.labels, strict=True)
        ]
        assert (margins.margins > 0).tolist() == right
        assert torch.equal(margins.now, margins.baseline)  # nothing happened since the session

    def test_the_stream_changes_them_and_not_the_baseline(self, learner, scenario) -> None:
        before = learner.canary.measure(learner).now
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        after = learner.canary.measure(learner)
        assert torch.equal(after.baseline, before)
        assert not torch.equal(after.now, before)

    def test_a_changed_class_keeps_earlier_harm(self, learner) -> None:
        """Otherwise an attacker could go on after every renamed or removed class."""
        first, second, _ = learner.classes
        for key, baseline in learner.canary.baselines.items():
            learner.canary.baselines[key] = baseline - 1  # as if all other classes had gained
        learner.rename(first, "wolf")
        assert learner.canary.measure(learner).pull.tolist() == pytest.approx([1] * 3, abs=1e-4)
        learner.remove(second)
        margins = learner.canary.measure(learner)
        assert margins.pull.tolist() == pytest.approx([1] * 2, abs=1e-4)
        assert second not in margins.labels
        assert "wolf" in margins.labels


class TestState:
    def test_it_survives_saving_and_a_rollback(self, learner, scenario, tmp_path) -> None:
        folder = tmp_path / "learner"
        learner.save(folder)
        learner.rename(learner.classes[0], "wolf")
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        expected = learner.canary.measure(learner)
        learner.save(folder)
        loaded = Learner.load(folder)
        margins = loaded.canary.measure(loaded)
        assert sorted(margins.labels) == sorted(expected.labels)
        assert torch.allclose(margins.pull, expected.pull, atol=1e-4)
        back = Learner.rollback(folder, 1)
        assert "wolf" not in back.canary.classes
        assert back.canary.measure(back).pull.abs().max() < 1e-4

    def test_files_with_images_are_for_the_owner(self, learner, tmp_path) -> None:
        learner.save(tmp_path / "learner")
        file = next((tmp_path / "learner" / "versions").iterdir())
        assert file.stat().st_mode & 0o077 == 0
        assert '"stores_images": true' in (tmp_path / "learner" / "learner.json").read_text()

    def test_images_that_were_given_are_not_stored(self, learner, scenario) -> None:
        given = Canary.from_images(draw(3), [learner.classes[0]] * 3)
        learner.canary.add_given(given, learner)
        count = len(learner.canary.measure(learner))
        state = learner.state()
        keys = [name for name in state.tensors if name.startswith("canary/images/")]
        assert not set(given.images) & {name.rpartition("/")[2] for name in keys}
        other = learner.at(replace(state, tensors=dict(state.tensors)))
        assert len(other.canary.measure(other)) == count
