"""open_clip's pair `--model NAME --pretrained TAG` as the name of a backbone."""

from pathlib import Path

from dosapp.errors import InputError, unknown_name

# open_clip's name and tag → the same weights on the hub, in the format of transformers.
HUB_IDS = {
    ("ViT-B-32", "laion2b_s34b_b79k"): "laion/CLIP-ViT-B-32-laion2B-s34B-b79K",
    ("ViT-B-16", "laion2b_s34b_b88k"): "laion/CLIP-ViT-B-16-laion2B-s34B-b88K",
    ("ViT-L-14", "laion2b_s32b_b82k"): "laion/CLIP-ViT-L-14-laion2B-s32B-b82K",
    ("ViT-H-14", "laion2b_s32b_b79k"): "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    ("ViT-B-16", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-B-16-DataComp.XL-s13B-b90K",
    ("ViT-L-14", "datacomp_xl_s13b_b90k"): "laion/CLIP-ViT-L-14-DataComp.XL-s13B-b90K",
    ("ViT-B-16", "metaclip_400m"): "facebook/metaclip-b16-400m",
    ("ViT-B-16", "metaclip_fullcc"): "facebook/metaclip-b16-fullcc2.5b",
    ("ViT-B-16-SigLIP", "webli"): "google/siglip-base-patch16-224",
}


def join_open_clip_names(model: str | None, pretrained: str | None) -> str:
    """The backbone that open_clip's flags name.

    Args:
        model: open_clip's name, `hf-hub:ORG/NAME` or `local-dir:FOLDER`.
        pretrained: open_clip's tag, `openai` if not given; or a folder of weights.

    Returns:
        The name for `--backbone`.

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
    for scheme in ("hf-hub:", "local-dir:"):
        if model.startswith(scheme):
            return model.removeprefix(scheme)
    if pretrained in (None, "openai"):
        return model.removesuffix("-quickgelu")
    name = model.replace("/", "-").removesuffix("-quickgelu")
    tags = [tag for known, tag in HUB_IDS if known == name]
    if (name, pretrained) not in HUB_IDS:
        raise unknown_name(f"--pretrained of {model}", str(pretrained), ["openai", *tags])
    return HUB_IDS[name, str(pretrained)]
