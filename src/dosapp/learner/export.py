"""Export the answering expert as a plain model, to be used without dosapp.

pretrained   a `save_pretrained` folder that transformers loads, with the class names beside it
onnx         the image tower as `image.onnx`, features of the classes as `classes.safetensors`; if a
             head predicts, it is part of the graph: images in, logits out
"""

import json
import logging
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dosapp.backbones.base import Backbone, Expert
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.errors import InputError, unknown_name
from dosapp.heads.base import Head, HeadExpert
from dosapp.heads.frozen_ensemble import PairedExpert
from dosapp.learner.learner import Learner
from dosapp.methods.lora import LowRankBackbone
from dosapp.runtime.extras import check_extra
from dosapp.runtime.files import list_names
from dosapp.runtime.new_folder import new_folder

KINDS = ("pretrained", "onnx")
CLASSES_FILE = "classes.json"  # in every export


def export(learner: Learner, folder: Path, kind: str | None = None, *, force: bool = False) -> None:
    """Export the expert that predicts, with its classes.

    Args:
        learner: A learner whose student or teacher predicts alone.
        folder: A new or empty folder; it appears when it is complete.
        kind: `pretrained` (transformers) or `onnx`; if None, `onnx` for learners that predict with
            a head, as transformers has none.
        force: Replace an earlier export in the folder.

    Raises:
        InputError: The learner cannot be exported, or the folder is not empty.
    """
    if kind not in (None, *KINDS):
        raise unknown_name("kind of export", kind, KINDS)
    check_target(folder, force)
    if not learner.classes:
        raise InputError("the learner knows no classes yet; train a session before exporting it")
    name, expert = learner.answering_expert
    head = expert.head if isinstance(expert, HeadExpert) else None
    kind = kind or ("pretrained" if head is None else "onnx")
    if isinstance(expert, HeadExpert):
        expert = expert.encoder
    frozen: Backbone | None = None
    if isinstance(expert, PairedExpert):
        frozen = expert.frozen
        expert = expert.expert
    if isinstance(expert, LowRankBackbone):
        expert = expert.merge()
    if not isinstance(expert, DualEncoder) or not isinstance(frozen, DualEncoder | None):
        raise InputError(
            f"this learner predicts with its {name}, which is more than one CLIP model; "
            "only learners whose student or teacher predicts alone can be exported"
        )
    if head is not None and kind != "onnx":
        raise InputError(
            f"this learner predicts with a head of its {learner.settings.method}, which a "
            "transformers model does not have; export it with --kind onnx"
        )
    with new_folder(folder, replace=force) as export_folder:
        if kind == "pretrained":
            expert.save(export_folder)
        else:
            texts = learner.student.text_head.class_embeddings(expert)
            if head is not None:
                paired = texts if frozen is None else torch.cat([texts, texts], dim=1)
                head.score(paired, texts)  # solved here, not in the graph
            model = _ImageModel(expert, frozen, head, texts)
            _write_onnx(model, expert.image_size, export_folder)
        _write_classes(learner, expert, export_folder, is_logits=head is not None)


def check_target(folder: Path, force: bool) -> None:
    """Raise an `InputError` if an export cannot be written to a folder."""
    if not list_names(folder):
        return
    if not force:
        raise InputError(
            f"'{folder}' is not empty; choose a new folder, or replace an export with --force"
        )
    if not (folder / CLASSES_FILE).exists():
        raise InputError(f"'{folder}' holds no export, so --force does not replace it")


def _write_classes(learner: Learner, expert: Expert, folder: Path, is_logits: bool) -> None:
    """Names and templates as JSON, and unit features `[C, D]`, so that no text tower is needed."""
    head = learner.student.text_head
    facts = {
        "classes": learner.classes,
        "templates": {name: list(prompts.evaluate) for name, prompts in head.prompts.items()},
        "scale": 1.0 if is_logits else float(expert.logit_scale.detach()),
    }
    (folder / CLASSES_FILE).write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    features = head.class_embeddings(expert)
    save_file({"features": features.contiguous()}, folder / "classes.safetensors")


class _ImageModel(nn.Module):
    """Images in [0, 1] → unit features, to be multiplied with those of the classes; or logits."""

    def __init__(
        self, expert: DualEncoder, frozen: DualEncoder | None, head: Head | None, texts: Tensor
    ) -> None:
        super().__init__()
        self.model, self.expert = expert.model, expert
        self.frozen_model, self.frozen = None if frozen is None else frozen.model, frozen
        self.head, self.texts = head, texts
        self.output = "features" if head is None else "logits"

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.expert.encode_image(pixels)
        if self.frozen is not None:
            features = torch.cat([features, self.frozen.encode_image(pixels)], dim=1)
        return features if self.head is None else self.head.score(features, self.texts)


def _write_onnx(model: _ImageModel, image_size: int, folder: Path) -> None:
    check_extra("an ONNX export", "onnx")
    pixels = torch.rand(2, 3, image_size, image_size)
    # The exporter warns that torchvision is missing, which is not needed.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside the exporter
        torch.onnx.export(
            model.eval(),
            (pixels,),
            folder / "image.onnx",
            input_names=["pixels"],
            output_names=[model.output],
            dynamic_shapes={"pixels": {0: torch.export.Dim("batch")}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )
