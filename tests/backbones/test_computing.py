"""Where and how a learner computes changes its cost, not what it learns."""

import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch

from dosapp.bench.model import random_clip, random_images, small
from dosapp.data.base import Prompts
from dosapp.errors import DivergedError, InputError
from dosapp.experiments.plan import plan
from dosapp.learner.learner import Learner
from dosapp.methods.dosapp import DoSAPP
from dosapp.runtime import devices
from dosapp.runtime.process_memory import peak_memory
from dosapp.settings import LearnerSettings
from dosapp.student.selection import Selection
from dosapp.student.student import Student
from support.cli import dosapp
from support.distributed_learner import LIVES
from support.fake_device import DEVICE, Elsewhere

WAYS = {"microbatch": {"microbatch": 3}, "checkpointing": {"gradient_checkpointing": True}}
WAYS["both"] = WAYS["microbatch"] | WAYS["checkpointing"]


def student(**how: object) -> Student:
    net = random_clip(small())
    net.model.double()
    net.compute(LearnerSettings(**how))
    made = Student(net, lr=1e-3, half=how.get("precision") == "float16")
    made.add_classes([f"class {n}" for n in range(7)], Prompts(train="{}", evaluate=("{}",)))
    made.set_trainable(Selection(tuple(net.first_mlp_weights())))
    return made


def stepped(**how: object) -> tuple[Student, DoSAPP, list[float]]:
    """Two lessons and two steps of the stream."""
    made, method = student(**how), DoSAPP()
    method.setup(made)
    losses = []
    for step in range(4):
        pixels, labels = random_images(8, 32, f"batch {step}"), torch.arange(8) % 7
        stream = step > 1
        loss = method.stream_loss(made, pixels).loss if stream else made.clip_loss(pixels, labels)
        assert made.step(loss)
        (method.after_stream_step if stream else method.after_step)(made)
        losses.append(loss.item())
    return made, method, losses


def kept(net, images) -> int:
    """Bytes that a forward pass keeps for its backward, besides weights and images."""
    known = {t.untyped_storage().data_ptr() for t in (*net.weights().values(), images)}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net.encode_image(images)
    return sum(found.values())


@pytest.mark.parametrize("way", WAYS)
def test_recomputing_gives_the_gradients_of_the_whole_batch(way) -> None:
    one, method, losses = stepped()
    two, other, again = stepped(**WAYS[way])
    assert again == pytest.approx(losses, abs=1e-9)
    for mine, theirs in ((one.net, two.net), (method.teacher, other.teacher)):
        for name, weight in mine.weights().items():
            torch.testing.assert_close(theirs.weights()[name], weight, atol=1e-9, rtol=0)


@pytest.mark.parametrize("way", WAYS)
def test_recomputing_keeps_less(way) -> None:
    images = random_images(8, 32).double()
    everything, less = (kept(student(**how).net, images) for how in ({}, WAYS[way]))
    assert less < 0.3 * everything


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns_nearly_the_same(precision, tiny, pupil) -> None:
    pixels, labels = random_images(6, 32), torch.arange(6) % 3
    losses = []
    for how in ("float32", precision):
        net = tiny.shared_copy(own=list(tiny.weights()))
        learner = Learner(pupil(precision=how), net)
        learner.student.text_head.add_classes(["red star", "blue circle", "green heart"], Prompts())
        learner.student.set_trainable(Selection(tuple(net.first_mlp_weights())))
        for _ in range(3):
            loss = learner.student.clip_loss(pixels, labels)
            assert loss.dtype == torch.float32
            assert learner.student.step(loss)
        losses.append(loss.item())
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_gradients_in_float16_are_scaled_up_and_down_again() -> None:
    one, two = student(), student(precision="float16")
    for made in (one, two):
        made.net.model.float()
    pixels, labels = random_images(8, 32), torch.arange(8) % 7
    weights = [made.net.first_mlp_weights() for made in (one, two)]
    mine, theirs = (
        next(iter(made.iter_gradients([made.clip_loss(pixels, labels)], w)))
        for made, w in zip((one, two), weights, strict=True)
    )
    for name, grad in mine.items():
        assert (theirs[name] - grad).norm() < 0.02 * grad.norm()
    two.step(two.clip_loss(pixels, labels))
    state = two.optimizer_state()
    assert state["scaler/scale"] == 1024
    two.load_optimizer_state(state | {"scaler/scale": torch.tensor(2.0)})
    assert two.optimizer_state()["scaler/scale"] == 2
    before = {n: w.detach().clone() for n, w in two.net.weights().items()}
    assert not two.step(two.clip_loss(pixels, labels) * 1e38)  # not finite: nothing moves
    assert all(torch.equal(w, before[n]) for n, w in two.net.weights().items())


def test_a_scale_that_has_grown_does_not_spoil_the_scores() -> None:
    made = student(precision="float16")
    made.net.model.float()
    grown = {"scaler/scale": torch.tensor(2.0**40)}  # after very many steps
    made.load_optimizer_state(made.optimizer_state() | grown)
    weights, pixels = made.net.first_mlp_weights(), random_images(8, 32)
    scores = made.scores(weights, [made.clip_loss(pixels, torch.arange(8) % 7)])
    assert all(found.isfinite().all() and found.any() for found in scores.values())
    with pytest.raises(DivergedError, match="a gradient is not finite"):
        made.scores(weights, [made.clip_loss(pixels, torch.arange(8) % 7) * 1e38])


def test_only_precision_makes_another_result(small) -> None:
    key = plan(small()).key
    for same in (
        {"device": "cpu"},
        {"microbatch": 4},
        {"gradient_checkpointing": True},
        {"compile": True},
    ):
        assert plan(small(**same)).key == key
    assert plan(small(precision="bfloat16")).key != key


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_one_sentence(tmp_path) -> None:
    said = dosapp("run", "--device", "cuda", cwd=tmp_path, code=2)
    assert "device 'cuda' is not available here; use auto or cpu" in said.stderr
    with pytest.raises(InputError, match="device 'gpu' is unknown"):
        devices.resolve_device("gpu")
    assert devices.resolve_device("auto").type in ("cpu", "mps")


def lived(settings, device: str) -> Learner:
    planned = plan(settings.model_copy(update={"device": device}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        learner = Learner(planned.settings.learner(), planned.backbone)
    assert learner.device.type == device
    for t in range(len(planned.scenario.task_groups)):
        session = planned.scenario.session(t)
        learner.learn(session)
        for pixels in session.unlabelled.batches(settings.stream_batch_size):
            learner.adapt(pixels)
    return learner


@pytest.fixture
def another(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: [DEVICE.type, "cpu"])


@pytest.mark.usefixtures("another")
def test_a_learner_moves_from_device_to_device(small, tmp_path) -> None:
    """Learns elsewhere what it learns here; saved there, it goes on here, and back again."""
    here = lived(small(epochs=1, tasks=1), "cpu")
    pixels = random_images(4, 32)
    with Elsewhere():
        there = lived(small(epochs=1, tasks=1), DEVICE.type)
        assert all(w.device == DEVICE for w in there.student.backbone.weights().values())
        there.save(tmp_path / "there")
        said = there.predict(pixels)
    back = Learner.load(tmp_path / "there")
    assert back.device.type == "cpu"
    for learner in (here, back):
        learner.adapt(pixels)
        answers = learner.predict(pixels)
        assert [a.label for a in answers] == [a.label for a in said]
    back.save(tmp_path / "here")
    with Elsewhere():
        again = Learner.load(tmp_path / "here", device=DEVICE.type)
        assert again.digest() == back.digest()
        again.adapt(pixels)


@pytest.mark.slow
@pytest.mark.usefixtures("another")
@pytest.mark.parametrize("name", LIVES)
def test_every_method_lives_elsewhere(name, small) -> None:
    settings = small(
        **LIVES[name], confidence_gate=0.1, entropy_lr_scaling=True, skew_aware_ema=True, epochs=1
    )
    here = lived(settings, "cpu").state()
    with Elsewhere():
        there = lived(settings, DEVICE.type).state()
    assert there.facts == here.facts
    assert there.tensors.keys() == here.tensors.keys()
    assert all(tensor.device.type == "cpu" for tensor in there.tensors.values())


def test_tensors_on_two_devices_do_not_mix() -> None:
    """Or the tests above would show nothing."""
    with Elsewhere():
        there = torch.ones(3).to(DEVICE)
        assert (there * 2 + torch.tensor(1.0)).sum().item() == 9
        assert there[torch.tensor([0, 2])].device == DEVICE
        for wrong in (lambda: there + torch.ones(3), lambda: torch.cat([there, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="and on the CPU"):
                wrong()
        with pytest.raises(RuntimeError), torch.inference_mode():
            torch.nn.functional.linear(torch.ones(2, 3), there[None])


COMPILED = """
import torch
from dosapp.bench.model import random_clip, random_images, small
from dosapp.settings import LearnerSettings
net = random_clip(small())
with torch.no_grad():
    plain = net.encode_image(random_images(3, 32))
    net.compute(LearnerSettings(compile=True))
    again = net.encode_image(random_images(3, 32))
torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)
print("compiled" if "_torchdynamo" in str(vars(net._through)) else "as it was")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("compiler", "said"), [("g++", "compiled"), ("/nowhere", "as it was")])
def test_blocks_are_compiled_or_it_says_why_not(compiler, said, tmp_path) -> None:
    environment = os.environ | {"CXX": compiler, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == said
    assert ("torch.compile does not work here" in done.stderr) == (said == "as it was")


def test_freed_memory_stays_with_the_process() -> None:
    """Otherwise the kernel fills every large block with zeros, again in every step."""
    program = """
import resource, sys, threading
from dosapp.runtime.process_memory import retain_freed_memory

if sys.argv[1] == "keep":
    retain_freed_memory()

import torch


def fresh_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(20_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def fewest():
    print(min(fresh_pages() for _ in range(30)))


fewest()
thread = threading.Thread(target=fewest)
thread.start()
thread.join()
"""

    def fewest(how: str) -> int:
        command = [sys.executable, "-c", program, how]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return max(map(int, said.split()))

    if sys.platform != "linux" or fewest("usual") < 1000:
        pytest.skip("this machine's memory is kept anyway")
    assert fewest("keep") < 1000


def test_a_runs_peak_is_not_what_an_earlier_one_in_its_process_needed() -> None:
    if not sys.platform.startswith("linux") or peak_memory() is None:
        pytest.skip("nobody says how much memory is held here")
    program = """
from dosapp.runtime.process_memory import reset_peak_memory, retain_freed_memory, peak_memory

retain_freed_memory()
import torch

torch.ones(100_000_000)
print(peak_memory())
reset_peak_memory()
print(peak_memory())
"""
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    large, usual = map(float, said.split())
    assert large - usual > 300  # of 381 MB
