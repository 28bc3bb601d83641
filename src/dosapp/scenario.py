"""Datasets → tasks with disjoint classes → sessions: lessons with labels, then a stream without.

A stream is a value. Every modifier returns a new one, and every order is a function of the seed.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dosapp.data.base import Control, Dataset, Prompts, Rows, Split, check_class_names
from dosapp.data.images import InMemoryImages, LabelledImages, UnlabelledImages, concat_images
from dosapp.errors import InputError
from dosapp.runtime.rng import numpy_rng


@dataclass(frozen=True)
class Task:
    """Classes nobody else has, their lessons, their part of D^u (`field`) and of D^e (`test`)."""

    classes: tuple[str, ...]
    prompts: Prompts
    train: LabelledImages
    unlabelled: LabelledImages
    test: LabelledImages


@dataclass(frozen=True)
class Session:
    """What a learner is given at once: labelled classes, then an unlabelled stream."""

    classes: tuple[str, ...]
    prompts: Mapping[str, Prompts]
    train: LabelledImages
    unlabelled: UnlabelledImages

    def check_images(self, otherwise: str) -> None:
        """Make sure that every class has a picture, or say what is missing without one."""
        known = {self.classes[label] for label in self.train.labels}
        missing = next((name for name in self.classes if name not in known), None)
        if missing is not None:
            raise InputError(f"class '{missing}' has no training images, so {otherwise}; give one")

    @classmethod
    def from_images(cls, images: Mapping[str, Tensor], prompts: Prompts | None = None) -> "Session":
        """A lesson from tensors: class name → `uint8 [n, 3, H, W]`. For one's own program."""
        names = tuple(str(name) for name in images)
        check_class_names(names, "the lesson")
        for name, found in images.items():
            if not isinstance(found, Tensor) or found.dtype != torch.uint8 or found.ndim != 4:
                kind = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else found
                raise InputError(f"images of '{name}' are {kind}; give a uint8 tensor [n, 3, H, W]")
        if len({found.shape[1:] for found in images.values()}) > 1:
            raise InputError("the lesson's images have different sizes; give them all the same")
        pixels = torch.cat(list(images.values()))
        labels = np.repeat(np.arange(len(names)), [len(found) for found in images.values()])
        part = Split(InMemoryImages(pixels), labels)
        train = LabelledImages.from_split(part, np.arange(len(labels)), labels)
        return cls(names, {name: prompts or Prompts() for name in names}, train, train.empty())


@dataclass(frozen=True)
class Scenario:
    """Tasks in order, and how their unlabelled pictures come back session after session."""

    name: str
    tasks: tuple[Task, ...]
    seed: int
    controls: tuple[tuple[Control, Prompts], ...] = ()
    revisits_images: bool = (
        True  # session t streams D^u of all seen tasks; else disjoint chunks of it
    )
    order: Literal["shuffled", "correlated", "one class"] = "shuffled"
    is_joint: bool = False  # joint training: one session with every class
    boundaries: tuple[int, ...] = ()  # the tasks before which another dataset begins
    skipped: int = 0  # pictures that could not be read

    # Modifiers

    def imbalanced(self) -> "Scenario":
        """Draw each task's D^u from a Dirichlet whose total concentration is its class count."""

        def draw(number: int, task: Task) -> LabelledImages:
            random = numpy_rng("imbalanced", self.seed, number)
            share = random.dirichlet(np.ones(len(task.classes)))
            wanted = random.multinomial(len(task.unlabelled), share)
            kept = [
                random.permutation(np.flatnonzero(task.unlabelled.labels == c))[:n]
                for c, n in enumerate(wanted)
            ]
            return task.unlabelled.subset(np.sort(np.concatenate(kept)))

        return self._with_unlabelled(draw)

    def fraction(self, share: float) -> "Scenario":
        """Keep this share of every task's D^u."""
        if not 0 < share <= 1:
            raise InputError(f"fraction of D^u is {share}; give a number in (0, 1]")

        def draw(number: int, task: Task) -> LabelledImages:
            order = numpy_rng("fraction", self.seed, number).permutation(len(task.unlabelled))
            return task.unlabelled.subset(np.sort(order[: round(share * len(order))]))

        return self._with_unlabelled(draw)

    def noisy(self, *, stream: float = 0.0, test: float = 0.0) -> "Scenario":
        """Gaussian noise on D^u and on D^e, σ in [0, 1] pixels, clipped."""
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
        """Each session's stream comes class by class, in a random order of classes."""
        return replace(self, order="correlated")

    def one_class(self) -> "Scenario":
        """Each session's stream shows one of the classes met so far, as long as it was before."""
        return replace(self, order="one class")

    def chunks(self) -> "Scenario":
        """No picture of D^u is ever seen twice: each session gets its own chunk of each task's."""
        return replace(self, revisits_images=False)

    def without_unlabelled(self) -> "Scenario":
        return self._with_unlabelled(
            lambda number, task: task.unlabelled.subset(np.zeros(0, dtype=np.int64))
        )

    def full_test(self) -> "Scenario":
        """Evaluate on D^u ∪ D^e and stream nothing."""
        tasks = tuple(
            replace(t, test=concat_images([t.test, t.unlabelled], [0, 0])) for t in self.tasks
        )
        return replace(self, tasks=tasks).without_unlabelled()

    def joint(self) -> "Scenario":
        return replace(self, is_joint=True)

    def _with_unlabelled(self, draw: "UnlabelledOf") -> "Scenario":
        tasks = tuple(replace(t, unlabelled=draw(n, t)) for n, t in enumerate(self.tasks))
        return replace(self, tasks=tasks)

    # What a learner is given

    @property
    def task_groups(self) -> list[list[int]]:
        """The tasks each session teaches."""
        everything = list(range(len(self.tasks)))
        return [everything] if self.is_joint else [[n] for n in everything]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(name for task in self.tasks for name in task.classes)

    def seen_tasks(self, session: int) -> list[int]:
        """The tasks met up to and including this session."""
        return [n for group in self.task_groups[: session + 1] for n in group]

    def session(self, number: int) -> Session:
        tasks = [self.tasks[n] for n in self.task_groups[number]]
        classes = tuple(name for task in tasks for name in task.classes)
        offsets = np.cumsum([0, *(len(task.classes) for task in tasks)])[:-1]
        train = concat_images([task.train for task in tasks], offsets.tolist())
        prompts = {name: task.prompts for task in tasks for name in task.classes}
        return Session(classes, prompts, train, self._stream(number).unlabelled())

    def stream_labels(self, number: int) -> Rows:
        """Labels of a session's stream, positions in `classes`; for the meter, not the learner."""
        return self._stream(number).labels

    def _stream(self, number: int) -> LabelledImages:
        starts = np.cumsum([0, *(len(task.classes) for task in self.tasks)])[:-1]
        seen = self.seen_tasks(number)
        parts = [self._chunk(number, n) for n in seen]
        stream = concat_images(parts, [int(starts[n]) for n in seen])
        random = numpy_rng("stream", self.seed, number)
        order = random.permutation(len(stream))
        if self.order == "correlated":
            rank = random.permutation(len(self.classes))
            order = order[np.argsort(rank[stream.labels[order]], kind="stable")]
        if self.order == "one class" and len(stream):
            only = np.flatnonzero(stream.labels == random.choice(np.unique(stream.labels)))
            order = random.choice(only, size=len(stream))
        return stream.subset(order)

    def _chunk(self, number: int, task: int) -> LabelledImages:
        part = self.tasks[task].unlabelled
        if self.revisits_images:
            return part
        first = next(s for s, group in enumerate(self.task_groups) if task in group)
        order = numpy_rng("chunks", self.seed, task).permutation(len(part))
        return part.subset(np.array_split(order, len(self.task_groups) - first)[number - first])

    def check(self) -> None:
        """Read every picture once; a bad one is named before any learning starts."""
        for task in self.tasks:
            for source in {id(s): s for s in (*task.train.sources, *task.test.sources)}.values():
                source.check()

    # What it says of itself

    @cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self.manifest()).encode()).hexdigest()[:16]

    def manifest(self) -> dict[str, object]:
        """Every picture in its place; two streams with one hash show a learner the same things."""
        return {
            "name": self.name,
            "seed": self.seed,
            "sessions": [
                {
                    "classes": self.session(n).classes,
                    "train": self.session(n).train.labelled_image_keys(),
                    "stream": self._stream(n).labelled_image_keys(),
                }
                for n in range(len(self.task_groups))
            ],
            "tests": [task.test.labelled_image_keys() for task in self.tasks],
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


UnlabelledOf = Callable[[int, Task], LabelledImages]


def split_dataset(
    dataset: Dataset,
    tasks: int | Sequence[Sequence[str]] = 10,
    *,
    seed: int = 0,
    order: Sequence[str] | None = None,
) -> Scenario:
    """A dataset as a stream: so many tasks over a class order, or the classes of each task by name.

    The test part is halved per class: one half streams unlabelled, the other evaluates.
    """
    groups = _groups(dataset, tasks, order)
    position = {name: n for n, name in enumerate(dataset.classes)}
    made = []
    for group in groups:
        train, field, test = [], [], []
        for name in group:
            label = position[name]
            rows = np.flatnonzero(dataset.train.labels == label)
            if not len(rows):
                raise InputError(f"class '{name}' of {dataset.name} has no training images")
            train.append(rows)
            rows = np.flatnonzero(dataset.test.labels == label)
            if len(rows) < 2:
                raise InputError(
                    f"class '{name}' of {dataset.name} has {len(rows)} test image(s); at least 2 "
                    "are needed, one half to stream and one to evaluate"
                )
            rows = numpy_rng("halves", seed, name).permutation(rows)
            half = math.ceil(len(rows) / 2)
            field.append(np.sort(rows[:half]))
            test.append(np.sort(rows[half:]))
        made.append(
            Task(
                tuple(group),
                dataset.prompts,
                _labelled(dataset.train, train),
                _labelled(dataset.test, field),
                _labelled(dataset.test, test),
            )
        )
    controls = ((dataset.control, dataset.prompts),) if dataset.control else ()
    skipped = dataset.train.skipped + dataset.test.skipped
    return Scenario(dataset.name, tuple(made), seed, controls, skipped=skipped)


def concat_scenarios(*streams: Scenario) -> Scenario:
    """One long sequence with one growing class space."""
    first = streams[0]
    names = [name for stream in streams for name in stream.classes]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InputError(
            f"class '{min(twice)}' is in two of the streams to join; class names must be disjoint"
        )
    if (
        len(
            {
                (s.seed, s.revisits_images, s.order, s.is_joint, s.tasks[0].unlabelled.noise)
                for s in streams
            }
        )
        > 1
    ):
        raise InputError("the streams to join have different seeds or modifiers; modify them after")
    starts = np.cumsum([len(stream.tasks) for stream in streams])[:-1]
    return replace(
        first,
        boundaries=tuple(starts.tolist()),
        name="+".join(stream.name for stream in streams),
        tasks=tuple(task for stream in streams for task in stream.tasks),
        controls=tuple(control for stream in streams for control in stream.controls),
        skipped=sum(stream.skipped for stream in streams),
    )


def _labelled(part: Split, rows_by_class: list[Rows]) -> LabelledImages:
    labels = np.repeat(np.arange(len(rows_by_class)), [len(rows) for rows in rows_by_class])
    return LabelledImages.from_split(part, np.concatenate(rows_by_class), labels)


def _groups(
    dataset: Dataset, tasks: int | Sequence[Sequence[str]], order: Sequence[str] | None
) -> list[list[str]]:
    if not isinstance(tasks, int):
        groups = [list(group) for group in tasks]
        if not all(groups):
            raise InputError(
                "the class order has an empty task; give every task at least one class"
            )
        _check_names([name for group in groups for name in group], dataset)
        return groups
    names = list(order) if order is not None else list(dataset.classes)
    _check_names(names, dataset)
    if not 1 <= tasks <= len(names):
        raise InputError(
            f"{tasks} tasks asked of {dataset.name}, which has {len(names)} classes; "
            f"give between 1 and {len(names)}"
        )
    return [list(group) for group in np.array_split(np.array(names, dtype=object), tasks)]


def _check_names(names: list[str], dataset: Dataset) -> None:
    for name in names:
        if name not in dataset.classes:
            raise InputError(
                f"the class order names '{name}', which {dataset.name} does not have; "
                f"it has for example '{dataset.classes[0]}'"
            )
        if names.count(name) > 1:
            raise InputError(f"the class order names '{name}' twice; each class has one task")
