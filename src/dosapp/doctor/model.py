"""A backbone: what decides its features, and whether they mean what captions say."""

import warnings

import torch

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.backbones.registry import load_backbone
from dosapp.data.preprocess import to_float
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.doctor import Finding
from dosapp.errors import InputError
from dosapp.runtime.rng import torch_rng

COLOURS = ("red", "green", "blue", "yellow", "white")
IMAGES = 20  # of each colour
MIN_OVER_CHANCE = 1.2  # accuracy over chance; a text tower read wrongly is at chance


def check_backbone(name: str) -> tuple[DualEncoder | None, list[Finding]]:
    """Load a backbone and check it; no backbone if it cannot be loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            backbone = load_backbone(name)
        except InputError as error:
            return None, [Finding("backbone", "problem", str(error))]
    findings = [describe_backbone(backbone)]
    said = {str(w.message) for w in caught if issubclass(w.category, UserWarning)}
    findings += [Finding("preprocessing", "problem", message) for message in sorted(said)]
    return backbone, [*findings, check_zero_shot(backbone)]


def describe_backbone(backbone: DualEncoder) -> Finding:
    """What the fingerprint covers: activation, preprocessing, tokenizer and weights."""
    config, processing = backbone.model.config, backbone.processing
    activations = {
        tower: getattr(getattr(config, f"{tower}_config"), "hidden_act", "?")
        for tower in ("vision", "text")
    }
    size = "x".join(str(side) for side in processing["size"].values())
    how = "shortest side" if "shortest_edge" in processing["size"] else "squashed"
    facts = {
        "fingerprint": backbone.fingerprint(),
        "class": backbone.model_class,
        "activation": activations,
        "preprocessing": processing,
        "tokenizer": type(backbone.tokenizer).__name__,
        "vocabulary": len(backbone.tokenizer),
        "max_length": backbone.text.max_length,
    }
    activation = " / ".join(dict.fromkeys(activations.values()))
    message = (
        f"{backbone.name}: {backbone.model_class} {facts['fingerprint']}; "
        f"{activation}; {backbone.image_size} px, {how} {size}; "
        f"{facts['vocabulary']} tokens, at most {backbone.text.max_length}"
    )
    return Finding("backbone", "ok", message, facts)


@torch.inference_mode()
def check_zero_shot(backbone: DualEncoder) -> Finding:
    """Whether it tells plain circles of five colours apart by their names."""
    names = [f"{colour} plain circle" for colour in COLOURS]
    drawn = [
        SHAPES.draw(names, backbone.image_size, SHAPES.pretraining_style, torch_rng("doctor", n))
        for n in range(IMAGES)
    ]
    texts = backbone.encode_text([f"a photo of a {colour} circle." for colour in COLOURS])
    predicted = (backbone.encode_image(to_float(torch.cat(drawn))) @ texts.T).argmax(dim=1)
    right = predicted == torch.arange(len(COLOURS)).repeat(IMAGES)
    accuracy, chance = 100 * float(right.float().mean()), 100 / len(COLOURS)
    facts = {"accuracy": accuracy, "chance": chance}
    if accuracy < MIN_OVER_CHANCE * chance:
        return Finding(
            "zero-shot",
            "problem",
            f"{accuracy:.0f} % on circles of five colours (chance {chance:.0f} %): it does not "
            "know colours, or its activation, preprocessing or tokenizer is not the one it was "
            "trained with",
            facts,
        )
    message = f"{accuracy:.0f} % on circles of five colours (chance {chance:.0f} %)"
    return Finding("zero-shot", "ok", message, facts)
