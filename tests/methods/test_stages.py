"""Stages after the epochs: alignment and merging, by hand and with every labelled method."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from dosapp.errors import InputError
from dosapp.experiments.identity import comparable_settings, run_label
from dosapp.experiments.plan import build_scenario, plan
from dosapp.learner.learner import Learner
from dosapp.methods.alignment import ClassifierAlignment
from dosapp.methods.cofima import CoFiMA
from dosapp.methods.magmax import MagMax
from dosapp.methods.registry import METHODS, build_method
from dosapp.methods.spu import SPU
from dosapp.methods.tent import Tent
from dosapp.testing.method_checks import train_learner
from support.pair_checks import check_pair

STAGES = {
    "align": {"align": True},
    "magmax": {"merging": "magmax"},
    "cofima": {"merging": "cofima"},
}
LABELLED = [name for name, kind in METHODS.items() if kind.phase != "unlabelled"]
FAST = [("spu", "align"), ("flyp", "magmax"), ("dosapp", "cofima")]
REQUIRED = {"zscl": {"ref_dataset": "signs"}}


def weights_of(backbone) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in backbone.weights().items()}


@pytest.fixture
def make_learner(small, tiny):
    def make(**changes: object):
        settings = small(**changes)
        learner = Learner(settings.learner(), tiny)
        return learner, build_scenario(settings, tiny.preprocess)

    return make


@pytest.mark.parametrize(
    ("method", "stage"),
    [
        pytest.param(name, stage, marks=[] if (name, stage) in FAST else pytest.mark.slow)
        for name in LABELLED
        for stage in STAGES
    ],
)
def test_every_labelled_method_can_have_every_stage(method, stage, small, tiny, tmp_path) -> None:
    settings = small(method=method, options=REQUIRED.get(method, {}), **STAGES[stage])
    check_pair(settings, tiny, tmp_path / "learner")


@pytest.mark.slow
def test_both_stages_and_an_adapter(small, tiny, tmp_path) -> None:
    settings = small(method="spu", adapt="dosapp", align=True, merging="magmax")
    check_pair(settings, tiny, tmp_path / "learner")


def test_zero_shot_trains_with_a_stage() -> None:
    """So its first session chooses a learning rate."""
    assert build_method("zero-shot").phase == "none"
    assert build_method("zero-shot", stages=("alignment",)).phase == "labelled"


class TestAlignment:
    def test_flyp_with_an_alignment_is_slca_with_equal_rates(self, small, tiny) -> None:
        options = {"classifier_lr_scale": 1.0}
        aligned, slca = (
            train_learner(small(options=options, **changes), tiny.shared_copy(list(tiny.weights())))
            for changes in ({"method": "flyp", "align": True}, {"method": "slca"})
        )
        one, two = (weights_of(learner.student.backbone) for learner, _ in (aligned, slca))
        assert all(torch.equal(two[name], weight) for name, weight in one.items())

    def test_only_the_projections_change_in_the_stage(self, make_learner) -> None:
        learner, scenario = make_learner(method="spu", align=True)
        learner.learn(scenario.session(0))
        *_, last_epoch = (
            weights_of(learner.student.backbone)
            for step in learner.training_steps(scenario.session(1))
            if step.number <= 6  # two epochs of three batches
        )
        after, projections = (
            weights_of(learner.student.backbone),
            {*learner.student.backbone.projection_weights()},
        )
        assert {n for n in after if not torch.equal(after[n], last_epoch[n])} == projections


class TestMagMax:
    def test_merged_weights_have_the_entries_of_largest_magnitude(self, make_learner) -> None:
        learner, scenario = make_learner(method="flyp", merging="magmax", lr=1e-3)
        start = weights_of(learner.student.backbone)
        vectors, sequential = [], []
        for t in range(2):
            for step in learner.training_steps(scenario.session(t)):
                if step.number == step.total:
                    sequential.append(weights_of(learner.student.backbone))
            vectors.append({n: w - start[n] for n, w in sequential[-1].items()})
        for name, weight in weights_of(learner.student.backbone).items():
            first, second = (vector[name].flatten().tolist() for vector in vectors)
            largest = [b if abs(b) > abs(a) else a for a, b in zip(first, second, strict=True)]
            expected = start[name].flatten() + 0.5 * torch.tensor(largest)
            torch.testing.assert_close(weight.flatten(), expected, rtol=0, atol=1e-7)

    def test_the_next_session_continues_from_the_unmerged_weights(self, make_learner) -> None:
        merged, scenario = make_learner(method="flyp", merging="magmax")
        plain, _ = make_learner(method="flyp")
        plain = Learner(plain.settings)
        for learner in (merged, plain):
            learner.learn(scenario.session(0))
        before = weights_of(plain.student.backbone)
        merged.method.stage.resume_training(merged.student)
        after = merged.student.backbone.weights()
        assert all(torch.equal(after[n], w) for n, w in before.items())

    def test_what_the_stream_changed_is_kept(self, make_learner) -> None:
        learner, scenario = make_learner(method="flyp", adapt="self-training", merging="magmax")
        learner.learn(scenario.session(0))
        stage = learner.method.labelled.stage
        merged = weights_of(learner.student.backbone)
        learner.adapt(scenario.session(0).unlabelled.read(range(8)))
        adapted = weights_of(learner.student.backbone)
        sequential = weights_of(stage.sequential)
        stage.resume_training(learner.student)
        for name, weight in learner.student.backbone.weights().items():
            expected = sequential[name] + (adapted[name] - merged[name])
            torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-7)


class TestCoFiMA:
    def test_merged_weights_are_the_fisher_weighted_average(self, make_learner) -> None:
        learner, scenario = make_learner(
            method="flyp", merging="cofima", options={"wt_alpha": 0.4, "fishermax": 1e-3}
        )
        student, fishers = learner.student, []
        for t in range(2):
            session, before = scenario.session(t), weights_of(student.backbone)
            for step in learner.training_steps(session):
                if step.number == step.total:
                    trained = weights_of(student.backbone)
                    labels = torch.from_numpy(session.train.labels) + 3 * t
                    logits = student.backbone.logit_scale * student.score_images(
                        session.train.read(range(len(session.train)))  # fewer than a batch
                    )
                    loss = cross_entropy(logits, labels)
                    names = sorted(student.ever_selected)
                    weights = [student.backbone.weights()[n] for n in names]
                    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
                    fishers.append(
                        {
                            n: torch.zeros_like(w) if g is None else (g**2).clamp(max=1e-3)
                            for n, g, w in zip(names, gradients, weights, strict=True)
                        }
                    )
        for name, weight in weights_of(student.backbone).items():
            old, new = 0.6 * fishers[0][name], 0.4 * fishers[1][name]
            average = (old * before[name] + new * trained[name]) / (old + new)
            plain = 0.6 * before[name] + 0.4 * trained[name]
            expected = torch.where(old + new > 0, average, plain)
            torch.testing.assert_close(weight, expected, rtol=1e-3, atol=2e-6)

    def test_the_first_session_is_not_merged(self, make_learner) -> None:
        merged, scenario = make_learner(method="flyp", merging="cofima")
        plain = Learner(make_learner(method="flyp")[0].settings)
        for learner in (merged, plain):
            learner.learn(scenario.session(0))
        other = plain.student.backbone.weights()
        assert all(torch.equal(w, other[n]) for n, w in weights_of(merged.student.backbone).items())

    def test_entries_outside_the_mask_are_exact(self, make_learner) -> None:
        learner, scenario = make_learner(method="spu", merging="cofima")
        learner.learn(scenario.session(0))
        before = weights_of(learner.student.backbone)
        learner.learn(scenario.session(1))
        for name, mask in learner.student.selection.mask.items():
            weight = learner.student.backbone.weights()[name]
            assert torch.equal(weight[~mask], before[name][~mask])


class TestCombination:
    def test_stages_are_values(self) -> None:
        built = build_method("spu", "tent", {"ca_epochs": 2}, ("magmax", "alignment"))
        by_hand = SPU().with_stage(MagMax()).with_stage(ClassifierAlignment(ca_epochs=2))
        assert repr(built) == repr(by_hand.then(Tent()))
        assert built.hyperparameters()["labelled.alignment.ca_epochs"] == 2

    def test_a_teacher_follows_merged_weights(self, small, tiny) -> None:
        settings = small(method="dosapp", merging="magmax", align=True)
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        for t in range(2):
            learner.learn(scenario.session(t))
        student = learner.student.backbone.weights()
        teacher = learner.answering_expert[1].weights()
        assert all(torch.equal(student[n], teacher[n]) for n in student)

    def test_stages_are_part_of_key_label_and_row(self, small) -> None:
        plain, aligned = small(method="spu"), small(method="spu", align=True)
        merged = small(method="spu", merging="magmax", options={"scaling_coef": 0.4})
        assert len({plan(s).key for s in (plain, aligned, merged)}) == 3
        assert run_label(aligned) == "SPU + alignment"
        assert run_label(merged) == "SPU (scaling_coef=0.4) + merging=magmax"
        rows = [comparable_settings(s.model_dump(mode="json")) for s in (aligned, merged)]
        assert [row["options"] for row in rows] == [{}, {"scaling_coef": 0.4}]

    def test_mistakes_are_sentences(self, small) -> None:
        with pytest.raises(InputError, match="merging is 'magmx': input should be 'magmax' or"):
            small(merging="magmx")
        with pytest.raises(InputError, match="try --method flyp --merging magmax"):
            build_method("magmax")
        with pytest.raises(InputError, match="unknown setting 'ca_epochs'"):
            build_method("spu", options={"ca_epochs": 2})
        assert CoFiMA().wt_alpha == 0.5
