"""Evaluate a learner's experts on the test sets of a scenario. Nothing is changed."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from dosapp.backbones.base import Expert
from dosapp.data.base import Prompts, Rows
from dosapp.data.images import LabelledImages
from dosapp.learner.learner import Learner
from dosapp.scenario import Scenario

EVAL_BATCH_SIZE = 256


class Evaluator:
    """Accuracies of the experts of a learner, in per cent.

    Args:
        scenario: The tasks whose test sets are used.
        learner: The learner to evaluate.

    Example:
        >>> from dosapp import Learner, RunSettings
        >>> from dosapp.experiments.plan import plan
        >>> planned = plan(RunSettings(classes=6, tasks=2, test_images=4))
        >>> evaluator = Evaluator(planned.scenario, Learner(backbone=planned.backbone))
        >>> 0 <= evaluator.accuracy(planned.backbone, task=0, seen=[0]) <= 100
        True
    """

    def __init__(self, scenario: Scenario, learner: Learner) -> None:
        self.scenario, self.learner = scenario, learner

    def experts(self) -> Mapping[str, Expert]:
        """All experts of the learner, by name."""
        return self.learner.method.experts(self.learner.student)

    def accuracy(self, expert: Expert, task: int, seen: Iterable[int]) -> float:
        """Accuracy on the test images of a task, over the classes of all seen tasks.

        Args:
            expert: The model that predicts.
            task: The task whose test images are classified.
            seen: The tasks whose classes can be predicted.
        """
        predicted = self._predict_task(expert, task, seen)
        return 100 * float(np.mean(predicted == self.scenario.tasks[task].test.labels))

    def per_class(self) -> dict[str, float]:
        """Accuracy of the answering expert on each class, over all classes."""
        accuracies, tasks = {}, range(len(self.scenario.tasks))
        _, expert = self.learner.answering_expert
        for n, task in enumerate(self.scenario.tasks):
            predicted = self._predict_task(expert, n, tasks)
            for label, name in enumerate(task.classes):
                correct = predicted[task.test.labels == label] == label
                accuracies[name] = 100 * float(np.mean(correct))
        return accuracies

    def control_accuracy(self, expert: Expert | None = None) -> float:
        """Zero-shot accuracy on classes that are never trained; NaN if there are none."""
        expert = expert or self.learner.answering_expert[1]
        correct: list[bool] = []
        for control, prompts in self.scenario.controls:
            rows = np.arange(len(control.test.labels))
            test = LabelledImages.from_split(control.test, rows, control.test.labels)
            predicted = self._predict(expert, test, dict.fromkeys(control.classes, prompts))
            correct += list(predicted == test.labels)
        return 100 * float(np.mean(correct)) if correct else math.nan

    def expert_distance(self) -> float:
        """‖θ^T - θ^S‖ over the weights in which experts differ from the student."""
        weights = self.learner.student.backbone.weights()
        total = 0.0
        for expert in self.experts().values():
            for name, weight in expert.weights().items():
                if weight is not weights[name]:
                    total += (weight - weights[name]).detach().square().sum().item()
        return math.sqrt(total)

    def _predict_task(self, expert: Expert, task: int, seen: Iterable[int]) -> Rows:
        """Predictions as indices of the task's classes; outside its range: another task's class."""
        tasks = [self.scenario.tasks[n] for n in seen]
        prompts = {name: t.prompts for t in tasks for name in t.classes}
        first = sum(len(t.classes) for t in self.scenario.tasks[:task])
        return self._predict(expert, self.scenario.tasks[task].test, prompts) - first

    def _predict(
        self, expert: Expert, test: LabelledImages, prompts: Mapping[str, Prompts]
    ) -> Rows:
        batches = (
            self.learner.cosine_logits(pixels, expert, prompts).argmax(dim=1)
            for pixels in test.batches(EVAL_BATCH_SIZE)
        )
        predicted: Rows = torch.cat(list(batches)).cpu().numpy()
        return predicted
