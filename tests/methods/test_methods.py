"""Every method and every pair: shared checks, DoSAPP, the registry, and combinations."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.functional.masks import top_fraction
from dosapp.learner.learner import Learner
from dosapp.methods.base import Method
from dosapp.methods.dosapp import DoSAPP, TeacherEMA
from dosapp.methods.flyp import FLYP
from dosapp.methods.registry import METHODS, build_method
from dosapp.methods.self_training import SelfTraining
from dosapp.methods.spu import SPU
from dosapp.testing.method_checks import METHOD_CHECKS, check_save_and_load, train_learner
from support.pair_checks import check_only_candidates_change, check_pair

NAMED = [("spu", "self-training"), ("spu", "rmt"), ("sparcl", "rmt"), ("flyp", "dosapp")]
NAMED += [("zero-shot", "tda"), ("spu", "oga")]  # without gradients
ALONE = [(name, None) for name, kind in METHODS.items() if kind.phase != "unlabelled"]
PAIRS = [  # all of them; the fast suite runs those that the paper names, and two more
    pytest.param(
        (name, adapter),
        id=f"{name}+{adapter}",
        marks=[] if (name, adapter) in NAMED else pytest.mark.slow,
    )
    for name, _ in ALONE
    for adapter, kind in METHODS.items()
    if kind.phase in ("unlabelled", "both")
]
REQUIRED = {"zscl": {"ref_dataset": "signs"}}  # options without a usable default
SPARSE = [("spu", None), ("dosapp", None), ("spu", "self-training"), ("spu", "dosapp")]


def pair_id(pair) -> str:
    return "+".join(filter(None, pair))


@pytest.fixture
def pair_settings(small):
    """Small settings of a method or a pair, with its required options."""

    def make(pair, **changes: object):
        return small(method=pair[0], adapt=pair[1], options=REQUIRED.get(pair[0], {}), **changes)

    return make


@pytest.mark.parametrize("pair", ALONE, ids=pair_id)
class TestEveryMethod:
    @pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda check: check.__name__)
    def test_passes(self, pair, check, pair_settings, tiny, tmp_path) -> None:
        buffer_size = 6 if check is check_save_and_load else 0
        check(pair_settings(pair, buffer_size=buffer_size), tiny, tmp_path)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_every_pair_passes_all_checks(pair, pair_settings, tiny, tmp_path) -> None:
    check_pair(pair_settings(pair), tiny, tmp_path / "learner")


@pytest.mark.parametrize("pair", SPARSE, ids=pair_id)
def test_sparse_methods_leave_everything_else_bit_identical(pair, small, tiny) -> None:
    check_only_candidates_change(small(method=pair[0], adapt=pair[1]), tiny)


def test_released_spu_trains_biases_and_the_image_projection_without_a_mask(small, tiny) -> None:
    before = {n: w.detach().clone() for n, w in tiny.weights().items()}
    released = {"extra_weights": "biases and projection"}
    learner, _ = train_learner(small(method="spu", options=released), tiny, 1)
    after = learner.student.backbone.weights()
    changed = {n for n, w in after.items() if not torch.equal(w, before[n])}
    assert changed == set(tiny.first_mlp_weights()) | set(tiny.spu_extra_weights())
    assert len(tiny.spu_extra_weights()) == len(tiny.first_mlp_weights()) + 1
    projection = after["visual_projection.weight"]
    assert (projection != before["visual_projection.weight"]).float().mean() > 0.99


def test_zero_shot_never_changes_a_weight(small, tiny) -> None:
    before = {n: w.detach().clone() for n, w in tiny.weights().items()}
    learner, _ = train_learner(small(method="zero-shot"), tiny)
    after = learner.student.backbone.weights()
    assert all(torch.equal(after[n], w) for n, w in before.items())


def test_methods_of_other_packages_are_found_by_name(tmp_path) -> None:
    about = tmp_path / "careful-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: careful\nVersion: 1.0\n")
    entries = ["careful = careful:Careful", "spu = careful:Careful", "torn = nowhere:X"]
    (about / "entry_points.txt").write_text("\n".join(["[dosapp.methods]", *entries]))
    code = (
        "from dosapp.methods.flyp import FLYP\n\n\nclass Careful(FLYP):\n    summary = 'slowly'\n"
    )
    (tmp_path / "careful.py").write_text(code)
    process = subprocess.run(
        [sys.executable, "-m", "dosapp", "methods", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    listed = json.loads(process.stdout)
    assert listed["careful"]["idea"] == "slowly"
    assert listed["spu"]["idea"] == METHODS["spu"].summary  # the package's own are not replaced
    assert "method 'torn' is left out: No module named 'nowhere'" in process.stderr


class TestDoSAPP:
    def trained(self, small, tiny, sessions: int = 2, **changes: object):
        return train_learner(small(method="dosapp", **changes), tiny, sessions)

    def test_a_session_changes_ten_per_cent_of_each_candidate(self, small, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.first_mlp_weights().items()}
        settings = small(method="dosapp")
        learner = Learner(settings.learner(), tiny)
        learner.learn(build_scenario(settings, tiny.preprocess).session(0))
        for name, weight in tiny.first_mlp_weights().items():
            changed = int((weight != before[name]).sum())
            limit = int(0.1 * weight.numel())
            assert 0.9 * limit < changed <= limit

    def test_the_stream_trains_the_union_cut_back_to_ten_per_cent(self, small, tiny) -> None:
        learner, _ = self.trained(small, tiny)
        expected = top_fraction(learner.method.union_scores, 0.1)
        for name, mask in learner.student.selection.mask.items():
            assert torch.equal(mask, expected[name])
            assert int(mask.sum()) == int(0.1 * mask.numel())

    def test_or_the_current_mask(self, small, tiny) -> None:
        settings = small(method="dosapp", options={"stream_mask": "current"})
        learner = Learner(settings.learner(), tiny)
        scenario = build_scenario(settings, tiny.preprocess)
        selections = []
        select = learner.method.selection.select_parameters

        def record(student, batches):
            selections.append(select(student, batches))
            return selections[-1]

        object.__setattr__(learner.method.selection, "select_parameters", record)
        for t in range(2):
            learner.learn(scenario.session(t))
        for name, mask in learner.student.selection.mask.items():
            assert torch.equal(mask, selections[-1].mask[name])

    def test_the_teacher_answers_and_shares_all_but_the_candidates(self, small, tiny) -> None:
        learner, _ = self.trained(small, tiny)
        experts = learner.method.experts(learner.student)
        assert list(experts) == ["teacher", "student"]
        student, teacher = learner.student.backbone.weights(), experts["teacher"].weights()
        own = {n for n in student if student[n] is not teacher[n]}
        assert own == set(tiny.first_mlp_weights())

    def test_momentum_one_keeps_the_teacher_at_the_start(self, small, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        options = {"gamma": 1.0, "lam": 1.0, "delta": 1.0}
        learner, _ = self.trained(small, tiny, options=options)
        teacher = learner.method.shared_copies()["teacher"].weights()
        assert all(torch.equal(teacher[n], w) for n, w in before.items())

    def test_momentum_zero_copies_the_trainable_entries(self, small, tiny) -> None:
        options = {"gamma": 0.0, "lam": 0.0, "delta": 0.5}
        learner, _ = self.trained(small, tiny, sessions=1, options=options)
        teacher, student = (
            learner.method.shared_copies()["teacher"].weights(),
            learner.student.backbone.weights(),
        )
        for name, mask in learner.student.selection.mask.items():
            assert torch.equal(teacher[name][mask], student[name][mask])

    def test_an_update_per_session_leaves_the_teacher_further_behind(self, small, tiny) -> None:
        def distance(interval: str) -> float:
            settings = small(method="dosapp", options={"interval": interval})
            net = tiny.shared_copy(unshared=list(tiny.weights()))
            learner = Learner(settings.learner(), net)
            learner.learn(build_scenario(settings, net.preprocess).session(0))
            student, teacher = net.weights(), learner.method.teacher.weights()
            return sum(float((student[n] - teacher[n]).detach().square().sum()) for n in student)

        assert distance("session") > 2 * distance("step")

    def test_labels_come_from_seen_classes_only(self, small, tiny) -> None:
        learner, scenario = self.trained(small, tiny, sessions=1)
        result = learner.adapt(scenario.session(1).unlabelled.read(range(12)))
        assert result.labels.max() < len(learner.classes) == 3

    def test_all_weights_instead_of_candidates(self, small, tiny) -> None:
        learner, _ = self.trained(small, tiny, options={"candidates": "all"})
        assert learner.student.selection.mask is None
        assert set(learner.student.selection.names) == set(tiny.weights())

    def test_after_another_method_the_teacher_has_that_methods_weights(self, small, tiny) -> None:
        settings = small(method="flyp", adapt="dosapp")
        learner, _ = train_learner(settings, tiny)
        experts = learner.method.experts(learner.student)
        assert list(experts) == ["teacher", "student"]
        student, teacher = learner.student.backbone.weights(), experts["teacher"].weights()
        assert all(student[n] is not teacher[n] for n in student)

    def test_momenta_out_of_order_are_a_warning_and_equal_ones_are_not(self) -> None:
        with pytest.warns(UserWarning, match="not γ < λ < δ"):
            TeacherEMA(gamma=0.9, lam=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TeacherEMA(gamma=0.99, lam=0.99, delta=0.99)


class TestRegistry:
    def test_every_method_has_a_summary_and_a_reference(self) -> None:
        for kind in METHODS.values():
            assert kind.summary
            assert kind.reference
            assert kind() == kind()

    def test_combinations_are_values(self) -> None:
        pair = SPU().then(SelfTraining())
        assert repr(pair) == repr(build_method("spu", "self-training"))
        assert FLYP().then(DoSAPP()).adapts
        assert not FLYP().adapts

    def test_options_by_last_or_full_name(self) -> None:
        assert build_method("dosapp", options={"gamma": 0.5}).ema.gamma == 0.5
        assert build_method("dosapp", options={"selection.sparsity": 0.3}).selection.sparsity == 0.3
        pair = build_method("spu", "dosapp", {"sparsity": 0.3})
        assert pair.labelled.sparsity == pair.unlabelled.selection.sparsity == 0.3
        pair = build_method("lwf", "rmt", {"labelled.temperature": 3, "unlabelled.temperature": 2})
        assert (pair.labelled.temperature, pair.unlabelled.temperature) == (3, 2)

    def test_an_option_changes_no_other(self) -> None:
        default = build_method("dosapp").hyperparameters()
        changed = build_method("dosapp", options={"sparsity": 0.3}).hyperparameters()
        assert changed == default | {"selection.sparsity": 0.3}

    @pytest.mark.parametrize(
        ("method", "adapt", "options", "message"),
        [
            ("doapp", None, {}, "did you mean 'dosapp'"),
            ("spu", "flyp", {}, "cannot adapt without labels"),
            ("self-training", None, {}, "needs a labelled method before it"),
            ("dosapp", None, {"gama": 1}, "did you mean 'gamma'"),
            ("spu", None, {"sparsity": 0}, "sparsity is 0: input should be greater than 0"),
            ("spu", None, {"sparsity": 1.5}, "less than or equal to 1"),
            ("dosapp", None, {"pseudo_labels": "me"}, "pseudo_labels is 'me'"),
        ],
    )
    def test_mistakes_are_sentences(self, method, adapt, options, message) -> None:
        with pytest.raises(InputError, match=message):
            build_method(method, adapt, options)

    def test_no_label_can_reach_an_adapter(self) -> None:
        """The hook's signature has images only, and `UnlabelledImages` has no labels."""
        import inspect

        for kind in (Method, *METHODS.values()):
            assert list(inspect.signature(kind.stream_loss).parameters) == [
                "self",
                "student",
                "pixels",
            ]


class TestCombinations:
    """A labelled and an unlabelled method whose hooks depend on each other."""

    def test_prototypes_are_computed_after_the_alignment(self, small, tiny) -> None:
        learner, scenario = train_learner(small(method="slca", adapt="rmt"), tiny, 1)
        session = scenario.session(1)
        learner.learn(session)
        rows = (session.train.labels == 0).nonzero()[0]
        with torch.no_grad():
            mean = learner.student.backbone.encode_image(session.train.read(rows)).mean(dim=0)
        torch.testing.assert_close(learner.method.unlabelled.prototypes[3], mean)

    def test_a_teacher_restarts_from_the_average_of_weights(self, small, tiny) -> None:
        settings = small(method="zscl", adapt="dosapp", options={"ref_dataset": "signs"})
        learner = Learner(settings.learner(), tiny)
        learner.learn(build_scenario(settings, tiny.preprocess).session(0))
        student = learner.student.backbone.weights()
        teacher = learner.method.unlabelled.teacher.weights()
        assert all(torch.equal(student[n], teacher[n]) for n in student)

    def test_weights_without_a_mask_train_on_the_stream_too(self, small, tiny) -> None:
        learner, _ = train_learner(small(method="spu-released", adapt="dosapp"), tiny, 1)
        names = set(learner.student.selection.names)
        assert names == set(tiny.first_mlp_weights()) | set(tiny.spu_extra_weights())

    def test_in_an_extra_stage_a_teacher_is_fixed_where_the_student_is(self, small, tiny) -> None:
        settings = small(method="slca", adapt="dosapp", options={"delta": 1.0})
        learner, scenario = train_learner(settings, tiny, 1)
        teacher = learner.method.unlabelled.teacher.weights()
        frozen = next(iter(tiny.first_mlp_weights()))
        for step in learner.training_steps(scenario.session(1)):
            if step.number == 6:
                before = teacher[frozen].clone()
                projection = teacher["visual_projection.weight"].clone()
            if step.number == 9:
                assert torch.equal(teacher[frozen], before)
                assert not torch.equal(teacher["visual_projection.weight"], projection)

    def test_zero_shot_accuracy_is_without_what_a_method_adds(self, small, tmp_path) -> None:
        from dosapp.experiments.run import run

        plain, prompted = (
            run(small(method=name), tmp_path / name) for name in ("zero-shot", "dualprompt")
        )
        assert plain.metrics["zero_shot_accuracy"] == prompted.metrics["zero_shot_accuracy"]


def test_the_teacher_can_be_updated_once_per_epoch(small, tiny) -> None:
    settings = small(method="dosapp", options={"interval": "epoch", "gamma": 0.5})
    learner = Learner(settings.learner(), tiny)
    name = next(iter(tiny.first_mlp_weights()))
    teacher, student = learner.method.teacher, tiny.weights()[name]
    steps = learner.training_steps(build_scenario(settings, tiny.preprocess).session(0))
    start = student.detach().clone()
    for _ in range(3):
        next(steps)
    assert torch.equal(teacher.weights()[name], start)
    after_one = student.detach().clone()
    next(steps)
    torch.testing.assert_close(teacher.weights()[name], (start + after_one) / 2)
