"""Signals of the stream, and guards against learning from a bad one.

1. A batch whose predictions are nearly all of one class is held back, and so are the images of a
   caller whose last predictions are.
2. An interval after which the experts disagree too much, or the canary is worse than after the last
   session, is never published: the learner returns to the last good version.
   From then on one caller gives a part of a step only, while others send too.
3. A caller whose images alone are refused several times more often than accepted is left out.
4. If no caller's images do, what was published since the last session is undone.
5. After several other refusals in a row, or undone streams since a session, adaptation is frozen
   until a person unfreezes it.

The learner's confidence gate and skew-aware EMA (`dosapp.learner.mitigations`) act before these.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dosapp.functional.class_skew import class_skew
from dosapp.learner.canary import CanaryGaps
from dosapp.methods.base import Method
from dosapp.service.settings import ServiceSettings
from dosapp.service.stream import StreamSample

CALLER_LABELS = 256  # by which the skew of a caller is judged
FEWEST_LABELS = 32  # with fewer a caller is not judged
WINDOW = 50  # steps over which live signals are averaged
MARGIN_BOUND = 4.0  # log-odds above which an image is safely right; margins are clamped to it


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


@dataclass
class Guard:
    """Decides what the writer may learn from and publish."""

    settings: ServiceSettings
    refusals: int = 0  # refused intervals in a row that no caller is left out for
    undone: int = 0  # how often the stream was undone since the last session, for no caller's sake
    was_refused: bool = False  # an interval since the last session
    left_out: list[str] = field(default_factory=list)  # callers whose images are not learned from
    _blamed: Counter[str] = field(default_factory=Counter)  # refusals not forgiven, by caller
    _labels: dict[str, deque[str]] = field(default_factory=dict)  # the last ones of each caller
    _skewed: set[str] = field(default_factory=set)  # callers whose images are held back

    def choose_trusted(self, batch: Sequence[StreamSample], class_count: int) -> list[StreamSample]:
        """Return what of a batch may be learned from, judged by the predicted labels.

        Args:
            batch: Images of one step.
            class_count: How many classes are known.
        """
        for sample in batch:
            labels = self._labels.setdefault(sample.caller, deque(maxlen=CALLER_LABELS))
            labels.append(sample.label)
        callers = {sample.caller for sample in batch}
        self._skewed = self._skewed - callers | {
            caller
            for caller in callers
            if len(self._labels[caller]) >= FEWEST_LABELS
            and self._is_skewed(self._labels[caller], class_count)
        }
        trusted = [sample for sample in batch if sample.caller not in self._skewed]
        is_skewed = self._is_skewed([sample.label for sample in trusted], class_count)
        return [] if len(trusted) < 2 or is_skewed else trusted

    def accept(self, callers: Iterable[str]) -> None:
        """Count an interval that was published: one refusal of each of its callers is forgiven.

        Args:
            callers: Whose images it had.
        """
        self.refusals = 0
        for caller in callers:  # not all is forgiven: harm could alternate with clean images
            self._blamed[caller] = max(0, self._blamed[caller] - 1)

    def refuse(self, responsible: Sequence[str]) -> list[str]:
        """Count a refused interval, and return the callers that are left out from now on.

        A caller is left out only while others, who are not, sent images too: leaving out the only
        caller would be a freeze that does not say so.

        Args:
            responsible: Callers whose images alone were refused; none if it cannot be said.
        """
        self.was_refused = True
        others = set(self._labels) - {*self.left_out, *responsible}
        if not responsible or not others:
            self.refusals += 1
            return []
        self._blamed.update(responsible)
        found = [c for c in responsible if self._blamed[c] >= self.settings.max_refusals]
        self.left_out += found
        return found

    def caller_share(self, caller: str) -> float:
        """Part of a step that a caller gives at most, while others send.

        A bound raises the share of those who send little, and leaves most images of the one who
        sends most. So there is none until an interval is refused, but for callers whose images are
        held back, since little would be left of a step.
        """
        is_bound = self.was_refused or caller in self._skewed
        return self.settings.max_caller_share if is_bound else 1.0

    @property
    def must_freeze(self) -> bool:
        """Whether adaptation has failed too often to go on."""
        return max(self.refusals, self.undone) >= self.settings.max_refusals

    def start_session(self) -> None:
        """Count from here on, and learn from all callers again."""
        self.refusals, self.undone, self.left_out, self.was_refused = 0, 0, [], False
        self._blamed.clear()

    def _is_skewed(self, labels: Iterable[str], class_count: int) -> bool:
        return label_skew(Counter(labels), class_count) > self.settings.max_skew

    def check_interval(self, disagreement: float | None, canary: CanaryGaps) -> str | None:
        """Return why an interval must not be published, None if it may be.

        Args:
            disagreement: Mean over the steps of the interval; None if it says nothing.
            canary: Now and after the last session. What the stream did since then counts, not only
                this interval, so that many small steps add up.
        """
        s = self.settings
        if disagreement is not None and disagreement > s.max_disagreement:
            return f"the experts disagree on {disagreement:.0%} of the stream"
        if not len(canary):
            return None
        # Clipped: an image that is safely right cannot make up for one that is not.
        margins = (canary.baseline_margins, canary.margins)
        before, now = (m.clamp(-MARGIN_BOUND, MARGIN_BOUND) for m in margins)
        fall = (before - now).mean().item()
        # What a stream teaches raises margins. A class that gains without that gains by harm.
        pull, has_risen = canary.pull.max().item(), fall < -s.canary_margin
        if pull > (s.canary_pull if has_risen else s.canary_pull / 2):
            return f"one class gained {pull:.2f} on the canary's images of other classes"
        if fall > s.canary_margin:
            return f"the canary's mean margin fell by {fall:.2f} since the last session"
        right = int((before > 0).sum())
        if _has_fallen(right, canary.right, len(canary), s.canary_drop):
            return f"the canary fell from {right} to {canary.right} of {len(canary)} images"
        return None

    def check_session(self, before: CanaryGaps, after: CanaryGaps) -> str | None:
        """Return why a session must not be published, from the canary of earlier classes."""
        if not _has_fallen(before.right, after.right, len(before), self.settings.session_drop):
            return None
        return (
            f"on earlier classes the canary fell from {before.accuracy:.1f} to "
            f"{after.accuracy:.1f} %; train with a smaller lr, fewer epochs or more images, "
            "or allow more (--session-drop)"
        )


def _has_fallen(before: int, after: int, total: int, points: float) -> bool:
    """Whether more than so many points are lost; a single image may be chance."""
    return before - after > max(1, points / 100 * total)


def label_skew(counts: Mapping[str, int], class_count: int) -> float:
    """Compute the class skew of label counts; classes without a count have zero."""
    filled = list(counts.values())
    padding = [0] * max(0, class_count - len(filled))
    return class_skew(torch.tensor(filled + padding, dtype=torch.float))


def mean_disagreement(method: Method, steps: Sequence[float]) -> float | None:
    """The mean over steps on the stream, for `Guard.check_interval`.

    Args:
        method: Of the learner that took them.
        steps: The disagreement in each.

    Returns:
        The mean; None if the method's experts disagree on any stream.
    """
    return _mean(steps) if method.disagreement_is_harm else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
