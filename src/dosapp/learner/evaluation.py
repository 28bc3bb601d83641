"""What a learner reports: the result of a session, and accuracy on labelled images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from dosapp.backbones.base import Expert
from dosapp.data.base import Dataset, ImageArray, Split
from dosapp.data.prefetch import prefetch
from dosapp.data.preprocess import to_float
from dosapp.errors import InputError, unknown_name
from dosapp.runtime.devices import to_device
from dosapp.runtime.plural import plural

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

EVAL_BATCH = 64


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in per cent among all classes that the learner knows.

    Example:
        >>> print(Evaluation(92.0, 61.0, 50, {"fox": 100.0, "owl": 84.0}))
        92.0 % of 50 images correct (zero-shot 61.0 %)
    """

    accuracy: float
    zero_shot: float  # of the pretrained backbone, among the same classes
    images: int
    per_class: dict[str, float] = field(repr=False)

    def __str__(self) -> str:
        count = f"{self.images} image{'' if self.images == 1 else 's'}"
        return f"{self.accuracy:.1f} % of {count} correct (zero-shot {self.zero_shot:.1f} %)"


@dataclass(frozen=True)
class SessionResult:
    """What a session did.

    Example:
        >>> print(SessionResult(("fox", "owl"), 20, 60, 0.12, 1e-4, 30, 8))
        2 classes, 20 images, 60 steps (learning rate 0.0001, 30 epochs, batches of 8)
        >>> print(SessionResult(("fox",), 8, 1, 0.12, 1e-4, 1, 8))
        1 class, 8 images, 1 step (learning rate 0.0001, 1 epoch, batches of 8)
    """

    classes: tuple[str, ...]
    images: int
    steps: int
    loss: float | None  # of the last step
    lr: float
    epochs: int
    batch_size: int
    evaluation: Evaluation | None = None  # on the test images, if some were given

    def __str__(self) -> str:
        counts = [
            plural(len(self.classes), "class"),
            plural(self.images, "image"),
            plural(self.steps, "step"),
        ]
        text = ", ".join(counts)
        if self.steps:
            epochs = plural(self.epochs, "epoch")
            text += f" (learning rate {self.lr:g}, {epochs}, batches of {self.batch_size})"
        return f"{text}: {self.evaluation}" if self.evaluation else text

    @property
    def warning(self) -> str:
        """What to do if the test images are predicted no better than zero-shot."""
        measured = self.evaluation
        if measured is None or not self.steps:  # a method without training steps has no rate
            return ""
        if measured.accuracy > measured.zero_shot or measured.zero_shot == 100:
            return ""
        if measured.accuracy < measured.zero_shot:
            return (
                f"worse than before training: {measured}. Give more images per class, or use "
                f"change_training with a smaller lr than {self.lr:g}, or with fewer epochs than "
                f"{self.epochs}"
            )
        return (
            f"nothing was learned: {measured}. Try change_training with a larger lr than "
            f"{self.lr:g}, or with more epochs than {self.epochs}"
        )


def choose_split(dataset: Dataset[ImageArray]) -> Split[ImageArray]:
    """The test images; all, if none are marked so."""
    return dataset.test if len(dataset.test.labels) else dataset.train


def check_known(
    classes: Sequence[str], split: Split[ImageArray], known: Sequence[str]
) -> list[str]:
    """The classes of the images.

    Raises:
        InputError: There are no images, or one is of a class that is not known.
    """
    present = [classes[label] for label in np.unique(split.labels)]
    if not present:
        raise InputError("there are no images to evaluate on; give at least one")
    if not known:
        raise InputError("the learner knows no classes yet; train a session first")
    unknown = next((name for name in present if name not in known), None)
    if unknown is not None:
        raise unknown_name("class", unknown, known)
    return present


@torch.inference_mode()
def evaluate(learner: "Learner", classes: Sequence[str], split: Split[ImageArray]) -> Evaluation:
    """Evaluate the answering expert and the pretrained backbone on labelled images."""
    known = learner.classes
    present = check_known(classes, split, known)
    target = np.array([known.index(name) if name in known else -1 for name in classes])
    labels = target[split.labels]
    correct = _predict(learner, split, learner.answering_expert[1]) == labels
    zero_shot = _predict(learner, split, learner.pretrained) == labels
    per_class = {n: 100 * float(correct[labels == known.index(n)].mean()) for n in present}
    return Evaluation(
        100 * float(correct.mean()), 100 * float(zero_shot.mean()), len(labels), per_class
    )


def _predict(learner: "Learner", split: Split[ImageArray], expert: Expert) -> np.ndarray:
    """The index of the best class of each image."""
    rows = (
        np.arange(first, min(first + EVAL_BATCH, len(split.labels)))
        for first in range(0, len(split.labels), EVAL_BATCH)
    )
    device, best = expert.logit_scale.device, []
    for _, pixels in prefetch(rows, split.images.read):
        scores = learner.score_images(to_device(to_float(pixels), device), expert)
        best.append(scores.argmax(dim=1).cpu().numpy())
    return np.concatenate(best)
