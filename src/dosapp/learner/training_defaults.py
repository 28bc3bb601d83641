"""Batch sizes, epochs and learning rate of a session where the user gives none.

Batches of 64 and 10 epochs, the paper's, need a few hundred images; a smaller session gets smaller
batches and more epochs, and a smaller stream smaller batches. Good rates of two backbones can
differ by a factor of 100, so where none is stored the first session chooses one: rates are tried
from small to large, in short trainings on four fifths of its images, until the loss on the other
fifth rises or is almost zero. The smallest rate with four fifths of the best one's gain over
zero-shot is taken: larger ones fit these few classes a little better, and forget more. If none
lowers the loss, the learner is trained for one epoch with the smallest, with a warning.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dosapp.backbones.base import Expert
from dosapp.data.images import LabelledImages
from dosapp.errors import DivergedError, InputError
from dosapp.runtime.rng import numpy_rng
from dosapp.scenario import Session
from dosapp.settings import PAPER_BATCH_SIZE, PAPER_EPOCHS

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

RULE_VERSION = 3  # part of a result's key; increased when the rules below change
SMALL_SESSION = 4 * PAPER_BATCH_SIZE  # images
SMALL_SESSION_EPOCHS = 30
RATES = (1e-5, 5e-5, 2e-4, 1e-3, 5e-3, 2e-2)
UNTESTED_RATE = 5e-5  # if the first session is too small to hold images out
MOST_OF_GAIN, LITTLE_LEFT = 0.8, 0.05  # shares of the gain, and of the zero-shot loss
TRIAL_STEPS = 32  # about so many per rate
TRIAL_BATCH = 64  # images evaluated at a time


@dataclass(frozen=True)
class Training:
    """How a learner trains a session; None is decided by the session.

    Example:
        >>> Training().batch_size_for(50), Training().epochs_for(50)
        (8, 30)
        >>> Training().batch_size_for(400), Training().epochs_for(400)
        (64, 10)
    """

    lr: float | None = None
    epochs: int | None = None
    batch_size: int | None = None

    def batch_size_for(self, images: int) -> int:
        """The batch size of a session with so many images."""
        if self.batch_size is not None:
            return min(self.batch_size, images)
        return min(choose_batch_size(images), images)

    def epochs_for(self, images: int) -> int:
        """The epochs of a session with so many images."""
        small = images < SMALL_SESSION
        return self.epochs or (SMALL_SESSION_EPOCHS if small else PAPER_EPOCHS)

    def to_dict(self, images: int) -> dict[str, Any]:
        """The values for a session, as JSON."""
        sizes = {"epochs": self.epochs_for(images), "batch_size": self.batch_size_for(images)}
        return {**asdict(self), **sizes}


def choose_batch_size(images: int) -> int:
    """The size of at least four batches: a power of two from 8 to 64.

    Args:
        images: In a session, or in the stream after it.

    Example:
        >>> [choose_batch_size(n) for n in (10, 50, 100, 400)]
        [8, 8, 16, 64]
    """
    quarter = 1 << int(math.log2(max(images / 4, 1)))
    return min(max(8, quarter), PAPER_BATCH_SIZE)


def split_session(session: Session, seed: int) -> tuple[Session, LabelledImages]:
    """Split the training images of a session.

    Returns:
        A session with four fifths of each class, and the other fifth for validation.

    Raises:
        InputError: A class has too few images.
    """
    train: list[int] = []
    validation: list[int] = []
    for label in range(len(session.classes)):
        rows = np.flatnonzero(session.train.labels == label)
        rows = numpy_rng("tune", seed, label).permutation(rows)
        cut = round(0.8 * len(rows))
        if cut == len(rows):
            raise InputError(
                f"class '{session.classes[label]}' has {len(rows)} training images; "
                "tuning needs at least 3 to hold one out"
            )
        train += rows[:cut].tolist()
        validation += rows[cut:].tolist()
    images, held_out = (
        session.train.subset(np.array(sorted(rows))) for rows in (train, validation)
    )
    return replace(session, train=images, unlabelled=images.empty()), held_out


def choose_training(
    learner: "Learner", session: Session, on_trial: Callable[[float], None] | None = None
) -> Training:
    """Choose the learning rate of a learner on its first session.

    Args:
        learner: Before its first session; it does not change.
        session: The session, of several classes with at least three images each.
        on_trial: Called with each learning rate before it is tried.

    Returns:
        How the learner trains from now on, with one of `RATES`, and for one epoch if none lowers
        the loss; with `UNTESTED_RATE` if the session has too few images or classes to compare
        rates. Both exceptions come with a warning.
    """
    training = learner.training
    try:
        train, held_out = split_session(session, learner.settings.seed)
        if len(session.classes) < 2:
            raise InputError("the session has one class, so every answer is right")
    except InputError as error:
        warnings.warn(
            f"no learning rate is given, and the first session cannot choose one ({error}); "
            f"{UNTESTED_RATE:g} is used. Give one with lr",
            stacklevel=5,
        )
        return replace(training, lr=UNTESTED_RATE)
    zero_shot = _held_out_loss(learner, learner.pretrained, session, held_out)
    trials: dict[float, float] = {}
    for lr in RATES:
        if on_trial is not None:
            on_trial(lr)
        with warnings.catch_warnings(action="ignore"):  # they are shown when the session is trained
            loss = _try_rate(learner, train, held_out, lr)
        is_worse = loss > min(trials.values(), default=math.inf)
        trials[lr] = loss
        if is_worse or loss < LITTLE_LEFT * zero_shot:
            break
    lr = smallest_good_rate(trials, zero_shot)
    # Equal losses: the method trains nothing, and there is nothing to warn of.
    if min(trials.values()) <= zero_shot or training.epochs is not None:
        return replace(training, lr=lr)
    warnings.warn(
        "no learning rate lowers the loss on held-out images of the first session, so the learner "
        f"is trained for one epoch with {lr:g} and stays close to zero-shot. Give more images per "
        "class, or lr and epochs",
        stacklevel=5,
    )
    return replace(training, lr=lr, epochs=1)


def _try_rate(learner: "Learner", session: Session, held_out: LabelledImages, lr: float) -> float:
    """The loss on held-out images after a short training; infinite if it diverged."""
    trial = learner.at(learner.state(), learner.working_state())
    images = len(session.train)
    steps = images // learner.training.batch_size_for(images)
    epochs = min(learner.training.epochs_for(images), max(1, TRIAL_STEPS // steps))
    trial.change_training(lr=lr, epochs=epochs)
    try:
        for _ in trial.training_steps(session):
            pass
    except DivergedError:
        return math.inf
    # By captions, also if a head predicts: a head of frozen features is good already, and the gain
    # over zero-shot would be its own, whatever the rate.
    return _held_out_loss(trial, trial.method_expert, session, held_out)


@torch.inference_mode()
def _held_out_loss(
    learner: "Learner", expert: Expert, session: Session, held_out: LabelledImages
) -> float:
    """Mean cross-entropy among the session's classes."""
    device = expert.logit_scale.device
    scores = [
        expert.logit_scale * learner.score_images(pixels.to(device), expert, session.prompts)
        for pixels in held_out.batches(TRIAL_BATCH)
    ]
    labels = torch.from_numpy(held_out.labels)
    loss = torch.nn.functional.cross_entropy(torch.cat(scores).cpu(), labels).item()
    return loss if math.isfinite(loss) else math.inf


def smallest_good_rate(losses: dict[float, float], zero_shot: float) -> float:
    """The smallest rate with most of the gain of the best; the smallest of all if none gains.

    Args:
        losses: Learning rate → held-out loss.
        zero_shot: The loss before any training.

    Example:
        >>> smallest_good_rate({1e-5: 0.30, 5e-5: 0.12, 2e-4: 0.10, 1e-3: 0.25}, zero_shot=0.5)
        5e-05
    """
    enough = max(0.0, zero_shot - min(losses.values())) * MOST_OF_GAIN
    return min(lr for lr, loss in losses.items() if zero_shot - loss >= enough or enough == 0)
