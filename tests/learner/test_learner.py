"""Learn, adapt, predict; the classes of a learner."""

import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from dosapp.data.base import check_class_names
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.scenario import Session

BLACK = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)


def test_training_raises_the_accuracy(small, tiny) -> None:
    settings = small(classes=30, tasks=1, epochs=4, batch_size=32, train_images=10, test_images=10)
    scenario = build_scenario(settings, tiny.preprocess)
    test = scenario.tasks[0].test
    pixels, truth = test.read(range(len(test))), [scenario.classes[i] for i in test.labels]

    def accuracy(learner: Learner) -> float:
        labels = [prediction.label for prediction in learner.predict(pixels)]
        return sum(a == b for a, b in zip(labels, truth, strict=True)) / len(truth)

    before = Learner(
        small(method="zero-shot").learner(), tiny.shared_copy(unshared=list(tiny.weights()))
    )
    before.learn(scenario.session(0))
    after = Learner(settings.learner(), tiny)
    after.learn(scenario.session(0))
    assert accuracy(after) > accuracy(before)


class TestPredict:
    def test_predictions_have_scores_and_the_best_classes(self, trained) -> None:
        learner, scenario = trained
        predictions = learner.predict(scenario.tasks[0].test.read([0, 1]), top=2)
        assert len(predictions) == 2
        assert all(p.label in learner.classes and len(p.top) == 2 for p in predictions)
        assert all(0 <= p.score <= 1 and p.top[0] == (p.label, p.score) for p in predictions)

    def test_the_number_of_best_classes_may_be_of_numpy(self, trained) -> None:
        images = torch.zeros(1, 3, 32, 32)
        assert trained[0].predict(images, top=np.int64(2)) == trained[0].predict(images, top=2)

    @pytest.mark.parametrize("top", [0, -1, 2.5, True])
    def test_no_best_class_is_an_input_error(self, top, trained) -> None:
        with pytest.raises(InputError, match=f"^top is {top}; give a whole number of classes"):
            trained[0].predict(torch.zeros(1, 3, 32, 32), top=top)

    def test_classes_are_listed_once_for_all_predictions(self, trained, monkeypatch) -> None:
        learner, scenario = trained
        calls, classes = [], Learner.classes.fget
        monkeypatch.setattr(Learner, "classes", property(lambda it: calls.append(1) or classes(it)))
        learner.predict(scenario.session(0).unlabelled.read(range(6)))
        assert len(calls) == 1

    def test_takes_pillow_images_tensors_and_an_empty_list(self, trained) -> None:
        learner, _ = trained
        images = [Image.new("RGB", (50, 40), "red"), Image.new("L", (32, 32))]
        assert len(learner.predict(images)) == 2
        assert len(learner.predict(torch.zeros(3, 3, 32, 32, dtype=torch.uint8))) == 3
        assert learner.predict([]) == []
        with pytest.raises(InputError, match=r"shape \[3, 3, 8, 8\]; give \[B, 3, 32, 32\]"):
            learner.predict(torch.zeros(3, 3, 8, 8))

    def test_other_inputs_are_input_errors(self, trained) -> None:
        learner, _ = trained
        for wrong in (None, 7, [None], [b"bytes"]):
            with pytest.raises(InputError, match=r"give (a )?Pillow image"):
                learner.predict(wrong)
        with pytest.raises(InputError, match="image 'x' does not exist"):
            learner.predict("x")
        for wrong in (200.0, -1.0, float("nan")):
            with pytest.raises(InputError, match="outside 0 to 1"):
                learner.adapt(torch.full((2, 3, 32, 32), wrong))

    def test_without_classes_it_is_an_input_error(self, learner_settings, tiny) -> None:
        with pytest.raises(InputError, match="knows no classes yet"):
            Learner(learner_settings(), tiny).predict(torch.zeros(1, 3, 32, 32))


class TestLearn:
    def test_from_pillow_images_by_class_name(self, learner_settings, tiny) -> None:
        learner = Learner(learner_settings(batch_size=4), tiny)
        red, blue = ([Image.new("RGB", (40, 30 + n), c) for n in range(4)] for c in ("red", "blue"))
        learner.learn({"red sheet": red, "blue sheet": blue})
        assert learner.classes == ["red sheet", "blue sheet"]

    @pytest.mark.parametrize("images", [[], torch.zeros(0, 3, 32, 32, dtype=torch.uint8)])
    def test_a_class_without_images_is_an_input_error(self, images, learner_settings, tiny) -> None:
        learner = Learner(learner_settings(batch_size=4), tiny)
        digest = learner.digest()
        for others in ({}, {"fox": [Image.new("RGB", (40, 30))] * 4}):
            with pytest.raises(InputError, match=r"^class 'wolf' has no images; give at "):
                learner.learn({**others, "wolf": images})
        assert learner.classes == []
        assert learner.digest() == digest

    def test_images_of_another_size_are_refused_before_a_class_is_added(
        self, learner_settings, tiny
    ) -> None:
        learner = Learner(learner_settings(), tiny)
        with pytest.raises(InputError, match=r"shape \[3, 8, 8\]; give \[3, 32, 32\]"):
            learner.learn(Session.from_images({"cat": torch.zeros(9, 3, 8, 8, dtype=torch.uint8)}))
        assert learner.classes == []

    def test_new_classes_and_more_images_of_known_ones(self, trained) -> None:
        learner, scenario = trained
        known = learner.classes
        pixels = (scenario.tasks[0].test.read(range(6)) * 255).to(torch.uint8)
        with pytest.warns(UserWarning, match="smaller batch"):
            learner.learn(Session.from_images({known[0]: pixels[:3], "violet spiral": pixels[3:]}))
        assert learner.classes == [*known, "violet spiral"]

    def test_fewer_images_than_a_batch_are_one_smaller_batch(self, learner_settings, tiny) -> None:
        learner = Learner(learner_settings(batch_size=64, epochs=3), tiny)
        session = Session.from_images(
            {
                "red dot": torch.zeros(2, 3, 32, 32, dtype=torch.uint8) + 9,
                "blue dot": torch.ones(3, 3, 32, 32, dtype=torch.uint8),
            }
        )
        with pytest.warns(UserWarning, match="5 training images, fewer than a batch of 64"):
            assert [step.total for step in learner.training_steps(session)] == [3, 3, 3]

    def test_a_session_continues_from_any_step(self, small, tiny) -> None:
        settings = small(epochs=3, buffer_size=6)
        session = build_scenario(settings, tiny.preprocess).session(0)
        whole, first, second = (
            Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
            for _ in range(3)
        )
        whole.learn(session)
        steps = first.training_steps(session)
        for _ in range(4):
            next(steps)
        second.restore(first.state().clone(), first.working_state())
        for _ in second.training_steps(session, start=4):
            pass
        assert second.digest() == whole.digest()

    def test_continuing_after_the_last_step_keeps_the_teacher(self, small, tiny) -> None:
        settings = small()
        session = build_scenario(settings, tiny.preprocess).session(0)
        whole, first, second = (
            Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
            for _ in range(3)
        )
        whole.learn(session)
        steps = first.training_steps(session)
        while (step := next(steps)).number < step.total:
            pass
        second.restore(first.state(), first.working_state())
        assert list(second.training_steps(session, start=step.total)) == []
        assert second.digest() == whole.digest()

    @pytest.mark.parametrize("method", ["flyp", "lwf", "prd"])
    def test_all_class_negatives_enter_the_loss_of_every_method(self, method, small, tiny) -> None:
        losses = []
        for negatives in (False, True):
            settings = small(method=method, all_class_negatives=negatives, epochs=1)
            backbone = tiny.shared_copy(unshared=list(tiny.weights()))
            learner = Learner(settings.learner(), backbone)
            session = build_scenario(settings, tiny.preprocess).session(0)
            learner.learn(session)
            images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
            absent = learner.predict(images[:1])[0].label  # a negative that matters
            present = [name for name in session.classes if name != absent]
            two = Session.from_images(dict.fromkeys(present, images))
            losses.append(next(iter(learner.training_steps(two))).loss)
        assert losses[1] > losses[0] + 0.1

    @pytest.mark.parametrize("method", ["flyp", "lwf", "dosapp", "l2p"])
    def test_a_session_of_one_class_learns_it(self, method, small, tiny) -> None:
        settings = small(method=method, epochs=8, lr=1e-3)
        backbone = tiny.shared_copy(unshared=list(tiny.weights()))
        learner = Learner(settings.learner(), backbone)
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        gray = torch.full((8, 3, 32, 32), 128, dtype=torch.uint8)
        least_likely, before = learner.predict(gray[:1], top=3)[0].top[-1]
        learner.learn({least_likely: gray})
        assert dict(learner.predict(gray[:1])[0].top)[least_likely] > 5 * before
        assert not learner.student.all_class_negatives  # on the stream

    def test_a_session_of_one_class_that_ends_early_changes_no_later_loss(self, trained) -> None:
        learner = trained[0].at(trained[0].state())
        images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        steps = learner.training_steps(Session.from_images({"fox": images}))
        next(steps)
        assert learner.student.all_class_negatives
        steps.close()
        assert not learner.student.all_class_negatives

    @pytest.mark.parametrize(("changes", "warned"), [({}, 1), ({"head": "ncm"}, 0)])
    def test_an_only_class_is_a_warning(self, changes, warned, learner_settings, tiny) -> None:
        learner = Learner(learner_settings(**changes), tiny)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learner.learn({"fox": torch.zeros(8, 3, 32, 32, dtype=torch.uint8)})
        assert sum("only class" in str(warning.message) for warning in caught) == warned

    @pytest.mark.parametrize("share", [1, 2, -0.1, "0.2"])
    def test_the_share_of_the_canary_is_below_one(self, share, trained) -> None:
        with pytest.raises(InputError, match="give a share from 0 to below 1"):
            trained[0].learn({"fox": BLACK, "wolf": BLACK}, canary_share=share)

    def test_names_that_differ_by_case_are_a_warning(self, learner_settings, tiny) -> None:
        with pytest.warns(UserWarning, match="'Fox' and 'fox' are two classes") as caught:
            Learner(learner_settings(), tiny).learn({"fox": BLACK, "Fox": BLACK})
        assert {warning.filename for warning in caught} == {__file__}  # not a file of ours

    def test_a_name_with_a_line_break_is_an_input_error(self, trained) -> None:
        with pytest.raises(InputError, match="which cannot be printed"):
            trained[0].learn({"red\nfox": BLACK, "wolf": BLACK})

    @pytest.mark.parametrize("name", ["👩\u200d🔬", "n°\u00a01", "می\u200cخواهم"])
    def test_names_with_joiners_and_spaces_of_any_kind_are_names(self, name) -> None:
        check_class_names([name], "data")


class TestSave:
    def test_a_new_learner_does_not_replace_one_that_has_learned(self, trained, tmp_path) -> None:
        learner, _ = trained
        learner.save(tmp_path / "learner")
        learner.save(tmp_path / "learner")
        with pytest.raises(InputError, match="holds a learner after 1 session, and this one has"):
            Learner.open(tmp_path / "learner").save(tmp_path / "learner")
        assert Learner.load(tmp_path / "learner").classes == learner.classes

    def test_a_file_is_no_folder(self, trained, tmp_path) -> None:
        (tmp_path / "text.jpg").write_text("x")
        with pytest.raises(InputError, match="is a file; give a folder"):
            trained[0].save(tmp_path / "text.jpg")


class TestAdapt:
    def test_before_the_first_session_it_does_nothing(self, learner_settings, tiny) -> None:
        learner = Learner(learner_settings(), tiny)
        before = learner.digest()
        assert learner.adapt(torch.rand(4, 3, 32, 32)) is None
        assert learner.digest() == before

    def test_reports_whether_weights_changed(self, trained) -> None:
        learner, scenario = trained
        before = learner.digest()
        result = learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        assert result.stepped
        assert learner.digest() != before
        assert result.trusted is None
        assert result.gated == 0
        assert not result.loss.requires_grad

    def test_a_batch_of_one_changes_no_bit(self, trained) -> None:
        learner, scenario = trained
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        before = learner.digest()
        result = learner.adapt(scenario.session(0).unlabelled.read([0]))
        assert len(result.labels) == 1
        assert not result.stepped
        assert learner.digest() == before

    def test_without_mitigations_the_method_gets_the_batch_itself(
        self, trained, monkeypatch
    ) -> None:
        """A selection of all rows would copy the batch, and wait for a GPU."""
        learner, scenario = trained
        pixels = scenario.session(0).unlabelled.read(range(8))
        batches, stream_loss = [], type(learner.method).stream_loss

        def record(method, student, batch):
            batches.append(batch)
            return stream_loss(method, student, batch)

        monkeypatch.setattr(type(learner.method), "stream_loss", record)
        learner.adapt(pixels)
        assert len(batches) == 1
        assert batches[0] is pixels


class TestClasses:
    def test_a_class_can_be_renamed(self, trained, tmp_path) -> None:
        learner, scenario = trained
        pixels = scenario.session(0).unlabelled.read(range(6))
        old = learner.classes[1]
        learner.rename(old, "chouette hulotte 🦉")
        assert learner.classes[1] == "chouette hulotte 🦉"
        assert learner.student.text_head.captions([1]) == ["a photo of a chouette hulotte 🦉."]
        learner.save(tmp_path / "x")
        assert Learner.load(tmp_path / "x").predict(pixels) == learner.predict(pixels)
        with pytest.raises(InputError, match=f"unknown class '{old}'"):
            learner.rename(old, "owl")
        with pytest.raises(InputError, match="exists already"):
            learner.rename(learner.classes[0], learner.classes[2])
        with pytest.raises(InputError, match="empty class name"):
            learner.rename(learner.classes[0], " ")

    @pytest.mark.parametrize(
        "changes",
        [{}, {"buffer_size": 9}, {"method": "slca"}, {"method": "spu", "adapt": "rmt"},
         {"method": "spu", "adapt": "eata"}, {"method": "spu", "adapt": "note"},
         {"skew_aware_ema": True}],
    )  # fmt: skip
    def test_a_removed_class_is_removed_everywhere(self, small, tiny, changes) -> None:
        settings = small(**changes)
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        learner.learn(scenario.session(0))
        pixels = scenario.session(0).unlabelled.read(range(8))
        learner.adapt(pixels)
        removed, kept = learner.classes[1], [learner.classes[0], learner.classes[2]]
        learner.remove(removed)
        assert learner.classes == kept
        assert all(p.label in kept and len(p.top) == 2 for p in learner.predict(pixels))
        assert all(labels.max() < 2 for labels in learner.replay_buffer.labels)
        learner.adapt(pixels)
        learner.learn(scenario.session(1))
        learner.adapt(pixels)
        assert learner.classes[:2] == kept
        with pytest.raises(InputError, match="unknown class"):
            learner.remove(removed)
        for name in list(learner.classes):
            learner.remove(name)
        assert learner.adapt(pixels) is None  # no class is left


def test_a_learner_made_of_something_else_is_one_sentence() -> None:
    with pytest.raises(InputError, match="a learner got 'tiny'; give LearnerSettings"):
        Learner("tiny")
