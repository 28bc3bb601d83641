"""Backbones by name, and the learning rates that come with them."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from dosapp.backbones.clip import CLIPBackbone, import_transformers, read_preprocessing
from dosapp.errors import InputError, unknown_name

HUB_IDS = {
    "ViT-B-16": "openai/clip-vit-base-patch16",
    "ViT-B-32": "openai/clip-vit-base-patch32",
    "ViT-L-14": "openai/clip-vit-large-patch14",
}
TINY = Path(__file__).parent / "tiny"


def load_backbone(name: str) -> CLIPBackbone:
    """Load a CLIP model with its tokenizer and image preprocessing.

    Args:
        name: `tiny` (embedded), a name of `HUB_IDS` such as `ViT-B-16`, a hub id, or a folder
            written by `CLIPModel.save_pretrained`. `ID@REVISION` pins a commit of the hub.

    Returns:
        The backbone, on the CPU in float32.

    Raises:
        InputError: The name is unknown or the model cannot be loaded.

    Example:
        >>> load_backbone("tiny").image_size
        32
    """
    plain, _, revision = name.partition("@") if not Path(name).is_dir() else (name, "", "")
    source = HUB_IDS.get(plain.replace("/", "-"), plain)
    folder = TINY if name == "tiny" else Path(source)
    local = folder.is_dir()
    if not local and source[:1] in ("/", ".", "~"):
        raise InputError(
            f"backbone folder '{name}' does not exist (from '{Path.cwd()}'); give another"
        )
    if not local and "/" not in source:
        raise unknown_name("backbone", name, ["tiny", *HUB_IDS], "dosapp backbones")
    if local and not (folder / "config.json").exists():
        raise InputError(
            f"backbone folder '{name}' has no config.json; it must be a folder written by "
            "CLIPModel.save_pretrained with its tokenizer and processor"
        )
    transformers = import_transformers()
    where = str(folder) if local else source
    pinned = {"local_files_only": local, "revision": revision or None}
    try:
        # Pickled weights could execute code when they are loaded.
        model = transformers.CLIPModel.from_pretrained(where, use_safetensors=True, **pinned)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **pinned)
        preprocessing = read_preprocessing(where, revision or None)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0][:160]
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
    return CLIPBackbone(model.float(), tokenizer, preprocessing, name)


def stored_lr(backbone: str, method: str) -> float | None:
    """The learning rate that comes with a backbone: `dosapp tune` chose those of `tiny`."""
    return _tiny_rates().get(method) if backbone == "tiny" else None


@cache
def _tiny_rates() -> dict[str, float]:
    path = TINY / "rates.yaml"  # missing while `dosapp tune` writes it for the first time
    tuned: dict[str, Any] = yaml.safe_load(path.read_text()) if path.exists() else {"rates": {}}
    rates: dict[str, float] = tuned["rates"]
    return rates
