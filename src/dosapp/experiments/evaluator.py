"""Asking a learner's experts about the test halves. Looks, never touches."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from dosapp.backbones.base import Expert
from dosapp.data.base import Prompts, Rows
from dosapp.data.images import LabelledImages
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario

LOOK = 256  # images per batch


class Evaluator:
    def __init__(self, stream: Scenario, learner: Learner) -> None:
        self.stream, self.learner = stream, learner

    def experts(self) -> Mapping[str, Expert]:
        return self.learner.method.experts(self.learner.student)

    def answering(self) -> Expert:
        """The expert whose answer is the learner's."""
        return next(iter(self.experts().values()))

    def accuracy(self, expert: Expert, j: int, seen: Iterable[int]) -> float:
        """Per cent of task j's test pictures whose nearest class, of all those seen, is theirs."""
        return 100 * float(
            np.mean(self._answers(expert, j, seen) == self.stream.tasks[j].test.labels)
        )

    def per_class(self) -> dict[str, float]:
        """Of the answering expert, over all classes."""
        found, every = {}, range(len(self.stream.tasks))
        for j, task in enumerate(self.stream.tasks):
            answers = self._answers(self.answering(), j, every)
            for n, name in enumerate(task.classes):
                found[name] = 100 * float(np.mean(answers[task.test.labels == n] == n))
        return found

    def control(self, expert: Expert | None = None) -> float:
        """Zero-shot accuracy on classes that nobody trains, among themselves; NaN without any."""
        expert = expert or self.answering()
        right: list[bool] = []
        for control, prompts in self.stream.controls:
            rows = np.arange(len(control.test.labels))
            part = LabelledImages.from_split(control.test, rows, control.test.labels)
            names = dict.fromkeys(control.classes, prompts)
            right += list(self._nearest(expert, part, names) == part.labels)
        return 100 * float(np.mean(right)) if right else math.nan

    def distance(self) -> float:
        """‖θ^T - θ^S‖ over the weights in which experts differ from the student."""
        mine = self.learner.student.backbone.weights()
        total = 0.0
        for expert in self.experts().values():
            for name, theirs in expert.weights().items():
                if theirs is not mine[name]:
                    total += (theirs - mine[name]).detach().square().sum().item()
        return math.sqrt(total)

    def _answers(self, expert: Expert, j: int, seen: Iterable[int]) -> Rows:
        """Answers to task j's test, as positions in its classes; outside them: another task's."""
        tasks = [self.stream.tasks[n] for n in seen]
        names = {name: task.prompts for task in tasks for name in task.classes}
        start = sum(len(task.classes) for task in self.stream.tasks[:j])
        return self._nearest(expert, self.stream.tasks[j].test, names) - start

    def _nearest(self, expert: Expert, test: LabelledImages, names: Mapping[str, Prompts]) -> Rows:
        batches = (self.learner.logits(x, expert, names).argmax(dim=1) for x in test.batches(LOOK))
        found: Rows = torch.cat(list(batches)).cpu().numpy()
        return found
