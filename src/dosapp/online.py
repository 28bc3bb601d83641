"""Learn from one image at a time, with River's methods, and evaluate progressively.

River's conventions: `learn_one` returns nothing, `predict_one` returns None before any class is
known, `predict_proba_one` a dict, and `progressive_val_score` predicts before it learns. Metrics
of River (`update`, `get`) can be used; River itself is not needed.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Literal, Protocol, Self

import torch
from PIL import Image
from torch import Tensor

from dosapp.data.inputs import stack_images
from dosapp.data.preprocess import to_bytes
from dosapp.errors import InputError
from dosapp.learner.learner import Learner

Label = Hashable


class OnlineClassifier:
    """A learner that gets one image at a time.

    Contrastive training needs several images and classes, so labelled images wait until there are
    `session_size` of them and are then trained as one session. Unlabelled images wait until there
    are `stream_batch_size`. Waiting images are dropped after their step.

    Args:
        learner: The learner; a new one with defaults if not given.
        session_size: Labelled images per session.
        stream_batch_size: Unlabelled images per step.

    Example:
        >>> from dosapp import LearnerSettings
        >>> learner = Learner(LearnerSettings(epochs=2, batch_size=4))
        >>> model = OnlineClassifier(learner, session_size=4)
        >>> red, blue = Image.new("RGB", (32, 32), "red"), Image.new("RGB", (32, 32), "blue")
        >>> model.predict_one(red) is None
        True
        >>> for image, label in [(red, "red square"), (blue, "blue square")] * 2:
        ...     model.learn_one(image, label)
        >>> model.predict_one(red)
        'red square'
    """

    def __init__(
        self, learner: Learner | None = None, session_size: int = 64, stream_batch_size: int = 64
    ) -> None:
        sizes = {"session_size": session_size, "stream_batch_size": stream_batch_size}
        for name, value in sizes.items():
            if value < 1:
                raise InputError(f"{name} is {value}; give at least 1")
        self.learner = learner or Learner()
        self.session_size, self.stream_batch_size = session_size, stream_batch_size
        self._labels: dict[str, Label] = {name: name for name in self.learner.classes}
        self._labelled: list[tuple[Tensor, str]] = []
        self._unlabelled: list[Tensor] = []

    @property
    def waiting(self) -> int:
        """Labelled images that are not trained yet."""
        return len(self._labelled)

    def learn_one(self, x: Any, y: Label) -> None:
        """Learn from a labelled image; every `session_size` images are one session.

        Args:
            x: A Pillow image, or a tensor `[3, H, W]` at the backbone's size, uint8 or float.
            y: Its label; `str(y)` is the class name in the captions. It may be new.
        """
        pixels, name = self._read(x), str(y)
        if self._labels.setdefault(name, y) != y:
            raise InputError(f"labels {self._labels[name]!r} and {y!r} have the same name '{name}'")
        self._labelled.append((pixels, name))
        if len(self._labelled) >= self.session_size:
            self.flush()

    def adapt_one(self, x: Any) -> None:
        """Take an unlabelled image into account; every `stream_batch_size` images are one step."""
        self._unlabelled.append(self._read(x))
        if len(self._unlabelled) >= self.stream_batch_size:
            images, self._unlabelled = torch.stack(self._unlabelled), []
            self.learner.adapt(images)

    def flush(self) -> None:
        """Train the labelled images that wait, at the end of a stream."""
        images: dict[str, list[Tensor]] = {}
        for pixels, name in self._labelled:
            images.setdefault(name, []).append(pixels)
        self._labelled = []
        if images:
            self.learner.learn(
                {name: torch.stack(found) for name, found in images.items()}, progress=False
            )

    def predict_proba_one(self, x: Any) -> dict[Label, float]:
        """The probability of each known label; empty before the first session."""
        classes = self.learner.classes
        if not classes:
            return {}
        [prediction] = self.learner.predict(self._read(x)[None], top=len(classes))
        return {self._labels[name]: score for name, score in prediction.top}

    def predict_one(self, x: Any) -> Label | None:
        """The most probable label; None before the first session."""
        probabilities = self.predict_proba_one(x)
        return max(probabilities, key=lambda y: probabilities[y]) if probabilities else None

    def _read(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return to_bytes(x) if x.is_floating_point() else x
        if not isinstance(x, Image.Image):
            kind = type(x).__name__
            raise InputError(f"an image is a {kind}; give a Pillow image or a tensor")
        return stack_images([x], self.learner.preprocess)[0]


class Metric(Protocol):
    """What a metric of River has."""

    def update(self, y_true: Any, y_pred: Any) -> Any:
        """Count one prediction."""

    def get(self) -> float:
        """The value so far."""


class Accuracy:
    """Share of correct predictions; no prediction counts as a wrong one.

    Example:
        >>> metric = Accuracy()
        >>> metric.update("fox", "fox").update("wolf", None)
        Accuracy: 50.00%
    """

    def __init__(self) -> None:
        self.correct, self.count = 0, 0

    def update(self, y_true: Label, y_pred: Label | None) -> Self:
        """Count one prediction."""
        self.correct, self.count = self.correct + (y_true == y_pred), self.count + 1
        return self

    def get(self) -> float:
        """The accuracy so far, from 0 to 1."""
        return self.correct / self.count if self.count else 0.0

    def __repr__(self) -> str:
        return f"Accuracy: {self.get():.2%}"


Learning = Literal["labels", "stream", "nothing"]


def iter_progressive_val_score(
    dataset: Iterable[tuple[Any, Label | None]],
    model: OnlineClassifier,
    metric: Metric,
    *,
    learn: Learning = "labels",
    delay: int = 0,
    step: int = 1,
) -> Iterator[dict[str, Any]]:
    """Evaluate progressively: each image is predicted first and learned from afterwards.

    Args:
        dataset: Pairs of image and label; an image whose label is None is not scored, and adapted
            to as part of the unlabelled stream.
        model: The classifier.
        metric: Updated with each prediction.
        learn: `labels` (learn_one), `stream` (adapt_one, labels only score) or `nothing`.
        delay: How many images later a label arrives.
        step: Images between two yields.

    Yields:
        The number of images so far, and the metric.
    """
    if learn not in ("labels", "stream", "nothing"):
        raise InputError(f"learn is '{learn}'; give labels, stream or nothing")
    if delay < 0 or step < 1:
        raise InputError(f"delay is {delay} and step is {step}; give 0 or more, and 1 or more")
    arriving: deque[tuple[Any, Label]] = deque()  # images whose labels come later
    count = 0
    for count, (x, y) in enumerate(dataset, start=1):
        if y is not None:
            metric.update(y, model.predict_one(x))
        if learn != "nothing" and (y is None or learn == "stream"):
            model.adapt_one(x)
        elif learn == "labels":
            arriving.append((x, y))
        if len(arriving) > delay:
            model.learn_one(*arriving.popleft())
        if count % step == 0:
            yield {"step": count, "metric": metric}
    for x, y in arriving:
        model.learn_one(x, y)
    if count % step:
        yield {"step": count, "metric": metric}


def progressive_val_score(
    dataset: Iterable[tuple[Any, Label | None]],
    model: OnlineClassifier,
    metric: Metric | None = None,
    *,
    learn: Learning = "labels",
    delay: int = 0,
    print_every: int = 0,
) -> Metric:
    """Evaluate progressively and return the metric; see `iter_progressive_val_score`.

    Args:
        dataset: Pairs of image and label.
        model: The classifier.
        metric: Updated with each prediction; `Accuracy` if not given.
        learn: What the model learns from.
        delay: How many images later a label arrives.
        print_every: Images between two printed lines; 0 prints none.

    Returns:
        The metric.

    Example:
        >>> images = [(Image.new("RGB", (32, 32), color), f"{color} square")
        ...           for color in ("red", "blue")] * 4
        >>> from dosapp import LearnerSettings
        >>> model = OnlineClassifier(Learner(LearnerSettings(epochs=2, batch_size=4)), 4)
        >>> progressive_val_score(images, model)  # the first four are predicted before any class
        Accuracy: 50.00%
    """
    metric = Accuracy() if metric is None else metric
    every = print_every or 1
    steps = iter_progressive_val_score(dataset, model, metric, learn=learn, delay=delay, step=every)
    for state in steps:
        if print_every:
            print(f"[{state['step']:,}] {metric!r}")
    return metric
