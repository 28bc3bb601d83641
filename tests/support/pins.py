"""Digests that no renaming may move; `python tests/support/pins.py` writes pins.json again."""

import io
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.registry import load_backbone
from dosapp.experiments.plan import build_scenario
from dosapp.history.history import History
from dosapp.learner.learner import Learner
from dosapp.methods.registry import METHODS
from dosapp.runtime.machine import describe_machine
from dosapp.settings import RunSettings

FILE = Path(__file__).parent / "pins.json"
OLD_LEARNER = Path(__file__).parent / "learner-0.1"  # written by version 0.1.0
SETTINGS = {
    "classes": 6,
    "tasks": 2,
    "epochs": 2,
    "batch_size": 8,
    "stream_batch_size": 8,
    "train_images": 8,
    "test_images": 8,
    "lr": 1e-3,
}
PAIRS = {
    "spu+self-training": {"method": "spu", "adapt": "self-training"},
    "spu+rmt": {"method": "spu", "adapt": "rmt"},
    "sparcl+rmt": {"method": "sparcl", "adapt": "rmt"},
    "flyp+dosapp": {"method": "flyp", "adapt": "dosapp"},
    "l2p+ecotta": {"method": "l2p", "adapt": "ecotta"},
    "slca+cotta": {"method": "slca", "adapt": "cotta"},
    "dosapp, replay": {"method": "dosapp", "buffer_size": 6},
    "dosapp, mitigations": {
        "method": "dosapp",
        "confidence_gate": 0.2,
        "entropy_lr_scaling": True,
        "skew_aware_ema": True,
        "mask_reactivation": 0.1,
        "reactivation_interval": 1,
        "all_class_negatives": True,
    },
    "dosapp, head": {"method": "dosapp", "head": "gda-moved", "head_text_weight": 0.5},
    "dosapp, all weights": {"method": "dosapp", "options": {"weights": "all", "labels": "student"}},
}


def cases() -> dict[str, dict[str, object]]:
    """Every method (an adapter after SPU), and a handful of pairs and settings."""
    alone: dict[str, dict[str, object]] = {}
    for name, kind in METHODS.items():
        if kind.phase == "unlabelled":
            alone[f"spu+{name}"] = {"method": "spu", "adapt": name}
        else:
            alone[name] = {"method": name}
    alone["zscl"]["options"] = {"references": "signs"}
    return {**alone, **PAIRS}


def trained(net: DualEncoder, **changes: object) -> tuple[Learner, object]:
    """A learner after two short sessions with their streams, and the scenario."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = RunSettings.parse({**SETTINGS, **changes})
        learner = Learner(settings.learner(), net.shared_copy(unshared=list(net.weights())))
        stream = build_scenario(settings, net.preprocess)
        for t in range(2):
            session = stream.session(t)
            learner.learn(session)
            for pixels in session.unlabelled.batches(8):
                learner.adapt(pixels)
    return learner, stream


def described(learner: Learner) -> dict[str, object]:
    """The digest of all that was learned, and the norm of each role for other processors."""
    roles: dict[str, float] = {}
    for name, tensor in learner.state().tensors.items():
        role = name.partition("/")[0]
        roles[role] = roles.get(role, 0.0) + float(tensor.double().square().sum())
    return {"digest": learner.digest(), "norms": {k: v**0.5 for k, v in sorted(roles.items())}}


def served(folder: Path, image: torch.Tensor) -> dict[str, object]:
    """What a service answers about one image."""
    from PIL import Image
    from starlette.testclient import TestClient

    from dosapp.service.http.app import build_app
    from dosapp.service.service import open_service
    from dosapp.service.settings import ServiceSettings

    buffer = io.BytesIO()
    array = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(array).save(buffer, "PNG")
    with open_service(folder, ServiceSettings(adapt=False, token=False)) as service:
        client = TestClient(build_app(service), "http://127.0.0.1", client=("127.0.0.1", 5000))
        answer = client.post("/predict", files=[("images", ("x.png", buffer.getvalue()))])
    found: dict[str, object] = answer.json()
    return found


def old_versions() -> tuple[History, list[object], Learner]:
    """The learner that version 0.1.0 wrote, from a copy, since opening a folder may sweep it."""
    copy = Path(tempfile.mkdtemp()) / "learner"
    shutil.copytree(OLD_LEARNER, copy)
    history = Learner.open_history(copy)
    return history, history.versions(), Learner.load(copy)


def write() -> None:
    torch.set_num_threads(1)
    net = load_backbone("tiny")
    learners = {}
    for name, changes in cases().items():
        learner, stream = trained(net, **changes)
        learners[name] = described(learner)
    if not OLD_LEARNER.exists():
        learner, stream = trained(net, options={"sparsity": 0.01}, epochs=1)
        learner.save(OLD_LEARNER, "two sessions")
        for pixels in stream.session(1).unlabelled.batches(8):
            learner.adapt(pixels)
        learner.save(OLD_LEARNER, "one more stream")
    history, versions, old = old_versions()
    image = build_scenario(RunSettings.parse(SETTINGS), net.preprocess).tasks[0].test.read([0])[0]
    pins = {
        "machine": describe_machine("cpu"),
        "torch": torch.__version__,
        "learners": learners,
        "old_learner": described(old),
        "old_versions": [version.checksum for version in versions],
        "served": served(history.folder, image),
    }
    FILE.write_text(json.dumps(pins, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(write())
