"""Precision, microbatches, checkpointing and compilation change the cost, not what is learned."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from dosapp.bench.model import random_clip, random_images
from dosapp.bench.model import small as small_config
from dosapp.data.base import Prompts
from dosapp.errors import DivergedError
from dosapp.experiments.plan import plan
from dosapp.learner.learner import Learner
from dosapp.methods.dosapp import DoSAPP
from dosapp.settings import LearnerSettings
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

RECOMPUTING = {"microbatch": {"microbatch": 3}, "checkpointing": {"gradient_checkpointing": True}}
RECOMPUTING["both"] = RECOMPUTING["microbatch"] | RECOMPUTING["checkpointing"]


def make_student(dtype: torch.dtype = torch.float64, **settings: object) -> Student:
    """A student with random weights and seven classes."""
    backbone = random_clip(small_config())
    backbone.model.to(dtype)
    backbone.configure(LearnerSettings(**settings))
    student = Student(backbone, lr=1e-3, loss_scaling=settings.get("precision") == "float16")
    names = [f"class {n}" for n in range(7)]
    student.text_head.add_classes(names, Prompts(train="{}", evaluate=("{}",)))
    student.set_trainable(Selection(tuple(backbone.first_mlp_weights())))
    return student


def train(**settings: object) -> tuple[Student, DoSAPP, list[float]]:
    """Two labelled steps and two on the stream."""
    student, method = make_student(**settings), DoSAPP()
    method.setup(student)
    losses = []
    for step in range(4):
        pixels, labels = random_images(8, 32, f"batch {step}"), torch.arange(8) % 7
        if step < 2:
            loss = student.clip_loss(pixels, labels)
            assert student.step(loss)
            method.after_step(student)
        else:
            loss = method.stream_loss(student, pixels).loss
            assert student.step(loss)
            method.after_stream_step(student)
        losses.append(loss.item())
    return student, method, losses


def saved_bytes(backbone, images) -> int:
    """Bytes that a forward pass saves for its backward pass, besides weights and images."""
    known = {t.untyped_storage().data_ptr() for t in (*backbone.weights().values(), images)}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backbone.encode_image(images)
    return sum(sizes.values())


@pytest.mark.parametrize("how", RECOMPUTING)
def test_recomputing_gives_the_gradients_of_the_whole_batch(how) -> None:
    student, method, losses = train()
    other, other_method, other_losses = train(**RECOMPUTING[how])
    assert other_losses == pytest.approx(losses, abs=1e-9)
    pairs = [(student.backbone, other.backbone), (method.teacher, other_method.teacher)]
    for expected, backbone in pairs:
        for name, weight in expected.weights().items():
            torch.testing.assert_close(backbone.weights()[name], weight, atol=1e-9, rtol=0)


@pytest.mark.parametrize("how", RECOMPUTING)
def test_recomputing_saves_memory(how) -> None:
    images = random_images(8, 32).double()
    usual, less = (
        saved_bytes(make_student(**settings).backbone, images)
        for settings in ({}, RECOMPUTING[how])
    )
    assert less < 0.3 * usual


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_nearly_the_same(precision, tiny, learner_settings) -> None:
    pixels, labels = random_images(6, 32), torch.arange(6) % 3
    losses = []
    for dtype in ("float32", precision):
        backbone = tiny.shared_copy(unshared=list(tiny.weights()))
        student = Learner(learner_settings(precision=dtype), backbone).student
        student.text_head.add_classes(["red star", "blue circle", "green heart"], Prompts())
        student.set_trainable(Selection(tuple(backbone.first_mlp_weights())))
        for _ in range(3):
            loss = student.clip_loss(pixels, labels)
            assert loss.dtype == torch.float32
            assert student.step(loss)
        losses.append(loss.item())
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_gradients_in_float16_are_scaled_and_unscaled() -> None:
    full, half = make_student(torch.float32), make_student(torch.float32, precision="float16")
    pixels, labels = random_images(8, 32), torch.arange(8) % 7
    gradients, half_gradients = (
        next(
            iter(
                student.iter_gradients(
                    student.backbone.first_mlp_weights(), [student.clip_loss(pixels, labels)]
                )
            )
        )
        for student in (full, half)
    )
    for name, gradient in gradients.items():
        assert (half_gradients[name] - gradient).norm() < 0.02 * gradient.norm()
    half.step(half.clip_loss(pixels, labels))
    state = half.optimizer_state()
    assert state["scaler/scale"] == 1024
    half.load_optimizer_state(state | {"scaler/scale": torch.tensor(2.0)})
    assert half.optimizer_state()["scaler/scale"] == 2
    before = {n: w.detach().clone() for n, w in half.backbone.weights().items()}
    assert not half.step(half.clip_loss(pixels, labels) * 1e38)  # not finite: nothing changes
    assert all(torch.equal(w, before[n]) for n, w in half.backbone.weights().items())


def test_a_grown_loss_scale_does_not_affect_scores() -> None:
    student = make_student(torch.float32, precision="float16")
    grown = {"scaler/scale": torch.tensor(2.0**40)}  # after very many steps
    student.load_optimizer_state(student.optimizer_state() | grown)
    weights, pixels = student.backbone.first_mlp_weights(), random_images(8, 32)
    scores = student.gradient_scores(weights, [student.clip_loss(pixels, torch.arange(8) % 7)])
    assert all(score.isfinite().all() and score.any() for score in scores.values())
    with pytest.raises(DivergedError, match="a gradient is not finite"):
        student.gradient_scores(weights, [student.clip_loss(pixels, torch.arange(8) % 7) * 1e38])


def test_only_the_precision_changes_the_key_of_a_result(small) -> None:
    key = plan(small()).key
    for same in (
        {"device": "cpu"},
        {"microbatch": 4},
        {"gradient_checkpointing": True},
        {"compile": True},
    ):
        assert plan(small(**same)).key == key
    assert plan(small(precision="bfloat16")).key != key


COMPILE = """
import torch
from dosapp.bench.model import random_clip, random_images, small
from dosapp.settings import LearnerSettings
backbone = random_clip(small())
with torch.no_grad():
    expected = backbone.encode_image(random_images(3, 32))
    backbone.configure(LearnerSettings(compile=True))
    features = backbone.encode_image(random_images(3, 32))
torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-4)
print(backbone.is_compiled)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("compiler", "is_compiled"), [("g++", True), ("/nowhere", False)])
def test_blocks_are_compiled_or_a_warning_says_why_not(compiler, is_compiled, tmp_path) -> None:
    environment = os.environ | {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == str(is_compiled)
    assert ("torch.compile does not work here" in process.stderr) == (not is_compiled)
