"""A scenario: tasks with disjoint classes, learned in sessions with labels and a stream without.

A scenario is an immutable value. Every modifier returns a new one, and every order of images is a
function of the seed.
"""

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dosapp.data import stream_order
from dosapp.data.base import (
    ControlSet,
    Dataset,
    ImageArray,
    Prompts,
    Rows,
    Split,
    check_class_names,
)
from dosapp.data.images import InMemoryImages, LabelledImages, UnlabelledImages, concat_images
from dosapp.data.stream_order import StreamOrder
from dosapp.errors import InputError
from dosapp.runtime.plural import plural
from dosapp.runtime.rng import numpy_rng


@dataclass(frozen=True)
class Task:
    """Classes that no other task has, with their images. D^u and D^e halve the test set."""

    classes: tuple[str, ...]
    prompts: Prompts
    train: LabelledImages
    unlabelled: LabelledImages  # D^u; the labels are for measuring only
    test: LabelledImages  # D^e


@dataclass(frozen=True)
class Session:
    """What a learner gets at once: labelled images of some classes, then a stream.

    Example:
        >>> import torch
        >>> images = {"fox": torch.zeros(2, 3, 32, 32, dtype=torch.uint8)}
        >>> len(Session.from_images(images).train)
        2
    """

    classes: tuple[str, ...]
    prompts: Mapping[str, Prompts]
    train: LabelledImages
    unlabelled: UnlabelledImages

    def check_images(self, consequence: str) -> None:
        """Raise an `InputError` if a class has no training images."""
        present = {self.classes[label] for label in self.train.labels}
        missing = next((name for name in self.classes if name not in present), None)
        if missing is not None:
            raise InputError(f"class '{missing}' has no training images, so {consequence}; add one")

    @classmethod
    def from_dataset(cls, dataset: Dataset[ImageArray]) -> "Session":
        """All training images of a dataset, without a stream; classes without any are left out."""
        present, labels = np.unique(dataset.train.labels, return_inverse=True)
        names = tuple(dataset.classes[label] for label in present)
        check_class_names(names, dataset.name)
        train = LabelledImages.from_split(dataset.train, np.arange(len(labels)), labels)
        return cls(names, dict.fromkeys(names, dataset.prompts), train, train.empty())

    @classmethod
    def from_images(cls, images: Mapping[str, Tensor], prompts: Prompts | None = None) -> "Session":
        """Make a session from tensors.

        Args:
            images: Class name → `uint8 [n, 3, H, W]` at the backbone's size.
            prompts: Captions of all classes.

        Returns:
            The session, without a stream.
        """
        names = tuple(str(name) for name in images)
        check_class_names(names, "the session")
        for name, pixels in images.items():
            is_tensor = isinstance(pixels, Tensor)
            if not is_tensor or pixels.dtype != torch.uint8 or pixels.ndim != 4:
                kind = f"{pixels.dtype} {list(pixels.shape)}" if is_tensor else pixels
                raise InputError(f"images of '{name}' are {kind}; give a uint8 tensor [n, 3, H, W]")
            if not len(pixels):
                raise InputError(
                    f"class '{name}' has no images; give at least one, or leave it out"
                )
        if len({pixels.shape[1:] for pixels in images.values()}) > 1:
            raise InputError("the session's images have different sizes; give them all the same")
        labels = np.repeat(np.arange(len(names)), [len(pixels) for pixels in images.values()])
        split = Split(InMemoryImages(torch.cat(list(images.values()))), labels)
        train = LabelledImages.from_split(split, np.arange(len(labels)), labels)
        return cls(names, {name: prompts or Prompts() for name in names}, train, train.empty())


@dataclass(frozen=True)
class Scenario:
    """Tasks in order, and how their unlabelled images are streamed after each session.

    Usually session t trains task t; joint training has the same tasks in one session.

    Example:
        >>> from dosapp.data.synthetic.shapes import SHAPES
        >>> scenario = split_dataset(SHAPES.draw_dataset(32, 2, 2), tasks=5)
        >>> session = scenario.correlated().session(1)
        >>> len(session.classes), len(session.train), len(session.unlabelled)
        (20, 40, 40)
    """

    name: str
    tasks: tuple[Task, ...]
    seed: int
    controls: tuple[tuple[ControlSet[ImageArray], Prompts], ...] = ()
    revisits_images: bool = True  # each session streams D^u of all seen tasks, else a part of it
    order: StreamOrder = stream_order.shuffled
    first_stream: bool = True  # whether the first session is followed by a stream
    is_joint: bool = False  # one session with every class
    boundaries: tuple[int, ...] = ()  # tasks before which another dataset begins
    skipped: int = 0  # unreadable images that were left out on request

    # Modifiers

    def imbalanced(self) -> "Scenario":
        """Draw each task's D^u from a Dirichlet whose total concentration is its class count."""

        def draw(number: int, task: Task) -> LabelledImages:
            rng = numpy_rng("imbalanced", self.seed, number)
            shares = rng.dirichlet(np.ones(len(task.classes)))
            counts = rng.multinomial(len(task.unlabelled), shares)
            kept = [
                rng.permutation(np.flatnonzero(task.unlabelled.labels == label))[:count]
                for label, count in enumerate(counts)
            ]
            return task.unlabelled.subset(np.sort(np.concatenate(kept)))

        return self._map_unlabelled(draw)

    def fraction(self, share: float) -> "Scenario":
        """Keep this share of every task's D^u."""
        if not 0 < share <= 1:
            raise InputError(f"fraction of D^u is {share}; give a number in (0, 1]")

        def draw(number: int, task: Task) -> LabelledImages:
            order = numpy_rng("fraction", self.seed, number).permutation(len(task.unlabelled))
            return task.unlabelled.subset(np.sort(order[: round(share * len(order))]))

        return self._map_unlabelled(draw)

    def noisy(self, *, stream: float = 0.0, test: float = 0.0) -> "Scenario":
        """Add Gaussian noise to images, clipped to [0, 1].

        Args:
            stream: Standard deviation on D^u, of pixels in [0, 1].
            test: The same on D^e.

        Returns:
            A new scenario.
        """
        if stream < 0 or test < 0:
            raise InputError(f"noise is {min(stream, test)}; a standard deviation is at least 0")
        tasks = tuple(
            replace(
                task,
                unlabelled=replace(task.unlabelled, noise=stream, seed=self.seed),
                test=replace(task.test, noise=test, seed=self.seed),
            )
            for task in self.tasks
        )
        return replace(self, tasks=tasks)

    def correlated(self) -> "Scenario":
        """Stream class by class, in a random order of classes."""
        return replace(self, order=stream_order.correlated)

    def one_class(self) -> "Scenario":
        """Stream a single seen class in each session, as many images as before."""
        return replace(self, order=stream_order.one_class)

    def few_classes(self, low: int, high: int, batch_size: int) -> "Scenario":
        """Stream batches of few classes each.

        Args:
            low: Fewest classes of a batch.
            high: Most classes of a batch.
            batch_size: Images of a batch.

        Returns:
            A new scenario.
        """
        return replace(self, order=stream_order.few_classes(low, high, batch_size))

    def dirichlet(self, concentration: float) -> "Scenario":
        """Stream in time slots whose classes follow a Dirichlet; smaller is more correlated."""
        return replace(self, order=stream_order.dirichlet(concentration))

    def without_first_stream(self) -> "Scenario":
        """Stream nothing after the first session: there is nothing to forget yet."""
        return replace(self, first_stream=False)

    def disjoint(self) -> "Scenario":
        """Never stream an image twice: each session gets its own part of each task's D^u."""
        return replace(self, revisits_images=False)

    def without_stream(self) -> "Scenario":
        """Stream nothing."""
        return self._map_unlabelled(
            lambda number, task: task.unlabelled.subset(np.zeros(0, dtype=np.int64))
        )

    def full_test(self) -> "Scenario":
        """Evaluate on D^u ∪ D^e and stream nothing."""
        tasks = tuple(
            replace(task, test=concat_images([task.test, task.unlabelled], [0, 0]))
            for task in self.tasks
        )
        return replace(self, tasks=tasks).without_stream()

    def joint(self) -> "Scenario":
        """Train all tasks in one session."""
        return replace(self, is_joint=True)

    def _map_unlabelled(self, draw: Callable[[int, Task], LabelledImages]) -> "Scenario":
        tasks = tuple(
            replace(task, unlabelled=draw(number, task)) for number, task in enumerate(self.tasks)
        )
        return replace(self, tasks=tasks)

    # Sessions

    @property
    def task_groups(self) -> list[list[int]]:
        """The tasks that each session trains."""
        tasks = list(range(len(self.tasks)))
        return [tasks] if self.is_joint else [[n] for n in tasks]

    @property
    def classes(self) -> tuple[str, ...]:
        """All class names, in the order in which they are learned."""
        return tuple(name for task in self.tasks for name in task.classes)

    def seen_tasks(self, session: int) -> list[int]:
        """The tasks trained up to and including this session."""
        return [n for group in self.task_groups[: session + 1] for n in group]

    def session(self, number: int) -> Session:
        """The data of a session."""
        tasks = [self.tasks[n] for n in self.task_groups[number]]
        classes = tuple(name for task in tasks for name in task.classes)
        offsets = np.cumsum([0, *(len(task.classes) for task in tasks)])[:-1]
        train = concat_images([task.train for task in tasks], offsets.tolist())
        prompts = {name: task.prompts for task in tasks for name in task.classes}
        return Session(classes, prompts, train, self._stream(number).drop_labels())

    def stream_labels(self, session: int) -> Rows:
        """True labels of a session's stream, indices of `classes`: for measuring only."""
        return self._stream(session).labels

    def _stream(self, session: int) -> LabelledImages:
        starts = np.cumsum([0, *(len(task.classes) for task in self.tasks)])[:-1]
        seen = self.seen_tasks(session)
        parts = [self._streamed_part(session, n) for n in seen]
        stream = concat_images(parts, [int(starts[n]) for n in seen])
        rng = numpy_rng("stream", self.seed, session)
        if session == 0 and not self.first_stream:
            return stream.subset(np.zeros(0, dtype=np.int64))
        return stream.subset(self.order(stream.labels, len(self.classes), rng))

    def _streamed_part(self, session: int, task: int) -> LabelledImages:
        """The images of a task's D^u that a session streams."""
        images = self.tasks[task].unlabelled
        if self.revisits_images:
            return images
        first = next(s for s, group in enumerate(self.task_groups) if task in group)
        order = numpy_rng("chunks", self.seed, task).permutation(len(images))
        return images.subset(np.array_split(order, len(self.task_groups) - first)[session - first])

    def check(self) -> None:
        """Read every image once, so that an unreadable one is named before training starts."""
        for task in self.tasks:
            for array in {id(a): a for a in (*task.train.arrays, *task.test.arrays)}.values():
                array.check()

    # Identity

    @cached_property
    def hash(self) -> str:
        """A hash of the manifest, part of the key of a result."""
        return hashlib.sha256(json.dumps(self.manifest()).encode()).hexdigest()[:16]

    def manifest(self) -> dict[str, object]:
        """Every image in order; scenarios with equal manifests give a learner the same data."""
        return {
            "name": self.name,
            "seed": self.seed,
            "sessions": [
                {
                    "classes": self.session(n).classes,
                    "train": self.session(n).train.labelled_keys(),
                    "stream": self._stream(n).labelled_keys(),
                }
                for n in range(len(self.task_groups))
            ],
            "tests": [task.test.labelled_keys() for task in self.tasks],
            "controls": [
                [
                    control.classes,
                    [control.test.images.key(n) for n in range(len(control.test.labels))],
                ]
                for control, _ in self.controls
            ],
            "noise": [[task.unlabelled.noise, task.test.noise] for task in self.tasks],
            "prompts": [[task.prompts.train, *task.prompts.evaluate] for task in self.tasks],
        }

    def __repr__(self) -> str:
        counts = f"{plural(len(self.tasks), 'task')}, {plural(len(self.classes), 'class')}"
        return f"Scenario({self.name!r}, {counts})"

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {len(self.tasks)} tasks, {len(self.classes)} classes, {self.hash}",
            f"{'task':>5} {'classes':>8} {'train':>7} {'stream':>7} {'test':>6}   first class",
        ]
        for n, task in enumerate(self.tasks):
            session = next(s for s, group in enumerate(self.task_groups) if n in group)
            lines.append(
                f"{n + 1:>5} {len(task.classes):>8} {len(task.train):>7} "
                f"{len(self._stream(session)):>7} {len(task.test):>6}   {task.classes[0]}"
            )
        return "\n".join(lines)


def split_dataset(
    dataset: Dataset[ImageArray],
    tasks: int | Sequence[Sequence[str]] = 10,
    *,
    seed: int = 0,
    order: Sequence[str] | None = None,
) -> Scenario:
    """Split a dataset into tasks. The test split is halved per class into D^u and D^e.

    Args:
        dataset: The data.
        tasks: The number of tasks, or the class names of each task.
        seed: Of the halves and of the streams.
        order: Class names in the order in which they are learned.

    Returns:
        The scenario.

    Raises:
        InputError: A class is unknown, repeated, or has too few images.

    Example:
        >>> from dosapp.data.synthetic.shapes import SHAPES
        >>> scenario = split_dataset(SHAPES.draw_dataset(32, 2, 2), tasks=4)
        >>> [len(task.classes) for task in scenario.tasks]
        [25, 25, 25, 25]
    """
    label_of = {name: n for n, name in enumerate(dataset.classes)}
    split: list[Task] = []
    for group in _group_classes(dataset, tasks, order):
        train, unlabelled, test = [], [], []
        for name in group:
            rows = np.flatnonzero(dataset.train.labels == label_of[name])
            if not len(rows):
                raise InputError(f"class '{name}' of {dataset.name} has no training images")
            train.append(rows)
            rows = np.flatnonzero(dataset.test.labels == label_of[name])
            if len(rows) < 2:
                raise InputError(
                    f"class '{name}' of {dataset.name} has {plural(len(rows), 'test image')}; at "
                    "least 2 are needed, one half to stream and one to evaluate"
                )
            rows = numpy_rng("halves", seed, name).permutation(rows)
            half = math.ceil(len(rows) / 2)
            unlabelled.append(np.sort(rows[:half]))
            test.append(np.sort(rows[half:]))
        split.append(
            Task(
                tuple(group),
                dataset.prompts,
                _select_rows(dataset.train, train),
                _select_rows(dataset.test, unlabelled),
                _select_rows(dataset.test, test),
            )
        )
    controls = ((dataset.control, dataset.prompts),) if dataset.control else ()
    skipped = dataset.train.skipped + dataset.test.skipped
    return Scenario(dataset.name, tuple(split), seed, controls, skipped=skipped)


def concat_scenarios(*scenarios: Scenario) -> Scenario:
    """Concatenate scenarios into one long sequence with one growing class space.

    Args:
        scenarios: With disjoint class names, the same seed and the same modifiers.

    Returns:
        The long scenario.

    Example:
        >>> from dosapp.data.synthetic.shapes import SHAPES
        >>> from dosapp.data.synthetic.signs import SIGNS
        >>> parts = [split_dataset(d.draw_dataset(32, 2, 2), tasks=2) for d in (SHAPES, SIGNS)]
        >>> concat_scenarios(*parts).boundaries
        (2,)
    """
    first = scenarios[0]
    names = [name for scenario in scenarios for name in scenario.classes]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise InputError(
            f"class '{min(repeated)}' is in two of the scenarios; class names must be disjoint"
        )
    modifiers = {
        (s.seed, s.revisits_images, s.order, s.is_joint, s.tasks[0].unlabelled.noise)
        for s in scenarios
    }
    if len(modifiers) > 1:
        raise InputError("the scenarios have different seeds or modifiers; modify them after")
    starts = np.cumsum([len(scenario.tasks) for scenario in scenarios])[:-1]
    return replace(
        first,
        boundaries=tuple(starts.tolist()),
        name="+".join(scenario.name for scenario in scenarios),
        tasks=tuple(task for scenario in scenarios for task in scenario.tasks),
        controls=tuple(control for scenario in scenarios for control in scenario.controls),
        skipped=sum(scenario.skipped for scenario in scenarios),
    )


def _select_rows(split: Split[ImageArray], rows_by_class: list[Rows]) -> LabelledImages:
    labels = np.repeat(np.arange(len(rows_by_class)), [len(rows) for rows in rows_by_class])
    return LabelledImages.from_split(split, np.concatenate(rows_by_class), labels)


def _group_classes(
    dataset: Dataset[ImageArray],
    tasks: int | Sequence[Sequence[str]],
    order: Sequence[str] | None,
) -> list[list[str]]:
    """The class names of each task."""
    if not isinstance(tasks, int):
        groups = [[_find_class(name, dataset) for name in group] for group in tasks]
        if not all(groups):
            raise InputError(
                "the class order has an empty task; give every task at least one class"
            )
        _check_order([name for group in groups for name in group], dataset)
        return groups
    names = [_find_class(name, dataset) for name in (dataset.classes if order is None else order)]
    _check_order(names, dataset)
    if not 1 <= tasks <= len(names):
        raise InputError(
            f"tasks is {tasks}, but {dataset.name} has {plural(len(names), 'class')}; "
            f"give between 1 and {len(names)}"
        )
    return [list(group) for group in np.array_split(np.array(names, dtype=object), tasks)]


def _find_class(name: str, dataset: Dataset[ImageArray]) -> str:
    """The class that a class order names; underscores are spaces, as in names of folders."""
    if name in dataset.classes:
        return name
    spaced = name.replace("_", " ")
    if spaced not in dataset.classes:
        closest = difflib.get_close_matches(spaced, dataset.classes, n=1, cutoff=0.5)
        raise InputError(
            f"the class order names '{name}', which {dataset.name} does not have; "
            + (f"did you mean '{closest[0]}'?" if closest else f"it has '{dataset.classes[0]}', …")
        )
    return spaced


def _check_order(names: list[str], dataset: Dataset[ImageArray]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"the class order names '{repeated}' twice; each class has one task")
