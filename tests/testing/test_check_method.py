"""`check_method` accepts a sound method, and each of its checks can fail."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dosapp import METHODS, AdaptResult, Method, Student, method_dataclass
from dosapp.backbones.wrappers import BackboneWrapper
from dosapp.errors import InputError
from dosapp.testing import METHOD_CHECKS, check_method
from dosapp.testing.method_checks import (
    check_deterministic,
    check_empty_stream,
    check_inputs_unmodified,
    check_predict_is_pure,
    check_save_and_load,
    check_unusual_batches,
)


@method_dataclass
class Adapter(Method):
    """A sound adapter: pseudo-labels by the student; the loss is weighted by a running mean."""

    phase = "unlabelled"
    decay: float = 0.9

    def setup(self, student: Student) -> None:
        self.mean = torch.zeros(())

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        with torch.no_grad():
            confidence, labels = student.score_images(pixels).max(dim=1)
            self.mean = self.decay * self.mean + (1 - self.decay) * confidence.mean()
        return AdaptResult(labels, (1 + self.mean) * student.clip_loss(pixels, labels))

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean}

    def load_state_dict(self, tensors) -> None:
        self.mean = tensors["mean"]


class WritesToItsInput(Adapter):
    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        return super().stream_loss(student, pixels.mul_(0.5))


class DrawsWhenPredicting(Adapter):
    def experts(self, student: Student):
        torch.rand(1)
        return super().experts(student)


class ChangesWhenPredicting(Adapter):
    def experts(self, student: Student):
        self.mean = self.mean + 1
        return super().experts(student)


class DrawsWithoutSeed(Adapter):
    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        result = super().stream_loss(student, pixels)
        labels = torch.randint(len(student.classes), result.labels.shape)
        return AdaptResult(labels, student.clip_loss(pixels, labels))


class ForgetsItsStateOnLoad(Adapter):
    def load_state_dict(self, tensors) -> None:
        pass


class SavesNoState(Adapter):
    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors) -> None:
        pass


class PredictsWithoutSavedState(Adapter):
    """The expert depends on a tensor that is not saved."""

    def experts(self, student: Student):
        class Shifted(BackboneWrapper):
            def project_image(self, pooled: Tensor) -> Tensor:
                return super().project_image(pooled * (1 + self.added["mean"]) + self.added["mean"])

        return {"shifted": Shifted(student.backbone, {"mean": self.unsaved})}

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.unsaved = torch.zeros(())

    def after_stream_step(self, student: Student) -> None:
        self.unsaved = self.unsaved + 1


class LearnsWithoutSavedState(Adapter):
    """The labelled steps depend on a number that is not saved."""

    phase = "both"

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.sessions = 0

    def end_session(self, student: Student, session) -> None:
        self.sessions += 1

    def loss(self, student: Student, batch) -> Tensor:
        return super().loss(student, batch) * 2.0**self.sessions + self.sessions


class StateChangesByItself(Adapter):
    def state_dict(self) -> dict[str, Tensor]:
        self.mean = self.mean + 1
        return super().state_dict()


class NeedsTwoImages(Adapter):
    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        if len(pixels) < 2:
            raise ValueError("two images are needed")
        return super().stream_loss(student, pixels)


class NeedsOtherImages(Adapter):
    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        result = super().stream_loss(student, pixels)
        spread = pixels.std(dim=0, correction=0).mean()  # zero for equal images
        return AdaptResult(result.labels, result.loss / spread)


class NeedsManyClassImages(Adapter):
    def end_session(self, student: Student, session) -> None:
        counts = torch.from_numpy(session.train.labels).bincount()
        if counts.min() < 4:
            raise ValueError("four images of each class are needed")


BROKEN = [
    (check_inputs_unmodified, WritesToItsInput, "the input images were modified"),
    (check_predict_is_pure, DrawsWhenPredicting, "predicting drew random numbers"),
    (check_predict_is_pure, ChangesWhenPredicting, "predicting changed the learner"),
    (check_deterministic, DrawsWithoutSeed, "the same seed gave other"),
    (check_save_and_load, ForgetsItsStateOnLoad, "a loaded learner has another state"),
    (check_save_and_load, SavesNoState, "two equal learners adapt differently"),
    (check_save_and_load, PredictsWithoutSavedState, "a loaded learner predicts otherwise"),
    (check_save_and_load, LearnsWithoutSavedState, "two equal learners learn differently"),
    (check_empty_stream, StateChangesByItself, "an empty batch changed the learner"),
    (check_unusual_batches, NeedsTwoImages, "an unusual batch cannot be used: two images"),
    (check_unusual_batches, NeedsOtherImages, "an unusual batch cannot be used: the loss became"),
    (check_unusual_batches, NeedsManyClassImages, "an unusual batch cannot be used: four images"),
]


class Described(Adapter):
    summary: ClassVar[str] = "annotated as Method does it, so no hyper-parameter"


def test_a_sound_method_passes_and_is_not_registered() -> None:
    registered = dict(METHODS)
    check_method(Described, {"decay": 0.5}, buffer_size=6)
    assert registered == METHODS


class Undeclared(Method):
    phase = "labelled"
    strength: float = 1.0


class Misspelt(Method):
    phase = "unlabeled"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Undeclared, "lacks @method_dataclass, so 'strength' is no hyper-parameter"),
        (Misspelt, "the phase of Misspelt is 'unlabeled'; give one of 'labelled', 'unlabelled'"),
        (5, "5 is no method"),
    ],
)
def test_a_wrong_declaration_is_one_sentence(method, message) -> None:
    with pytest.raises(InputError, match=message):
        check_method(method)


def test_a_broken_method_fails_and_is_not_registered() -> None:
    registered = dict(METHODS)
    with pytest.raises(AssertionError, match="the input images were modified"):
        check_method(WritesToItsInput)
    assert registered == METHODS


@pytest.mark.parametrize(
    ("check", "method", "message"), BROKEN, ids=[method.__name__ for _, method, _ in BROKEN]
)
def test_each_check_can_fail(check, method, message, small, tiny, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "broken", method)
    names = {"method": "spu", "adapt": "broken"}
    if method.phase == "both":
        names = {"method": "broken"}
    with pytest.raises(AssertionError, match=message):
        check(small(**names), tiny, tmp_path)


def test_no_check_is_missing_above() -> None:
    assert {check for check, _, _ in BROKEN} == set(METHOD_CHECKS)
