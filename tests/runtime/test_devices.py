"""Devices by name, and learners that are trained on one and continue on another."""

import warnings

import pytest
import torch

from dosapp.bench.model import random_images
from dosapp.errors import InputError
from dosapp.experiments.plan import plan
from dosapp.learner.learner import Learner
from dosapp.runtime import devices
from support.cli import dosapp
from support.distributed_learner import CASES
from support.fake_device import DEVICE, FakeDevice


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_does_not_exist_is_one_sentence(tmp_path) -> None:
    output = dosapp("run", "--device", "cuda", cwd=tmp_path, code=2)
    assert "device 'cuda' is not available here; use auto or cpu" in output.stderr
    with pytest.raises(InputError, match="device 'gpu' is unknown"):
        devices.resolve_device("gpu")
    assert devices.resolve_device("auto").type in ("cpu", "mps")


def train(settings, device: str) -> Learner:
    """A learner after all sessions and streams on a device."""
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
def fake_device(monkeypatch) -> None:
    """Make the fake device available."""
    monkeypatch.setattr(devices, "available_devices", lambda: [DEVICE.type, "cpu"])


@pytest.mark.usefixtures("fake_device")
def test_a_learner_continues_on_another_device(small, tmp_path) -> None:
    """Trained on both devices alike; saved on one, it continues on the other, and back again."""
    on_cpu = train(small(epochs=1, tasks=1), "cpu")
    pixels = random_images(4, 32)
    with FakeDevice():
        on_device = train(small(epochs=1, tasks=1), DEVICE.type)
        assert all(w.device == DEVICE for w in on_device.student.backbone.weights().values())
        on_device.save(tmp_path / "device")
        expected = on_device.predict(pixels)
    loaded = Learner.load(tmp_path / "device")
    assert loaded.device.type == "cpu"
    for learner in (on_cpu, loaded):
        learner.adapt(pixels)
        predictions = learner.predict(pixels)
        assert [p.label for p in predictions] == [p.label for p in expected]
    loaded.save(tmp_path / "cpu")
    with FakeDevice():
        back = Learner.load(tmp_path / "cpu", device=DEVICE.type)
        assert back.digest() == loaded.digest()
        back.adapt(pixels)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("name", CASES)
def test_every_method_trains_on_another_device(name, small) -> None:
    settings = small(
        **CASES[name], confidence_gate=0.1, entropy_lr_scaling=True, skew_aware_ema=True, epochs=1
    )
    on_cpu = train(settings, "cpu").state()
    with FakeDevice():
        on_device = train(settings, DEVICE.type).state()
    assert on_device.facts == on_cpu.facts
    assert on_device.tensors.keys() == on_cpu.tensors.keys()
    assert all(tensor.device.type == "cpu" for tensor in on_device.tensors.values())


def test_the_fake_device_refuses_tensors_of_the_cpu() -> None:
    """Otherwise the tests above would show nothing."""
    with FakeDevice():
        fake = torch.ones(3).to(DEVICE)
        assert (fake * 2 + torch.tensor(1.0)).sum().item() == 9
        assert fake[torch.tensor([0, 2])].device == DEVICE
        for wrong in (lambda: fake + torch.ones(3), lambda: torch.cat([fake, torch.ones(1)])):
            with pytest.raises(RuntimeError, match="and on the CPU"):
                wrong()
        with pytest.raises(RuntimeError), torch.inference_mode():
            torch.nn.functional.linear(torch.ones(2, 3), fake[None])
