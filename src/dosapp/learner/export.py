"""A learner for those who do not have dosapp: what answers, as a plain model.

pretrained   a `save_pretrained` folder that transformers loads, with the class names beside it
onnx         the image tower as `image.onnx`, features of the classes as `classes.safetensors`
"""

import json
import logging
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dosapp.backbones.base import Expert
from dosapp.backbones.clip import CLIPBackbone
from dosapp.errors import InputError, unknown_name
from dosapp.learner.learner import Learner
from dosapp.runtime.extras import missing_extra

KINDS = ("pretrained", "onnx")


def export(learner: Learner, folder: Path, kind: str = "pretrained") -> None:
    """Write to a folder that is new or empty; it appears when everything is in it."""
    if kind not in KINDS:
        raise unknown_name("kind of export", kind, KINDS)
    if not learner.classes:
        raise InputError("the learner knows no classes yet; teach it a session before exporting it")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"'{folder}' is not empty; export to a new folder")
    name, expert = learner.answering_expert
    if not isinstance(expert, CLIPBackbone):
        raise InputError(
            f"what answers here is {name}, which is more than one plain CLIP model; "
            "only learners whose student or teacher answers alone can be exported"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        (CLIPBackbone.save if kind == "pretrained" else _onnx)(expert, made)
        _classes(learner, expert, made)
        if folder.exists():
            folder.rmdir()
        shutil.move(made, folder)


def _classes(learner: Learner, expert: Expert, folder: Path) -> None:
    """Names and prompts for readers, and unit features `[C, D]` that need no text tower."""
    head = learner.student.text_head
    words = {
        "classes": learner.classes,
        "templates": {name: list(prompts.evaluate) for name, prompts in head.prompts.items()},
        "scale": float(expert.logit_scale.detach()),
    }
    (folder / "classes.json").write_text(json.dumps(words, indent=1, ensure_ascii=False))
    features = head.class_embeddings(expert)
    save_file({"features": features.contiguous()}, folder / "classes.safetensors")


class _Image(nn.Module):
    """Pictures in [0, 1] → unit features; the rest is a matrix product with the classes'."""

    def __init__(self, expert: CLIPBackbone) -> None:
        super().__init__()
        self.model, self.expert = expert.model, expert

    def forward(self, pixels: Tensor) -> Tensor:
        return self.expert.encode_image(pixels)


def _onnx(expert: CLIPBackbone, folder: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise missing_extra("an ONNX export", "onnx", error) from error
    pixels = torch.rand(2, 3, expert.image_size, expert.image_size)
    # The exporter misses torchvision, which we do without.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter speaks of its own future
        torch.onnx.export(
            _Image(expert).eval(),
            (pixels,),
            folder / "image.onnx",
            input_names=["pixels"],
            output_names=["features"],
            dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
