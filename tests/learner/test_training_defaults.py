"""Small data trains by default: batches, epochs and a learning rate from the first session."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dosapp import Learner, LearnerSettings, RunSettings, plan, run
from dosapp.backbones.registry import TINY
from dosapp.data.convert import as_dataset
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.errors import InputError
from dosapp.experiments.identity import common_stream_size
from dosapp.learner import training_defaults
from dosapp.learner.evaluation import Evaluation, SessionResult
from dosapp.learner.training_defaults import RATES, UNTESTED_RATE, Training, choose_training
from dosapp.scenario import Session
from support.images import write_shape_folders

# The embedded weights as a folder of the user's own: no learning rate comes with it.
FOLDER_BACKBONE = LearnerSettings(backbone=str(TINY), method="spu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Eight classes of ten training images."""
    return write_shape_folders(tmp_path_factory.mktemp("own") / "photos")


@pytest.fixture(scope="module")
def session(photos) -> Session:
    preprocess = Learner().preprocess
    return Session.from_dataset(as_dataset(photos, preprocess, hold_out=False))


class TestRule:
    @pytest.mark.parametrize(
        ("images", "expected"),
        [(1, (1, 30)), (20, (8, 30)), (60, (8, 30)), (128, (32, 30)), (256, (64, 10))],
    )
    def test_small_sessions_get_small_batches_and_more_epochs(self, images, expected) -> None:
        training = Training()
        assert (training.batch_size_for(images), training.epochs_for(images)) == expected

    def test_given_values_are_kept(self) -> None:
        training = Training(1e-4, epochs=3, batch_size=64)
        assert (training.batch_size_for(500), training.epochs_for(20)) == (64, 3)
        assert training.batch_size_for(20) == 20


class TestRate:
    def test_a_stored_rate_can_be_left_to_the_first_session(self) -> None:
        assert Learner(LearnerSettings(method="spu")).training.lr is not None
        assert Learner(LearnerSettings(method="spu", auto_lr=True)).training.lr is None
        with pytest.raises(InputError, match=r"lr is 0\.01 and auto_lr would choose another"):
            LearnerSettings.parse({"lr": 0.01, "auto_lr": True})

    def test_the_first_session_chooses_a_rate_that_is_saved(self, session, tmp_path) -> None:
        learner = Learner(FOLDER_BACKBONE.model_copy(update={"epochs": 1}))
        assert learner.training.lr is None
        before = learner.digest()
        chosen = choose_training(learner, session).lr
        assert chosen in RATES
        assert learner.digest() == before  # choosing changes nothing
        result = learner.learn(session)
        assert result.lr == learner.training.lr == chosen
        learner.save(tmp_path / "saved")
        loaded = Learner.load(tmp_path / "saved")
        assert (loaded.training, loaded.student.lr) == (learner.training, chosen)
        assert loaded.digest() == learner.digest()

    def test_a_head_that_predicts_does_not_change_the_rate(self, session) -> None:
        """It is good at every rate; what the rate is for is the training below it."""
        rates = {
            method: choose_training(
                Learner(LearnerSettings(backbone=str(TINY), method=method, epochs=1)), session
            ).lr
            for method in ("dosapp", "stream-gda")
        }
        assert rates["dosapp"] == rates["stream-gda"] > RATES[0]

    def test_a_method_that_never_trains_tries_no_rate(self, session) -> None:
        learner, tried = Learner(LearnerSettings(backbone=str(TINY), method="zero-shot")), []
        list(learner.training_steps(session, on_trial=tried.append))
        learner.learn({"fox": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)})  # without a warning
        assert not tried
        assert learner.training.lr is None

    def test_a_session_that_cannot_compare_rates_says_so(self, session) -> None:
        learner = Learner(FOLDER_BACKBONE.model_copy(update={"epochs": 1}))
        images = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)
        with pytest.warns(UserWarning, match="class 'fox' has 2 training images.*Give one with lr"):
            result = learner.learn({"fox": images, "owl": images})
        assert result.lr == UNTESTED_RATE

    def test_where_every_training_harms_it_stays_close_to_zero_shot(self, monkeypatch) -> None:
        """The backbone knows these shapes; a rate of 0.5 destroys it."""
        monkeypatch.setattr(training_defaults, "RATES", (0.5,))
        shapes = SHAPES.draw_dataset(32, 10, 2)
        images = {
            name: shapes.train.images.read(np.flatnonzero(shapes.train.labels == n))
            for n, name in enumerate(shapes.classes[:6])
        }
        with pytest.warns(UserWarning, match="no learning rate lowers the loss"):
            chosen = choose_training(Learner(FOLDER_BACKBONE), Session.from_images(images))
        assert chosen == Training(0.5, epochs=1)

    def test_a_backbone_with_rates_keeps_them(self) -> None:
        assert Learner(LearnerSettings(method="spu")).training.lr == 3e-4

    def test_a_learner_can_be_changed_later(self, tmp_path) -> None:
        learner = Learner()
        learner.change_training(lr=1e-3, epochs=2)
        learner.save(tmp_path / "saved")
        assert Learner.load(tmp_path / "saved").training == Training(1e-3, 2, None)
        with pytest.raises(InputError, match="epochs is 0"):
            learner.change_training(epochs=0)


class TestRun:
    def test_own_data_is_keyed_by_the_rule_and_named_data_by_the_values(self, photos) -> None:
        own = plan(RunSettings(data=str(photos), tasks=2, backbone=str(TINY)))
        assert own.identity["training"] == training_defaults.RULE_VERSION
        assert own.identity["learning"][0] is None
        named = plan(RunSettings(classes=4, tasks=2))
        assert "training" not in named.identity
        assert named.identity["learning"][:4] == [3e-4, 0.2, 10, 64]

    def test_a_folder_of_ten_images_per_class_is_learned_by_default(self, photos, tmp_path) -> None:
        settings = RunSettings(data=str(photos), tasks=2, backbone=str(TINY), method="spu")
        result = run(settings, tmp_path / "run")
        assert result.metrics["accuracy"] > result.metrics["zero_shot_accuracy"] + 10
        assert result.training["lr"] in RATES
        assert (result.training["epochs"], result.training["batch_size"]) == (30, 8)
        assert result.settings["lr"] is None

    def test_small_streams_get_small_batches(self, photos, tmp_path) -> None:
        """Of 12 test images in each of 8 classes, half are streamed."""
        settings = RunSettings(data=str(photos), tasks=2, epochs=1)
        result = run(settings, tmp_path / "run")
        assert result.stream["images"] == [24, 48]
        assert result.steps["stream"] == [3, 6]  # batches of 8
        assert result.settings["stream_batch_size"] is None

    def test_the_key_tells_which_batches_of_the_stream_were_used(self, photos) -> None:
        def stream_size(**changes) -> int | None:
            settings = RunSettings(**{"data": str(photos), "tasks": 2, "lr": 1e-4} | changes)
            size: int | None = plan(settings).identity["learning"][4]
            return size

        assert stream_size() == 8
        assert stream_size(stream_batch_size=5) == 5
        longer = plan(RunSettings(classes=8, tasks=2, test_images=32)).scenario
        assert common_stream_size(longer) is None  # 16 and 32
        # As before there was a rule: keys of named data, of large streams and of none are the same.
        assert stream_size(stream=False) == stream_size(classes_per_batch="1-2") == 64
        assert stream_size(data="shapes", classes=4) == 64

    def test_a_run_takes_arrays(self, session, tmp_path) -> None:
        pixels = session.train.read(range(len(session.train))).mul(255).byte().numpy()
        names = [session.classes[label] for label in session.train.labels]
        settings = RunSettings(tasks=2, epochs=1, lr=1e-4, method="spu")
        result = run(settings, str(tmp_path / "run"), data=(pixels, names))
        assert [len(task["classes"]) for task in result.tasks] == [4, 4]


class TestReports:
    def test_learn_reports_held_out_accuracy_beside_zero_shot(self, photos) -> None:
        learner = Learner()
        result = learner.learn(photos, test=photos)
        measured = result.evaluation
        assert measured is not None
        assert measured.images == 96  # the test part
        assert measured.accuracy > measured.zero_shot
        assert set(measured.per_class) == set(learner.classes)
        assert f"zero-shot {measured.zero_shot:.1f} %" in str(result)
        assert repr(learner) == (
            "Learner(backbone='tiny', method='stream-gda-ensemble', classes=8, sessions=1)"
        )
        first = next((photos / "train").iterdir())
        assert learner.predict(first / "0.png") == learner.predict([str(first / "0.png")])
        assert len(learner.predict(first)) == 10
        assert learner.evaluate(photos / "train").images == 80
        with pytest.raises(InputError, match="unknown class 'zebra'"):
            learner.evaluate({"zebra": first})

    def test_test_images_that_cannot_be_used_are_refused_before_training(self, photos) -> None:
        learner, first = Learner(), next((photos / "train").iterdir())
        with pytest.raises(InputError, match="knows no classes yet"):
            learner.evaluate(photos)
        with pytest.raises(InputError, match="unknown class 'zebra'; did you mean 'gazzer'"):
            learner.learn(photos, test={"zebra": first})
        assert learner.sessions == 0

    def test_a_session_that_did_harm_says_what_to_do(self) -> None:
        measured = Evaluation(72.9, 81.2, 48, {})
        result = SessionResult(("fox", "owl"), 20, 60, 0.1, 1e-3, 30, 8, measured)
        assert "worse than before training: 72.9 % of 48 images" in result.warning
        assert "smaller lr than 0.001" in result.warning

    def test_a_session_that_taught_nothing_says_what_to_do(self, photos) -> None:
        learner = Learner(LearnerSettings(method="dosapp", lr=1e-9, epochs=1))
        with pytest.warns(UserWarning, match="nothing was learned: .*larger lr than 1e-09"):
            learner.learn(photos, test=photos)

    def test_a_method_that_trains_nothing_is_not_told_to_use_another_rate(self, photos) -> None:
        result = Learner(LearnerSettings(method="zero-shot")).learn(photos, test=photos)
        assert (result.steps, result.epochs, result.warning) == (0, 0, "")
        assert "learning rate" not in str(result)
