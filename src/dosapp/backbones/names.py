"""Names of backbones: ours, OpenAI's, open_clip's and the hub's."""

from dataclasses import dataclass
from pathlib import Path

from dosapp.errors import InputError, unknown_name

TINY = Path(__file__).parent / "tiny"
HUB_IDS = {  # a name, as open_clip writes it, with OpenAI's or the only weights
    "ViT-B-16": "openai/clip-vit-base-patch16",
    "ViT-B-32": "openai/clip-vit-base-patch32",
    "ViT-L-14": "openai/clip-vit-large-patch14",
    "ViT-L-14-336": "openai/clip-vit-large-patch14-336",
    "ViT-B-16-SigLIP": "google/siglip-base-patch16-224",
    "ViT-SO400M-14-SigLIP-384": "google/siglip-so400m-patch14-384",
    "ViT-B-16-SigLIP2": "google/siglip2-base-patch16-224",
    "TinyCLIP-ViT-8M-16": "wkcn/TinyCLIP-ViT-8M-16-Text-3M-YFCC15M",
    "TinyCLIP-ViT-39M-16": "wkcn/TinyCLIP-ViT-39M-16-Text-19M-YFCC15M",
}
# open_clip's name and tag → the same weights on the hub, in the format of transformers.
PRETRAINED_HUB_IDS = {
    ("ViT-B-32", "laion2b_s34b_b79k"): "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    ("ViT-B-16", "laion2b_s34b_b88k"): "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    ("ViT-L-14", "laion2b_s32b_b82k"): "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
    ("ViT-H-14", "laion2b_s32b_b79k"): "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    ("ViT-bigG-14", "laion2b_s39b_b160k"): "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    ("ViT-B-32", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-B-32-DataComp.XL-s13B-b90K",
    ("ViT-B-16", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K",
    ("ViT-L-14", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K",
    ("ViT-B-32", "metaclip_400m"): "facebook/metaclip-b32-400m",
    ("ViT-B-16", "metaclip_400m"): "facebook/metaclip-b16-400m",
    ("ViT-B-16", "metaclip_fullcc"): "facebook/metaclip-b16-fullcc2.5b",
    ("ViT-L-14", "metaclip_fullcc"): "facebook/metaclip-l14-fullcc2.5b",
    ("ViT-B-16-SigLIP", "webli"): "google/siglip-base-patch16-224",
    ("ViT-SO400M-14-SigLIP-384", "webli"): "google/siglip-so400m-patch14-384",
    ("ViT-B-16-SigLIP2", "webli"): "google/siglip2-base-patch16-224",
}
SCHEMES = ("hf-hub:", "local-dir:")  # open_clip's


def join_open_clip_names(model: str | None, pretrained: str | None) -> str:
    """The backbone that open_clip's pair of names means.

    Args:
        model: open_clip's name, `hf-hub:ORG/NAME` or `local-dir:FOLDER`.
        pretrained: open_clip's tag, `openai` if not given; or a folder of weights.

    Returns:
        The name for `load_backbone`.

    Raises:
        InputError: The weights of this pair are not known here.

    Example:
        >>> join_open_clip_names("ViT-B-16", "laion2b_s34b_b88k")
        'laion/CLIP-ViT-B-16-laion2B-s34B-b88K'
        >>> join_open_clip_names("hf-hub:laion/CLIP-ViT-B-16-laion2B-s34B-b88K", None)
        'laion/CLIP-ViT-B-16-laion2B-s34B-b88K'
    """
    if pretrained is not None and Path(pretrained).exists():
        return pretrained
    if model is None:
        raise InputError(
            f"--pretrained is '{pretrained}' without --model; give both, or --backbone"
        )
    if model.startswith(SCHEMES):
        return model.partition(":")[2]
    name = model.replace("/", "-").removesuffix("-quickgelu")
    if pretrained in (None, "openai"):
        return name if name in HUB_IDS else model
    tags = [tag for known, tag in PRETRAINED_HUB_IDS if known == name]
    if (name, pretrained) not in PRETRAINED_HUB_IDS:
        raise unknown_name(f"--pretrained of {model}", str(pretrained), ["openai", *tags])
    return PRETRAINED_HUB_IDS[name, str(pretrained)]


@dataclass(frozen=True)
class Source:
    """Where the files of a backbone are."""

    place: str  # a folder or a hub id
    is_folder: bool = False
    revision: str | None = None  # a commit of the hub


def find_source(name: str) -> Source:
    """Find the files of a backbone.

    Args:
        name: `tiny`, a name of `HUB_IDS`, a hub id or a folder; a scheme of open_clip may precede
            it, and `@REVISION` may follow a name or an id.

    Raises:
        InputError: There is no such name or folder.

    Example:
        >>> find_source("ViT-B/16").place
        'openai/clip-vit-base-patch16'
    """
    if name == "tiny":
        return Source(str(TINY), is_folder=True)
    place = name.partition(":")[2] if name.startswith(SCHEMES) else name
    if not name.startswith("hf-hub:") and Path(place).is_dir():
        return Source(place, is_folder=True)
    plain, _, revision = place.partition("@")
    known = HUB_IDS.get(plain.replace("/", "-").removesuffix("-quickgelu"))
    if known is not None:
        return Source(known, revision=revision or None)
    if name.startswith("local-dir:") or place[:1] in ("/", ".", "~"):
        raise InputError(
            f"backbone folder '{place}' does not exist (from '{Path.cwd()}'); give another"
        )
    if "/" not in plain:
        raise unknown_name("backbone", name, ["tiny", *HUB_IDS], "dosapp backbones")
    return Source(plain, revision=revision or None)
