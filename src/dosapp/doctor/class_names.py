"""Class names of a dataset: repeated, nearly repeated, and labels that look swapped."""

import re

import numpy as np
import torch
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.data.base import Dataset, ImageArray
from dosapp.data.preprocess import to_float
from dosapp.doctor import Finding
from dosapp.student.text_head import TextHead

MAX_IMAGES = 20  # of a class, for the confusion matrix
SAME_TEXT = 0.985  # cosine of two names from which on a text tower hardly tells them apart
SHOWN = 5  # pairs in a message
BATCH_SIZE = 64


def check_classes(dataset: Dataset[ImageArray], backbone: Backbone) -> list[Finding]:
    """All checks of class names."""
    head = TextHead()
    head.add_classes(dataset.classes, dataset.prompts)
    texts = head.class_embeddings(backbone)
    return [
        find_repeated(dataset.classes),
        find_similar(dataset.classes, texts),
        find_swapped(dataset.classes, count_confusions(dataset, backbone, texts)),
    ]


def find_repeated(names: tuple[str, ...]) -> Finding:
    """Names that differ only in case, spaces, hyphens or underscores."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[\s_-]+", " ", name).strip().casefold(), []).append(name)
    repeated = [group for group in groups.values() if len(group) > 1]
    return _report(
        "class names", repeated, f"{len(names)} names, none repeated", "the same name twice"
    )


def find_similar(names: tuple[str, ...], texts: Tensor) -> Finding:
    """Names that the text tower hardly tells apart.

    Args:
        names: C class names.
        texts: Their unit features `[C, D]`.
    """
    cosines = (texts @ texts.T).triu(1)
    pairs = (cosines > SAME_TEXT).nonzero().tolist()
    pairs.sort(key=lambda pair: -float(cosines[pair[0], pair[1]]))
    similar = [[names[i], names[j]] for i, j in pairs]
    good = f"no two names above a cosine of {SAME_TEXT}"
    return _report("similar names", similar, good, "captions nearly alike")


@torch.inference_mode()
def count_confusions(dataset: Dataset[ImageArray], backbone: Backbone, texts: Tensor) -> np.ndarray:
    """Zero-shot confusions `[C, C]`: row the label, column the prediction; test images."""
    labels = dataset.test.labels
    rows = np.concatenate(
        [np.flatnonzero(labels == c)[:MAX_IMAGES] for c in range(len(dataset.classes))]
    )
    confusions = np.zeros((len(dataset.classes),) * 2, dtype=int)
    for first in range(0, len(rows), BATCH_SIZE):
        batch = rows[first : first + BATCH_SIZE]
        images = backbone.encode_image(to_float(dataset.test.images.read(batch)))
        predicted = (images @ texts.T).argmax(dim=1).cpu().numpy()
        np.add.at(confusions, (labels[batch], predicted), 1)
    return confusions


def find_swapped(names: tuple[str, ...], confusions: np.ndarray) -> Finding:
    """Pairs of classes most of whose images are taken for the other class.

    Args:
        names: C class names.
        confusions: Counts `[C, C]`: row the label, column the prediction.
    """
    counts = confusions.sum(axis=1, keepdims=True)
    shares = confusions / np.maximum(counts, 1)
    pairs = np.argwhere(np.triu((shares > 0.5) & (shares.T > 0.5), 1)).tolist()
    accuracy = 100 * np.trace(confusions) / max(1, confusions.sum())
    swapped = [[names[i], names[j]] for i, j in pairs]
    good = f"none look swapped; zero-shot accuracy {accuracy:.1f} %"
    return _report("labels", swapped, good, "look swapped: most images are taken for the other")


def _report(check: str, groups: list[list[str]], good: str, bad: str) -> Finding:
    if not groups:
        return Finding(check, "ok", good)
    shown = "; ".join(" = ".join(f"'{name}'" for name in group) for group in groups[:SHOWN])
    more = f"; and {len(groups) - SHOWN} more" if len(groups) > SHOWN else ""
    return Finding(check, "problem", f"{bad}: {shown}{more}", {"groups": groups})
