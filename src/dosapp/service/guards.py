"""Signals of the stream, and three guards against learning from a bad one.

1. A batch whose predictions are nearly all of one class is held back.
2. An interval after which the experts disagree too much, or the canary has lost too much accuracy,
   is never published: the learner returns to the last good version.
3. After several refused intervals in a row adaptation is frozen until a person unfreezes it.

The learner's confidence gate and skew-aware EMA (`dosapp.learner.mitigations`) act before these.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.functional.class_skew import class_skew
from dosapp.learner.learner import Learner
from dosapp.service.settings import ServiceSettings

WINDOW = 50  # steps over which live signals are averaged
CANARY_BATCH = 256  # images per forward pass


@dataclass
class Signals:
    """Live signals of the stream. The writer adds to them while other threads read."""

    labels: deque[Counter[str]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    disagreement: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    confidence: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    drift: float = 0.0  # L2 distance of the answering weights from the last session
    canary: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=200))
    adapted: int = 0  # images used in a step
    skipped: int = 0  # images dropped because the queue was full or emptied
    held: int = 0  # images held back by the skew guard or the confidence gate
    refused: int = 0  # intervals that were not published

    def histogram(self) -> dict[str, int]:
        """Count the predicted labels of the window, the most frequent first."""
        total: Counter[str] = Counter()
        for counts in tuple(self.labels):
            total += counts
        return dict(total.most_common())

    def to_dict(self, class_count: int) -> dict[str, object]:
        """Return the signals as JSON; the skew is over all known classes, seen or not."""
        counts = self.histogram()
        return {
            "histogram": counts,
            "skew": label_skew(counts, class_count),
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
    """Labelled images that are never trained on, to measure what the learner has forgotten."""

    images: Tensor  # uint8 [n, 3, H, W]
    labels: Sequence[str]

    def accuracy(self, learner: Learner, among: Sequence[str] | None = None) -> float | None:
        """Measure the accuracy on the images whose class the learner knows.

        Args:
            learner: The learner to evaluate.
            among: Count only images of these classes.

        Returns:
            The accuracy in per cent; None if no image counts.
        """
        known = set(learner.classes if among is None else among) & set(learner.classes)
        rows = [n for n, label in enumerate(self.labels) if label in known]
        if not rows:
            return None
        correct = 0
        for batch in torch.tensor(rows).split(CANARY_BATCH):
            predictions = learner.predict(self.images[batch], top=1)
            correct += sum(
                p.label == self.labels[n] for p, n in zip(predictions, batch.tolist(), strict=True)
            )
        return 100 * correct / len(rows)


@dataclass
class Guard:
    """Decides what the writer may learn from and publish."""

    settings: ServiceSettings
    refusals: int = 0  # refused intervals in a row

    def is_trusted(self, labels: Sequence[str], class_count: int) -> bool:
        """Whether a batch may be learned from, judged by its predicted labels."""
        skew = label_skew(Counter(labels), class_count)
        return len(labels) > 1 and skew <= self.settings.max_skew

    def check_interval(
        self, disagreement: float, before: float | None, after: float | None
    ) -> str | None:
        """Return why an interval must not be published, None if it may be.

        Args:
            disagreement: Mean over the steps of the interval.
            before: Accuracy on the canary after the last session, rollback or start.
            after: Accuracy on the canary now.
        """
        s = self.settings
        if disagreement > s.max_disagreement:
            return f"the experts disagree on {disagreement:.0%} of the stream"
        if before is not None and after is not None and after < before - s.canary_drop:
            return f"the canary fell from {before:.1f} to {after:.1f} %"
        return None

    def check_session(self, before: float | None, after: float | None) -> str | None:
        """Return why a session must not be published, from accuracies on earlier classes."""
        if before is not None and after is not None and after < before - self.settings.session_drop:
            return f"on earlier classes the canary fell from {before:.1f} to {after:.1f} %"
        return None


def label_skew(counts: Mapping[str, int], class_count: int) -> float:
    """Compute the class skew of label counts; classes without a count have zero."""
    filled = list(counts.values())
    padding = [0] * max(0, class_count - len(filled))
    return class_skew(torch.tensor(filled + padding, dtype=torch.float))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
