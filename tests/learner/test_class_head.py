"""A head that the stream moves: it follows the features, is saved, and stores no image."""

import numpy as np
import pytest
import torch

from dosapp.data.preprocess import to_bytes
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.heads.temperature import Temperature
from dosapp.learner.learner import Learner
from support.images import PREPROCESS


def train(tiny, small, sessions=2, stream=True, **settings):
    """A learner after some sessions with their streams, and its scenario."""
    run = small(**{"method": "dosapp", "head": "gda-moved", **settings})
    scenario = build_scenario(run, PREPROCESS)
    learner = Learner(run.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
    for t in range(sessions):
        learner.learn(scenario.session(t))
        for pixels in scenario.session(t).unlabelled.batches(8):
            if stream:
                learner.adapt(pixels)
    return learner, scenario


def class_means(learner, scenario, task):
    """Means of the training features of a task's classes, as the learner encodes them now."""
    expert, train = learner.answering_expert[1], scenario.tasks[task].train
    with torch.no_grad():
        features = expert.encode_image(train.read(range(len(train)))).double()
    labels = torch.from_numpy(train.labels)
    return torch.stack([features[labels == n].mean(dim=0) for n in labels.unique()])


def test_after_a_session_the_means_are_those_of_its_images(tiny, small) -> None:
    learner, scenario = train(tiny, small, sessions=1, stream=False)
    stored = learner.class_head.statistics.stack_means(len(learner.classes))
    assert torch.allclose(stored, class_means(learner, scenario, 0), atol=1e-6)


@pytest.mark.parametrize("method", ["spu", "dosapp"])
def test_moved_means_are_nearer_to_the_true_ones(tiny, small, method) -> None:
    """Also without self-training: the labelled phase alone moves the features."""
    changes = {"method": method, "lr": 3e-3, "epochs": 4, "test_images": 24}
    errors = {}
    for head in ("gda", "gda-moved"):
        learner, scenario = train(tiny, small, head=head, **changes)
        true = class_means(learner, scenario, 0)
        stored = learner.class_head.statistics.stack_means(len(learner.classes))[: len(true)]
        errors[head] = (stored - true).norm().item()
    assert errors["gda-moved"] < 0.7 * errors["gda"]


def test_images_of_a_new_session_move_the_means_where_no_stream_follows(tiny, small) -> None:
    changes = {"lr": 3e-3, "epochs": 4, "stream": False}
    errors = {}
    for from_sessions in (False, True):
        learner, scenario = train(tiny, small, head_session_drift=from_sessions, **changes)
        true = class_means(learner, scenario, 0)
        stored = learner.class_head.statistics.stack_means(len(learner.classes))
        errors[from_sessions] = (stored[: len(true)] - true).norm().item()
        new = class_means(learner, scenario, 1)
        assert torch.allclose(stored[len(true) :], new, atol=1e-6)  # measured, not moved
    assert errors[True] < 0.8 * errors[False]


@pytest.mark.parametrize(("images", "moves"), [(4, False), (8, True)])
def test_a_session_of_a_few_images_moves_no_means(tiny, small, images, moves) -> None:
    """A corrected image would give its own drift to every class; so 8 do not count, and 16 do."""
    learner, scenario = train(tiny, small, sessions=1, head_session_drift=True, lr=3e-3)
    before = learner.class_head.statistics.stack_means(len(learner.classes))
    task = scenario.tasks[1]
    labels = task.train.labels
    learner.learn(
        {
            task.classes[n]: to_bytes(task.train.read(np.flatnonzero(labels == n)[:images]))
            for n in range(2)
        }
    )
    after = learner.class_head.statistics.stack_means(len(learner.classes))
    assert torch.equal(after[: len(before)], before) is not moves


def test_only_a_moved_head_is_moved_by_sessions(small, tiny) -> None:
    for head, found in ((None, "captions"), ("gda", "gda")):
        with pytest.raises(InputError, match=f"head_session_drift goes with .* with {found}"):
            train(tiny, small, head=head, head_session_drift=True)


def test_pseudo_labels_of_a_method_that_does_not_adapt_are_the_heads(tiny, small) -> None:
    learner, scenario = train(tiny, small, sessions=1, method="spu")
    pixels = scenario.tasks[0].test.read(range(4))
    result = learner.adapt(pixels)
    assert learner.adapts
    assert result.stepped  # the statistics moved, so a service publishes them
    predicted = [learner.classes.index(p.label) for p in learner.predict(pixels)]
    assert result.labels.tolist() == predicted


def test_a_saved_learner_continues_as_the_original(tiny, small, tmp_path) -> None:
    learner, scenario = train(tiny, small)
    learner.save(tmp_path / "learner")
    restored = Learner.load(tmp_path / "learner")
    pixels = scenario.tasks[0].test.read(range(8))
    assert restored.predict(pixels) == learner.predict(pixels)
    for one in (learner, restored):
        one.adapt(pixels)
        one.learn(scenario.session(0))
        one.adapt(pixels)
    assert restored.digest() == learner.digest()


def test_gaussians_are_made_less_sure_and_predict_the_same(tiny, small) -> None:
    learner, scenario = train(tiny, small, method="zero-shot", head="gda", data="shapes-hard")
    assert learner.class_head.temperature.value > 1
    pixels = scenario.tasks[0].test.read(range(8))
    calm = learner.predict(pixels)
    learner.class_head.temperature = Temperature()
    sure = learner.predict(pixels)
    assert [p.label for p in calm] == [p.label for p in sure]
    assert sum(p.score for p in calm) < sum(p.score for p in sure)


def test_a_session_of_single_images_holds_none_out(tiny, small) -> None:
    learner, _ = train(tiny, small, sessions=0, batch_size=2)
    images = torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8)
    learner.learn({"red square": images[:1], "blue circle": images[1:]})
    assert learner.class_head.temperature.value == 1.0


def test_classes_can_be_removed_between_sessions(tiny, small) -> None:
    learner, scenario = train(tiny, small)
    last = learner.classes[-1]
    learner.remove(learner.classes[0])
    assert learner.classes[-1] == last
    learner.adapt(scenario.tasks[0].test.read(range(8)))
    assert len(learner.class_head.statistics.means) == len(learner.classes)
    assert learner.predict(scenario.tasks[1].test.read(range(2)))


def test_captions_predict_as_before_without_a_head(tiny, small) -> None:
    plain, _ = train(tiny, small, head=None)
    headed, _ = train(tiny, small)
    for (name, a), (other, b) in zip(
        plain.experts().items(), list(headed.experts().items())[1:], strict=True
    ):
        assert name == other
        pairs = zip(a.weights().values(), b.weights().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)


def test_a_trained_logit_scale_is_used(tiny, small, tmp_path) -> None:
    """FLYP trains it: the learner in memory and the loaded one must agree."""
    learner, scenario = train(
        tiny, small, method="flyp", head="gda", head_text_weight=1.0, lr=1e-2, stream=False
    )
    pixels = scenario.tasks[0].test.read(range(4))
    learner.save(tmp_path / "learner")
    assert Learner.load(tmp_path / "learner").predict(pixels) == learner.predict(pixels)


def test_one_image_per_class_is_the_nearest_mean(tiny, small) -> None:
    settings = small(method="zero-shot", head="gda", batch_size=2)
    scenario = build_scenario(settings, PREPROCESS)
    learner, task = Learner(settings.learner(), tiny), scenario.tasks[0]
    rows = [int((task.train.labels == n).nonzero()[0][0]) for n in range(len(task.classes))]
    images = (255 * task.train.read(rows)).round().byte()
    learner.learn({name: images[n : n + 1] for n, name in enumerate(task.classes)})
    assert [p.label for p in learner.predict(images)] == list(task.classes)


def test_all_classes_can_be_removed(tiny, small, tmp_path) -> None:
    learner, scenario = train(tiny, small)
    for name in learner.classes:
        learner.remove(name)
    learner.save(tmp_path / "learner")
    restored = Learner.load(tmp_path / "learner")
    restored.learn(scenario.session(0))
    assert restored.classes == list(scenario.session(0).classes)


def test_a_text_weight_needs_a_gda_head(small) -> None:
    with pytest.raises(InputError, match="head_text_weight goes with head gda"):
        small(head="ncm", head_text_weight=1.0)


def test_two_experts_together_cannot_have_a_moved_head(tiny, small) -> None:
    settings = small(method="spu", adapt="rmt", head="gda-moved")
    with pytest.raises(InputError, match="needs a method that predicts with one expert"):
        Learner(settings.learner(), tiny)
