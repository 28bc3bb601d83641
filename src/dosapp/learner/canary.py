"""The canary: labelled images kept from training, and how sure the learner was of them.

A set holds images of one class. Its *gaps* are the logits minus that of the true class, for every
class; an image's *margin* is minus its largest gap to another class, positive where the prediction
is right. The *baseline* is the gaps after the last session: what the stream did since then is their
change, image by image. Such pairs show harm with few images, long before one is misclassified.

Sets are part of the learner's state, so they follow every save, restart and rollback. Sets that
were given (a folder of the user) store their baseline only; the images are given again.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dosapp.data.preprocess import to_bytes, to_float
from dosapp.functional.named_tensors import select_prefix
from dosapp.runtime.devices import to_device
from dosapp.scenario import Session

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner

SET_IMAGES = 10  # of a class that are kept at most
SMALLEST_SPLIT = 4  # with fewer images of a class, those that are kept train as well
BATCH = 256  # images per forward pass


@dataclass(frozen=True)
class CanaryGaps:
    """Gaps of canary images, now and after the last session."""

    labels: Sequence[str]  # [n], class names
    truth: Tensor  # [n], the same as indices of all classes
    now: Tensor  # [n, C]
    baseline: Tensor  # [n, C]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def margins(self) -> Tensor:
        """Logit of the true class minus the largest other, now `[n]`."""
        return self._to_margins(self.now)

    @property
    def baseline_margins(self) -> Tensor:
        """The same after the last session `[n]`."""
        return self._to_margins(self.baseline)

    def _to_margins(self, gaps: Tensor) -> Tensor:
        if gaps.shape[1] < 2:  # no other class
            return torch.ones(len(gaps))
        return -gaps.scatter(1, self.truth[:, None], -math.inf).max(dim=1).values

    @property
    def pull(self) -> Tensor:
        """For each class, by how much its gap to images of other classes grew, on average `[C]`."""
        is_other = torch.ones_like(self.now).scatter(1, self.truth[:, None], 0)
        grown = ((self.now - self.baseline) * is_other).sum(dim=0)
        return grown / is_other.sum(dim=0).clamp(min=1)

    @property
    def right(self) -> int:
        """How many images are classified correctly."""
        return int((self.margins > 0).sum())

    @property
    def accuracy(self) -> float:
        """In per cent."""
        return 100 * self.right / len(self)

    def among(self, classes: Sequence[str]) -> "CanaryGaps":
        """Those of images of some classes only."""
        rows = [n for n, label in enumerate(self.labels) if label in set(classes)]
        labels = [self.labels[n] for n in rows]
        return CanaryGaps(labels, self.truth[rows], self.now[rows], self.baseline[rows])


@dataclass
class Canary:
    """Sets of labelled images, by an id of their content.

    Example:
        >>> import torch
        >>> canary = Canary()
        >>> canary.add("fox", torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
        >>> canary.classes
        {'fox'}
    """

    images: dict[str, Tensor] = field(default_factory=dict)  # uint8 [n, 3, H, W]
    labels: dict[str, str] = field(default_factory=dict)  # class of each set
    baselines: dict[str, Tensor] = field(default_factory=dict)  # [n, C], after the last session
    given: frozenset[str] = frozenset()  # sets whose images are not part of the state

    @classmethod
    def from_images(cls, images: Tensor, labels: Sequence[str]) -> "Canary":
        """Make sets of images `uint8 [n, 3, H, W]` that are given at every start."""
        canary = cls()
        for name in dict.fromkeys(labels):
            rows = [n for n, label in enumerate(labels) if label == name]
            canary.add(name, images[rows], given=True)
        return canary

    @property
    def classes(self) -> set[str]:
        """The classes of all sets that have images."""
        return {self.labels[key] for key in self.images}

    @property
    def compared_classes(self) -> set[str]:
        """The classes of all sets that have a baseline, so that harm to them is noticed."""
        return {self.labels[key] for key in self.images if key in self.baselines}

    @property
    def stores_images(self) -> bool:
        """Whether the state has images."""
        return any(key not in self.given for key in self.images)

    def add(self, label: str, images: Tensor, given: bool = False) -> None:
        """Add a set, unless there is the same; it counts after the next `set_baseline`.

        Args:
            label: The class.
            images: `uint8 [n, 3, H, W]`.
            given: Whether they are given again at the next start, and so need not be stored.
        """
        content = label.encode() + bytes(str(list(images.shape)), "ascii")
        key = hashlib.sha256(content + images.contiguous().numpy().tobytes()).hexdigest()[:16]
        self.images[key] = images
        self.labels.setdefault(key, label)  # a known one may have been renamed since
        if given:
            self.given |= {key}

    def take_share(
        self, session: Session, share: float, must_train: Mapping[str, int] | None = None
    ) -> Session:
        """Keep a share of a session's images, at most `SET_IMAGES` of a class.

        Args:
            session: Labelled images by class.
            share: Of a class's images, in [0, 1).
            must_train: How many of the last images of a class are trained in any case.

        Returns:
            The session of the images that remain.
        """
        labels, train = np.asarray(session.train.labels), np.ones(len(session.train), dtype=bool)
        for index, name in enumerate(session.classes):
            rows = np.flatnonzero(labels == index)
            known = sum(len(self.images[k]) for k in self.images if self.labels[k] == name)
            offered = len(rows) - (must_train or {}).get(name, 0)
            count = min(math.ceil(share * offered), SET_IMAGES - known)
            if share and not known and offered < SMALLEST_SPLIT:  # better than no image of a class
                chosen = rows[: max(1, count)]
            elif count > 0 and offered >= SMALLEST_SPLIT:
                chosen = rows[np.linspace(0, offered - 1, count).round().astype(int)]
                train[chosen] = False
            else:
                continue
            self.add(name, to_bytes(session.train.read(chosen)))
        return replace(session, train=session.train.subset(np.flatnonzero(train)))

    # Measuring

    def measure(self, learner: "Learner") -> CanaryGaps:
        """Compute the gaps of all images whose class the learner knows."""
        now, classes = self._measure_sets(learner), learner.classes
        labels = [self.labels[key] for key, gaps in now.items() for _ in gaps]
        baseline = [self.baselines.get(key, gaps) for key, gaps in now.items()]
        empty = [torch.zeros(0, len(classes))]
        truth = torch.tensor([classes.index(label) for label in labels], dtype=torch.int64)
        return CanaryGaps(
            labels, truth, torch.cat([*now.values(), *empty]), torch.cat(baseline + empty)
        )

    @torch.no_grad()
    def _measure_sets(self, learner: "Learner") -> dict[str, Tensor]:
        index = {name: n for n, name in enumerate(learner.classes)}
        keys = [key for key in self.images if self.labels[key] in index]
        if not keys:
            return {}
        _, expert = learner.answering_expert
        pixels = torch.cat([self.images[key] for key in keys])
        sizes = [len(self.images[key]) for key in keys]
        rows = torch.tensor([index[self.labels[key]] for key in keys])
        truth = rows.repeat_interleave(torch.tensor(sizes))[:, None]  # [n, 1]
        logits = torch.cat(
            [
                expert.logit_scale
                * learner.score_images(to_float(to_device(part, learner.device)), expert)
                for part in pixels.split(BATCH)
            ]
        ).float().cpu()  # [n, C]  # fmt: skip
        return dict(zip(keys, (logits - logits.gather(1, truth)).split(sizes), strict=True))

    def set_baseline(self, learner: "Learner") -> None:
        """Compare with the present from now on."""
        self.baselines |= self._measure_sets(learner)

    def add_given(self, other: "Canary", learner: "Learner") -> None:
        """Add sets that are given at every start.

        Args:
            other: The sets.
            learner: As it was after the last session, for the baseline of sets not seen before.
        """
        for key, images in other.images.items():
            self.images[key] = images
            self.labels.setdefault(key, other.labels[key])  # it may have been renamed since
        self.given |= other.given
        self.add_missing_baselines(learner)

    @property
    def lacks_baselines(self) -> bool:
        """Whether a set of images has no baseline."""
        return bool(self.images.keys() - self.baselines)

    def add_missing_baselines(self, learner: "Learner") -> None:
        """Compare sets that have no baseline with a learner: a state may be older than a given set.

        Args:
            learner: As it was after the last session.
        """
        if self.lacks_baselines:
            self.baselines = self._measure_sets(learner) | self.baselines

    @contextlib.contextmanager
    def carry_baseline(self, learner: "Learner") -> Iterator[None]:
        """Move the baseline with a change of the classes, so that earlier harm still counts."""
        classes, before = learner.classes, self._measure_sets(learner)
        yield
        gone = set(classes) - set(learner.classes) if len(learner.classes) < len(classes) else set()
        columns = [n for n, name in enumerate(classes) if name not in gone]
        for key, gaps in self._measure_sets(learner).items():
            if key in before and key in self.baselines:
                old = self.baselines[key][:, columns] - before[key][:, columns]
                self.baselines[key] = old + gaps

    # Classes

    def rename_class(self, old: str, new: str) -> None:
        """Follow a renamed class."""
        self.labels = {k: new if label == old else label for k, label in self.labels.items()}

    def remove_class(self, name: str) -> None:
        """Drop the sets of a class; those that were given wait for the class to return."""
        for key in [k for k, label in self.labels.items() if label == name]:
            self.baselines.pop(key, None)
            if key not in self.given:
                del self.labels[key]
                self.images.pop(key, None)

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """What every version of the learner stores, beside the labels."""
        stored = {f"images/{k}": t for k, t in self.images.items() if k not in self.given}
        return stored | {f"baseline/{k}": t for k, t in self.baselines.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor], labels: Mapping[str, str]) -> None:
        """Restore `state_dict`; sets that were given stay."""
        given = {key: self.images[key] for key in self.given}
        self.images = {k: t.cpu() for k, t in select_prefix("images/", tensors).items()} | given
        self.labels = {key: self.labels[key] for key in given} | dict(labels)
        self.baselines = {k: t.cpu() for k, t in select_prefix("baseline/", tensors).items()}
