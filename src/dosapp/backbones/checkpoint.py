"""Files of a checkpoint: the library that reads them, and the preprocessing they prescribe."""

import json
from pathlib import Path
from typing import Any

from PIL import Image

from dosapp.backbones.names import Source
from dosapp.errors import InputError

# CLIP's; a checkpoint of CLIP may leave them out.
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def import_transformers() -> Any:
    """Import the library, or raise one sentence about why that fails."""
    try:
        import transformers
        from transformers import CLIPModel  # noqa: F401  (fails late if torchvision is broken)
    except Exception as error:
        raise InputError(
            f"transformers cannot be imported ({type(error).__name__}: {error}); if the installed "
            "torchvision does not match your torch, 'pip uninstall torchvision' helps"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers


def find_file(source: Source, name: str) -> Path | None:
    """A file of a folder, or of the hub or its cache; None if there is none."""
    if source.is_folder:
        file = Path(source.place) / name
        return file if file.exists() else None
    find = import_transformers().utils.cached_file
    try:
        found = find(source.place, name, revision=source.revision)
    except OSError:
        return None
    return None if found is None else Path(found)


def read_preprocessing(source: Source) -> dict[str, Any]:
    """Size, resampling, mean and standard deviation, from either file that transformers uses.

    A `crop_size` is included if there is a centre crop.

    Raises:
        InputError: The files leave open what the images are normalised with.
    """
    file = find_file(source, "preprocessor_config.json")
    if file is not None:
        return parse_preprocessing(json.loads(file.read_text()), source.place)
    file = find_file(source, "processor_config.json")
    if file is None:
        raise OSError("it has no preprocessor_config.json")
    return parse_preprocessing(json.loads(file.read_text())["image_processor"], source.place)


def parse_preprocessing(config: dict[str, Any], source: str) -> dict[str, Any]:
    """The facts of a `preprocessor_config.json` that we use."""
    kind = config.get("image_processor_type") or config.get("feature_extractor_type") or "CLIP"
    is_clip = kind.startswith("CLIP")
    normalises = config.get("do_normalize", True)
    for key in ("image_mean", "image_std"):
        if normalises and not config.get(key) and not is_clip:
            raise InputError(
                f"the preprocessing of '{source}' ({kind}) has no {key}; write the values the "
                "model was trained with into its preprocessor_config.json"
            )
    size = config.get("size") or {}
    facts = {
        "size": {"shortest_edge": size} if isinstance(size, int) else dict(size),
        "resample": int(config.get("resample", Image.Resampling.BICUBIC)),
        "image_mean": list(config.get("image_mean") or MEAN) if normalises else [0.0] * 3,
        "image_std": list(config.get("image_std") or STD) if normalises else [1.0] * 3,
    }
    crop = config.get("crop_size")
    if crop and config.get("do_center_crop", True):
        facts["crop_size"] = crop if isinstance(crop, int) else crop["height"]
    return facts
