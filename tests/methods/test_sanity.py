"""Each method has its intended effect on the embedded benchmark, by a margin larger than noise.

Labelled methods are compared with the committed result of FLYP (`results/tiny`): the demo's five
tasks, the same seed. Unlabelled methods adapt to noise.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dosapp.backbones.base import Backbone
from dosapp.experiments.grid import select_results
from dosapp.experiments.plan import build_scenario
from dosapp.experiments.result import Result
from dosapp.experiments.run import run
from dosapp.experiments.store import read_results
from dosapp.functional.losses import (
    distillation_loss,
    quadratic_penalty,
    relation_distillation_loss,
)
from dosapp.learner.learner import Learner
from dosapp.methods.mas import MAS
from dosapp.settings import RunSettings

pytestmark = pytest.mark.slow

DEMO = {"data": "shapes", "classes": 50, "tasks": 5}
ROOT = Path(__file__).parents[2]


@cache
def committed(label: str) -> Result:
    """Seed 0 of a row of docs/methods.md."""
    rows = select_results(
        ROOT / "configs" / "methods.yaml", read_results([ROOT / "results" / "tiny"])
    )
    [result] = [r for r in rows if r.label == label and r.settings["seed"] == 0]
    return result


@pytest.mark.parametrize(
    ("settings", "against", "accuracy", "forgetting"),
    [  # points of accuracy more, of forgetting less, at least
        ({"method": "zscl", "options": {"ref_dataset": "signs"}}, "FLYP", 1.5, 0.5),
        ({"method": "dualprompt"}, "FLYP", 2.0, 4.0),
        ({"method": "slca"}, "FLYP", 5.0, 4.0),
        ({"method": "flyp", "buffer_size": 100}, "FLYP", 5.0, 5.0),
        ({"method": "sparcl", "buffer_size": 100}, "SparCL", 5.0, 5.0),
        ({"method": "l2p"}, "zero-shot", 4.0, 1.0),
    ],
    ids=["zscl", "dualprompt", "slca", "replay", "sparcl and replay", "l2p"],
)
def test_is_more_accurate_and_forgets_less(
    settings, against, accuracy, forgetting, tmp_path
) -> None:
    metrics = run(RunSettings(**DEMO, **settings), tmp_path / "x").metrics
    other = committed(against).metrics
    assert metrics["accuracy"] >= other["accuracy"] + accuracy
    assert metrics["forgetting"] <= other["forgetting"] - forgetting


@pytest.mark.parametrize(
    ("adapt", "more", "gain"),
    [  # points gained on a noisy test by adapting to a noisy stream
        ("tent", {"stream_lr": 2e-3}, 1.0),
        ("eata", {"stream_lr": 2e-3, "options": {"d_margin": 1.0}}, 1.0),
        ("note", {"stream_lr": 2e-3}, 1.0),
        ("ecotta", {}, 1.0),
        ("dss-style", {"stream_lr": 1e-3, "options": {"momentum": 0.9}}, 0.3),
    ],
)
def test_adapts_to_noise(adapt, more, gain, tmp_path) -> None:
    noisy = {"stream_noise": 0.35, "test_noise": 0.35, "stream_batch_size": 32}
    settings = RunSettings(
        method="spu", adapt=adapt, classes=20, tasks=2, epochs=3, **noisy, **more
    )
    result = run(settings, tmp_path / "x")
    before, after = (
        np.mean(
            [x for row in result.matrices[result.evaluated][when] for x in row if x is not None]
        )
        for when in ("before", "after")
    )
    assert after >= before + gain


class TestRegularisers:
    """The stronger the penalty, the less changes of what it protects."""

    def after_one_session(self, tiny, **changes: object) -> tuple[Learner, object]:
        settings = RunSettings(classes=20, tasks=2, epochs=3, lr=1e-4, **changes)
        learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        scenario = build_scenario(settings, tiny.preprocess)
        learner.learn(scenario.session(0))
        return learner, scenario.session(1)

    @pytest.mark.parametrize(
        ("method", "measure"), [("lwf", distillation_loss), ("prd", relation_distillation_loss)]
    )
    def test_distillation_keeps_the_previous_models_logits(self, method, measure, tiny) -> None:
        def change(weight: float) -> float:
            learner, session = self.after_one_session(
                tiny, method=method, options={"distillation_weight": weight}
            )
            learner.learn(session)
            student, old = learner.student, learner.method.previous_model
            pixels = session.train.read(range(0, len(session.train), 7))
            labels = torch.from_numpy(session.train.labels[::7]) + 10

            def logits(net: Backbone) -> torch.Tensor:
                images, texts = student.encode_pairs(pixels, labels, net)
                return net.logit_scale * images @ texts.T

            with torch.no_grad():
                new, before = logits(student.backbone), logits(old)
                # PRD's is a cross-entropy: without a change its value is the entropy
                return (measure(new, before, 1.0) - measure(before, before, 1.0)).item()

        assert change(1.0) < 0.5 * change(0.0)

    def test_mas_keeps_important_weights(self, tiny) -> None:
        def change(reg_lambda: float) -> float:
            options = {"reg_lambda": reg_lambda}
            learner, session = self.after_one_session(tiny, method="mas", options=options)
            method = learner.method
            assert isinstance(method, MAS)
            anchor = {n: w.clone() for n, w in method.anchor.items()}
            importance = {n: w.clone() for n, w in method.importance.items()}
            learner.learn(session)
            return quadratic_penalty(learner.student.backbone.weights(), anchor, importance).item()

        assert change(1000.0) < 0.5 * change(0.0)


class TestRestoration:
    """Restored or penalised weights stay nearer to those of the session's end."""

    def distance(self, tiny, adapt: str, **options: float) -> float:
        settings = RunSettings(
            method="spu", adapt=adapt, classes=10, tasks=1, epochs=2, lr=1e-3, options=options
        )
        learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        weights = learner.student.backbone.first_mlp_weights()
        source = {n: w.detach().clone() for n, w in weights.items()}
        for pixels in session.unlabelled.batches(20):
            learner.adapt(pixels)
        return sum(float((weights[n] - w).detach().abs().sum()) for n, w in source.items())

    def test_cotta_by_restoring_at_random(self, tiny) -> None:
        options = {"num_augmentations": 2}
        restored, free = (
            self.distance(tiny, "cotta", restore_prob=p, **options) for p in (0.2, 0.0)
        )
        assert restored < 0.8 * free

    def test_psmt_by_its_penalty(self, tiny) -> None:
        penalised, free = (
            self.distance(tiny, "psmt", fisher_alpha=alpha, restore_ratio=0.0)
            for alpha in (5e7, 0.0)
        )
        assert penalised < 0.8 * free

    def test_rmt_draws_features_to_the_prototypes(self, tiny) -> None:
        settings = RunSettings(
            method="spu",
            adapt="rmt",
            classes=10,
            tasks=1,
            epochs=2,
            lr=1e-3,
            options={"lambda_ce_trg": 0.0},
        )
        learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        session = build_scenario(settings, tiny.preprocess).session(0)
        learner.learn(session)
        method, student = learner.method.unlabelled, learner.student
        pixels = session.unlabelled.read(range(0, len(session.unlabelled), 3))

        def contrastive_loss() -> float:
            return method.stream_loss(student, pixels).loss.item()

        student.steps = 10_000  # the same augmentation before and after
        before = contrastive_loss()
        student.steps = 0
        for batch in session.unlabelled.batches(20):
            learner.adapt(batch)
        student.steps = 10_000
        assert contrastive_loss() < 0.97 * before
