"""Backbones by name, and the learning rates that come with them."""

import json
from functools import cache
from typing import Any

import yaml
from safetensors import SafetensorError

from dosapp.backbones.checkpoint import find_file, import_transformers, read_preprocessing
from dosapp.backbones.clip import CLIPBackbone
from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.names import HUB_IDS, TINY, Source, find_source
from dosapp.backbones.open_clip import CONFIG, read_open_clip
from dosapp.backbones.siglip import Siglip2Backbone, SiglipBackbone
from dosapp.backbones.vision_text import VisionTextBackbone
from dosapp.errors import InputError

FAMILIES: dict[str, type[DualEncoder]] = {  # by the model_type of config.json
    "clip": CLIPBackbone,
    "siglip": SiglipBackbone,
    "siglip2": Siglip2Backbone,
    "vision-text-dual-encoder": VisionTextBackbone,
}


def load_backbone(name: str) -> DualEncoder:
    """Load a dual encoder with its tokenizer and image preprocessing.

    Args:
        name: `tiny` (embedded), a name of `HUB_IDS` such as `ViT-B-16`, a hub id, or a folder
            written by `save_pretrained` or by open_clip; `hf-hub:` or `local-dir:` may precede it,
            and `@REVISION` may follow a name or an id of the hub.

    Returns:
        The backbone, on the CPU in float32.

    Raises:
        InputError: The name is unknown or the model cannot be loaded.

    Example:
        >>> load_backbone("tiny").image_size
        32
    """
    source = find_source(name)
    if source.is_folder and not any(find_file(source, file) for file in ("config.json", CONFIG)):
        raise InputError(
            f"backbone folder '{name}' has no config.json; it must be a folder written by "
            f"save_pretrained with its tokenizer and processor, or by open_clip with {CONFIG}"
        )
    transformers = import_transformers()
    pinned = {"local_files_only": source.is_folder, "revision": source.revision}
    try:
        family, model, processing = _load_model(source, pinned)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.place, **pinned)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        if "file named model.safetensors" in reason:
            raise InputError(
                f"backbone '{name}' has no weights as safetensors, and pickled ones are not "
                "loaded; pin a revision that has them (NAME@REVISION), or convert them with "
                "CLIPModel.save_pretrained"
            ) from error
        raise InputError(
            f"backbone '{name}' could not be loaded ({reason}); use 'tiny', one of "
            f"{', '.join(HUB_IDS)} (needs the hub or its cache), or a folder written by "
            "save_pretrained with its tokenizer and preprocessor_config.json"
        ) from error
    return family(model.float(), tokenizer, processing, name)


def _load_model(
    source: Source, pinned: dict[str, Any]
) -> tuple[type[DualEncoder], Any, dict[str, Any]]:
    """Family, model and preprocessing of a folder or a hub id."""
    file = find_file(source, "config.json")
    if file is None:
        if find_file(source, CONFIG) is None:
            raise OSError("no config.json can be found or downloaded")
        return CLIPBackbone, *read_open_clip(source)
    kind = json.loads(file.read_text()).get("model_type", "clip")
    if kind not in FAMILIES:
        raise InputError(
            f"'{source.place}' is a '{kind}', not a dual encoder we know ({', '.join(FAMILIES)}); "
            "docs/backbones.md shows how to add a family"
        )
    family = FAMILIES[kind]
    library_class = getattr(import_transformers(), family.model_class)
    # Pickled weights could execute code when they are loaded.
    model = library_class.from_pretrained(source.place, use_safetensors=True, **pinned)
    return family, model, read_preprocessing(source)


def stored_lr(backbone: str, method: str) -> float | None:
    """The learning rate that comes with a backbone: `dosapp tune` chose those of `tiny`."""
    return _tiny_rates().get(method) if backbone == "tiny" else None


@cache
def _tiny_rates() -> dict[str, float]:
    path = TINY / "rates.yaml"  # missing while `dosapp tune` writes it for the first time
    tuned: dict[str, Any] = yaml.safe_load(path.read_text()) if path.exists() else {"rates": {}}
    rates: dict[str, float] = tuned["rates"]
    return rates
