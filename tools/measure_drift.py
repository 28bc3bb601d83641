r"""Measure how well the stream moves class means: why Stream-GDA works, and where it fails.

    python tools/measure_drift.py configs/hard.yaml --out results/drift/shapes-hard.json
    python tools/measure_drift.py configs/study-held-out.yaml --data cub \
        --out results/drift/cub.json
    python tools/measure_drift.py configs/hard.yaml --permute-names \
        --out results/drift/shapes-hard-permuted.json
    python tools/measure_drift.py --plot results/drift docs/images/drift.png

A learner keeps no images, but a measurement may read them again. After each session and its stream
the training images of every earlier class are encoded once more; their mean is where the stored
mean should be now. Distances are relative to the distance of the nearest other class's true mean:
at 0.5 an image at the class's mean can be taken for the other class. With `--permute-names` each
class has the name of another, so that captions say nothing true: what are they needed for?
"""

import argparse
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dosapp import InputError, Learner
from dosapp.data.images import LabelledImages
from dosapp.experiments.grid import read_grid
from dosapp.experiments.plan import plan
from dosapp.experiments.study import Study
from dosapp.heads.class_statistics import ClassStatistics
from dosapp.heads.gaussian import GaussianHead
from dosapp.runtime.files import write_json
from dosapp.scenario import Scenario
from dosapp.settings import RunSettings, read_yaml

BATCH = 64


def find_run(path: Path, data: str | None) -> RunSettings:
    """Find the run of Stream-GDA on a dataset, seed 0, in a grid or in a study."""
    is_study = "variants" in read_yaml(path)
    study_runs = [run.settings for run in Study.read(path).runs(held_out=True)] if is_study else []
    for settings in study_runs or read_grid(path, "0"):
        if settings.method == "stream-gda" and data in (None, settings.data):
            return settings
    raise InputError(f"'{path}' has no run of stream-gda on '{data or 'any dataset'}'")


@torch.inference_mode()
def encode(learner: Learner, images: LabelledImages) -> tuple[Tensor, Tensor]:
    """Features `[n, D]` of images as the learner sees them now, and their labels."""
    features = [learner.method_expert.encode_image(x).double() for x in images.batches(BATCH)]
    return torch.cat(features), torch.from_numpy(images.labels)


def permute_names(scenario: Scenario) -> Scenario:
    """Give each class the name of another one."""
    names = [name for task in scenario.tasks for name in task.classes]
    permuted = iter(random.Random(0).sample(names, len(names)))
    tasks = [replace(t, classes=tuple(next(permuted) for _ in t.classes)) for t in scenario.tasks]
    return replace(scenario, tasks=tuple(tasks))


def fit(learner: Learner, scenario: Scenario, sessions: int) -> ClassStatistics:
    """The statistics that a learner would have if it had kept all images of its sessions."""
    statistics, classes = ClassStatistics(), 0
    for t in range(sessions):
        session = scenario.session(t)
        features, labels = encode(learner, session.train)
        statistics.add_session(features, labels + classes)
        classes += len(session.classes)
    return statistics


@torch.inference_mode()
def accuracy(learner: Learner, scenario: Scenario, statistics: ClassStatistics) -> float:
    """Accuracy of GDA without captions, mean over all tasks, in per cent."""
    head, classes, shares = GaussianHead(statistics, torch.tensor(0.0)), 0, []
    captions = torch.zeros(len(learner.classes), len(statistics.stack_means(1)[0])).double()
    for task in scenario.tasks:
        features, labels = encode(learner, task.test)
        predicted = head.score(features, captions).argmax(dim=1)
        shares.append((predicted == labels + classes).double().mean().item())
        classes += len(task.classes)
    return 100 * float(np.mean(shares))


def measure(settings: RunSettings, permute: bool) -> dict[str, Any]:
    """Run the sessions, and compare stored and moved means with the true ones after each.

    Args:
        settings: The run.
        permute: Whether each class has the name of another.

    Returns:
        By number of sessions since a class was learned: the mean relative error of its mean, as it
        was stored and as the stream has moved it. In the end: the accuracy with the moved means,
        with the true ones, and with true means and scatter.
    """
    planned = plan(settings)
    scenario = permute_names(planned.scenario) if permute else planned.scenario
    learner = Learner(planned.settings.learner(), planned.backbone)
    errors = {name: defaultdict[int, list[float]](list) for name in ("stored", "moved")}
    stored = torch.zeros(0)  # means right after their session
    learned_in: list[int] = []  # the session of each class
    for t in range(len(scenario.task_groups)):
        session = scenario.session(t)
        for _ in learner.training_steps(session):
            pass
        now = learner.class_head.statistics.stack_means(len(learner.classes))
        stored = torch.cat([stored, now[len(stored) :]])
        learned_in += [t] * len(session.classes)
        size = planned.settings.stream_batch_size
        learner.adapt_stream(session.unlabelled, batch_size=size, progress=False)
        true = fit(learner, scenario, t + 1).stack_means(len(stored))
        moved = learner.class_head.statistics.stack_means(len(stored))
        nearest = torch.cdist(true, true).fill_diagonal_(torch.inf).min(dim=1).values
        for name, means in (("stored", stored), ("moved", moved)):
            relative = (means - true).norm(dim=1) / nearest
            for learned, error in zip(learned_in, relative.tolist(), strict=True):
                errors[name][t - learned].append(error)
        print(f"session {t + 1} of {len(scenario.task_groups)}", flush=True)
    refitted = fit(learner, scenario, len(scenario.task_groups))
    exact = replace(refitted, scatter=learner.class_head.statistics.scatter)
    return {
        "data": planned.settings.data,
        "permuted": permute,
        "seed": planned.settings.seed,
        "key": planned.key,
        "error": {name: [float(np.mean(e[n])) for n in sorted(e)] for name, e in errors.items()},
        "accuracy": {
            "moved means": accuracy(learner, scenario, learner.class_head.statistics),
            "true means": accuracy(learner, scenario, exact),
            "true means and scatter": accuracy(learner, scenario, refitted),
        },
    }


def plot(folder: Path, path: Path) -> None:
    """Draw the measurements of a folder: error by age, as stored (dashed) and as moved (solid)."""
    from dosapp.report.figures import PALETTE, STYLE, plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for colour, file in zip(PALETTE, sorted(folder.glob("*.json")), strict=False):
            found = json.loads(file.read_text())
            label = found["data"] + (", permuted names" if found["permuted"] else "")
            axes.plot(found["error"]["stored"], "--", color=colour)
            axes.plot(found["error"]["moved"], "o-", ms=4, color=colour, label=label)
        axes.plot([], [], "--", color="0.4", label="as stored")
        axes.set_xlabel("sessions since the class was learned")
        axes.set_ylabel("error of the class mean\n÷ distance of the nearest class")
        axes.axhline(0.5, color="0.7", lw=1)  # half way to the nearest class
        axes.set_yscale("log")
        axes.legend(ncols=2)
        figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", type=Path, nargs="?", help="a study or a grid file")
    parser.add_argument("--data", help="the dataset, if the file has several")
    parser.add_argument("--permute-names", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("FOLDER", "FIGURE"))
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
    else:
        write_json(args.out, measure(find_run(args.study, args.data), args.permute_names))
