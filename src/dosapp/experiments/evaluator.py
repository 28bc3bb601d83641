"""Evaluate a learner's experts on the test sets of a scenario. Nothing is changed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dosapp.backbones.base import Expert
from dosapp.data.images import LabelledImages
from dosapp.experiments.metrics import expected_calibration_error
from dosapp.heads.base import HeadExpert
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
        # Features of each task's test images, by batch, and the revision that encoded them.
        self._encoded: WeakKeyDictionary[Expert, dict[int, tuple[int, list[Tensor]]]]
        self._encoded = WeakKeyDictionary()

    def experts(self) -> Mapping[str, Expert]:
        """All experts of the learner, by name."""
        return self.learner.experts()

    def accuracy(self, expert: Expert, task: int, seen: Iterable[int]) -> float:
        """Accuracy on the test images of a task, over the classes of all seen tasks.

        Args:
            expert: The model that predicts.
            task: The task whose test images are classified.
            seen: The tasks whose classes can be predicted.
        """
        predicted = self._task_logits(expert, task, seen).argmax(dim=1).cpu().numpy()
        correct = predicted - self._first_class(task) == self.scenario.tasks[task].test.labels
        return 100 * float(np.mean(correct))

    def matrix_row(self, expert: Expert, seen: Sequence[int]) -> list[float | None]:
        """One row of the accuracy matrix R: a value for each seen task, None for later ones.

        Args:
            expert: The model that predicts.
            seen: The tasks learned so far.
        """
        row: list[float | None] = [None] * len(self.scenario.tasks)
        for task in seen:
            row[task] = self.accuracy(expert, task, seen)
        return row

    @torch.inference_mode()
    def evaluate_classes(self) -> tuple[dict[str, float], float]:
        """Accuracy of the answering expert on each class, over all classes, and its ECE."""
        accuracies: dict[str, float] = {}
        confidences, hits = [], []
        _, expert = self.learner.answering_expert
        for n, task in enumerate(self.scenario.tasks):
            probabilities = (expert.logit_scale * self._task_logits(expert, n)).softmax(dim=1)
            confidence, predicted = (x.cpu().numpy() for x in probabilities.max(dim=1))
            correct = predicted - self._first_class(n) == task.test.labels
            for label, name in enumerate(task.classes):
                accuracies[name] = 100 * float(np.mean(correct[task.test.labels == label]))
            confidences.append(confidence)
            hits.append(correct)
        error = expected_calibration_error(np.concatenate(confidences), np.concatenate(hits))
        return accuracies, error

    def control_accuracy(self, expert: Expert | None = None) -> float:
        """Zero-shot accuracy on classes that are never trained; NaN if there are none."""
        expert = expert or self.learner.answering_expert[1]
        correct: list[bool] = []
        for control, prompts in self.scenario.controls:
            rows = np.arange(len(control.test.labels))
            test = LabelledImages.from_split(control.test, rows, control.test.labels)
            classes = dict.fromkeys(control.classes, prompts)
            logits = [
                self.learner.score_images(x, expert, classes) for x in test.batches(EVAL_BATCH_SIZE)
            ]
            correct += list(torch.cat(logits).argmax(dim=1).cpu().numpy() == test.labels)
        return 100 * float(np.mean(correct)) if correct else math.nan

    def expert_distance(self) -> float:
        """‖θ^T - θ^S‖ over the weights in which experts differ from the student."""
        student = self.learner.student
        weights, total = student.backbone.weights(), 0.0
        for expert in self.learner.method.experts(student).values():  # a head has no weights
            for name, weight in expert.weights().items():
                if weight is not weights[name]:
                    total += (weight - weights[name]).detach().square().sum().item()
        return math.sqrt(total)

    def _first_class(self, task: int) -> int:
        """The index of a task's first class among the classes of all tasks."""
        return sum(len(t.classes) for t in self.scenario.tasks[:task])

    def _task_logits(self, expert: Expert, task: int, seen: Iterable[int] | None = None) -> Tensor:
        """Scores `[N, C]` of a task's test images: cosines with captions, or a head's logits."""
        tasks = self.scenario.tasks if seen is None else [self.scenario.tasks[n] for n in seen]
        prompts = {name: t.prompts for t in tasks for name in t.classes}
        batches = self._encode_task(expert, task)
        return torch.cat([self.learner.score_features(x, expert, prompts) for x in batches])

    @torch.inference_mode()
    def _encode_task(self, expert: Expert, task: int) -> list[Tensor]:
        """Image features of a task's test set by batch, computed once per change of the weights."""
        encoder = expert.encoder if isinstance(expert, HeadExpert) else expert
        encoded = self._encoded.setdefault(encoder, {})
        if task not in encoded or encoded[task][0] != encoder.revision:
            test = self.scenario.tasks[task].test
            batches = [encoder.encode_image(x) for x in test.batches(EVAL_BATCH_SIZE)]
            encoded[task] = (encoder.revision, batches)
        return encoded[task][1]
