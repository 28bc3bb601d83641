"""What a service knows about its own stream, and when it stops trusting it.

Three lines of defence, each before the next: a batch whose answers are nearly all the same class is
not learned from; an interval after which the experts differ too much, or the canary has lost too
much, is never published, and the learner goes back to the last good version; after several of these
in a row adaptation stops until a person says otherwise. The learner's own gate and skew-aware
momentum (`dosapp.learner.mitigations`) work beneath all this.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.functional.class_skew import class_skew
from dosapp.learner.learner import Learner
from dosapp.service.settings import ServiceSettings

WINDOW = 50  # steps that the live figures look back
LOOK = 256  # canary pictures at once


@dataclass
class Signals:
    """Live figures of the stream."""

    labels: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    disagreement: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    confidence: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    drift: float = 0.0  # of the answering expert from the last session
    canary: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=200))
    adapted: int = 0  # pictures learned from
    skipped: int = 0  # pictures for which there was no room
    held: int = 0  # pictures that were not trusted: a batch by its answers, or one by the gate
    refused: int = 0  # intervals that were taken back

    def histogram(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for one in tuple(self.labels):  # the writer goes on adding
            total += one
        return dict(total.most_common())

    def facts(self, classes: int) -> dict[str, object]:
        """The skew is over all classes the learner knows, seen or not."""
        counts = self.histogram()
        return {
            "histogram": counts,
            "skew": label_skew(counts, classes),
            "disagreement": _mean(tuple(self.disagreement)),
            "confidence": _mean(tuple(self.confidence)),
            "drift": self.drift,
            "canary": [{"version": v, "accuracy": a} for v, a in tuple(self.canary)],
            "adapted": self.adapted,
            "skipped": self.skipped,
            "held": self.held,
            "refused": self.refused,
        }


@dataclass(frozen=True)
class Canary:
    """Labelled pictures nobody ever teaches."""

    pictures: Tensor  # uint8 [n, 3, H, W]
    labels: Sequence[str]

    def accuracy(self, learner: Learner, among: Sequence[str] | None = None) -> float | None:
        """Per cent right of those whose class the learner knows (and is one of `among`)."""
        known = set(learner.classes if among is None else among) & set(learner.classes)
        rows = [n for n, label in enumerate(self.labels) if label in known]
        if not rows:
            return None
        right = 0
        for some in torch.tensor(rows).split(LOOK):
            answers = learner.predict(self.pictures[some], top=1)
            right += sum(
                a.label == self.labels[n] for a, n in zip(answers, some.tolist(), strict=True)
            )
        return 100 * right / len(rows)


@dataclass
class Guard:
    settings: ServiceSettings
    strikes: int = 0  # refused intervals in a row

    def trusts(self, labels: Sequence[str], classes: int) -> bool:
        """Whether a batch may be learned from, by what was answered about it."""
        return len(labels) > 1 and label_skew(Counter(labels), classes) <= self.settings.max_skew

    def against_interval(
        self, disagreement: float, before: float | None, after: float | None
    ) -> str | None:
        """Why what was learned from the stream is not to be published."""
        s = self.settings
        if disagreement > s.max_disagreement:
            return f"the experts differ on {disagreement:.0%} of the stream"
        if before is not None and after is not None and after < before - s.canary_drop:
            return f"the canary fell from {before:.1f} to {after:.1f} %"
        return None

    def against_session(self, before: float | None, after: float | None) -> str | None:
        """Why a session is not to be published; both on the classes known before it."""
        if before is not None and after is not None and after < before - self.settings.session_drop:
            return f"on known classes the canary fell from {before:.1f} to {after:.1f} %"
        return None


def label_skew(counts: "Counter[str] | dict[str, int]", classes: int) -> float:
    filled = list(counts.values())
    return class_skew(torch.tensor(filled + [0] * max(0, classes - len(filled)), dtype=torch.float))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
