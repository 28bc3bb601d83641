"""Every method and every pair against the shared checks, and what each one promises."""

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
from dosapp.methods.dosapp import DoSAPP, Smoothing
from dosapp.methods.flyp import FLYP
from dosapp.methods.registry import METHODS, build_method
from dosapp.methods.self_training import SelfTraining
from dosapp.methods.spu import SPU
from support import method_checks

NAMED = [("spu", "self-training"), ("spu", "rmt"), ("sparcl", "rmt"), ("flyp", "dosapp")]
ALONE = [(name, None) for name, kind in METHODS.items() if kind.phase != "unlabelled"]
PAIRS = [  # all of them; the fast suite takes those the paper names
    pytest.param(
        (name, adapter),
        id=f"{name}+{adapter}",
        marks=[] if (name, adapter) in NAMED else pytest.mark.slow,
    )
    for name, _ in ALONE
    for adapter, kind in METHODS.items()
    if kind.phase in ("unlabelled", "both")
]
NEEDS = {"zscl": {"references": "signs"}}  # what a method cannot do without
SPARSE = [("spu", None), ("dosapp", None), ("spu", "self-training"), ("spu", "dosapp")]


def named(pair) -> str:
    return "+".join(filter(None, pair))


@pytest.fixture
def paired(small):
    """Small settings of a method or a pair, with what it needs."""

    def make(pair, **changes: object):
        return small(method=pair[0], adapt=pair[1], options=NEEDS.get(pair[0], {}), **changes)

    return make


@pytest.mark.parametrize("pair", ALONE, ids=named)
class TestEveryMethod:
    def test_inputs_are_not_modified(self, pair, paired, tiny) -> None:
        method_checks.inputs_are_not_modified(paired(pair), tiny)

    def test_predicting_changes_nothing(self, pair, paired, tiny) -> None:
        method_checks.predicting_changes_nothing(paired(pair), tiny)

    def test_load_of_save(self, pair, paired, tiny, tmp_path) -> None:
        method_checks.load_of_save_answers_and_learns_the_same(
            paired(pair, buffer_size=6), tiny, tmp_path / "learner"
        )

    def test_an_empty_stream_changes_nothing(self, pair, paired, tiny) -> None:
        method_checks.an_empty_stream_changes_nothing(paired(pair), tiny)

    def test_odd_batches(self, pair, paired, tiny) -> None:
        method_checks.odd_batches_work(paired(pair), tiny)

    def test_same_seed_same_matrix(self, pair, paired, tmp_path) -> None:
        method_checks.same_seed_same_matrix(paired(pair), tmp_path)


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_everything_holds_for_every_pair(pair, paired, tiny, tmp_path) -> None:
    method_checks.everything_holds(paired(pair), tiny, tmp_path / "learner")


@pytest.mark.parametrize("pair", SPARSE, ids=named)
def test_sparse_methods_leave_everything_else_bit_identical(pair, small, tiny) -> None:
    method_checks.weights_outside_the_candidates_stay(small(method=pair[0], adapt=pair[1]), tiny)


def test_spu_as_released_trains_biases_and_the_image_projection_whole(small, tiny) -> None:
    before = {n: w.detach().clone() for n, w in tiny.weights().items()}
    released = {"beside": "biases and projection"}
    learner, _ = method_checks.lived(small(method="spu", options=released), tiny, 1)
    moved = {
        n for n, w in learner.student.backbone.weights().items() if not torch.equal(w, before[n])
    }
    assert moved == set(tiny.first_mlp_weights()) | set(tiny.spu_extra_weights())
    assert len(tiny.spu_extra_weights()) == len(tiny.first_mlp_weights()) + 1
    projection = learner.student.backbone.weights()["visual_projection.weight"]
    assert (projection != before["visual_projection.weight"]).float().mean() > 0.99


def test_zero_shot_never_moves(small, tiny) -> None:
    before = {n: w.detach().clone() for n, w in tiny.weights().items()}
    learner, _ = method_checks.lived(small(method="zero-shot"), tiny)
    after = learner.student.backbone.weights()
    assert all(torch.equal(after[n], w) for n, w in before.items())


def test_methods_of_other_packages_are_found_by_name(tmp_path) -> None:
    about = tmp_path / "enabled_mitigations-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: enabled_mitigations\nVersion: 1.0\n"
    )
    entries = [
        "enabled_mitigations = enabled_mitigations:Careful",
        "spu = enabled_mitigations:Careful",
        "torn = nowhere:X",
    ]
    (about / "entry_points.txt").write_text("\n".join(["[dosapp.methods]", *entries]))
    code = (
        "from dosapp.methods.flyp import FLYP\n\n\nclass Careful(FLYP):\n    summary = 'slowly'\n"
    )
    (tmp_path / "enabled_mitigations.py").write_text(code)
    said = subprocess.run(
        [sys.executable, "-m", "dosapp", "methods", "--json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(said.stdout)
    assert found["enabled_mitigations"]["idea"] == "slowly"
    assert found["spu"]["idea"] == METHODS["spu"].idea  # ours keep their names
    assert "method 'torn' is left out: No module named 'nowhere'" in said.stderr


class TestDoSAPP:
    def lived(self, small, tiny, sessions: int = 2, **changes: object):
        return method_checks.lived(small(method="dosapp", **changes), tiny, sessions)

    def test_moves_exactly_ten_per_cent_of_each_candidate_in_a_session(self, small, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.first_mlp_weights().items()}
        settings = small(method="dosapp")
        learner = Learner(settings.learner(), tiny)
        learner.learn(build_scenario(settings, tiny.preprocess).session(0))
        for name, weight in tiny.first_mlp_weights().items():
            moved = int((weight != before[name]).sum())
            limit = int(0.1 * weight.numel())
            assert 0.9 * limit < moved <= limit

    def test_the_stream_moves_the_union_cut_back_to_ten_per_cent(self, small, tiny) -> None:
        learner, _ = self.lived(small, tiny)
        method = learner.method
        expected = top_fraction(method.best, 0.1)
        for name, mask in learner.student.selection.mask.items():
            assert torch.equal(mask, expected[name])
            assert int(mask.sum()) == int(0.1 * mask.numel())

    def test_or_the_current_mask_if_asked(self, small, tiny) -> None:
        settings = small(method="dosapp", options={"stream_mask": "current"})
        learner = Learner(settings.learner(), tiny)
        stream = build_scenario(settings, tiny.preprocess)
        seen = []
        choose = learner.method.learner.choose

        def remember(student, lessons):
            seen.append(choose(student, lessons))
            return seen[-1]

        object.__setattr__(learner.method.learner, "choose", remember)
        for t in range(2):
            learner.learn(stream.session(t))
        for name, mask in learner.student.selection.mask.items():
            assert torch.equal(mask, seen[-1].mask[name])

    def test_the_teacher_is_the_answer_and_shares_the_rest(self, small, tiny) -> None:
        learner, _ = self.lived(small, tiny)
        experts = learner.method.experts(learner.student)
        assert list(experts) == ["teacher", "student"]
        mine, theirs = learner.student.backbone.weights(), experts["teacher"].weights()
        assert {n for n in mine if mine[n] is not theirs[n]} == set(tiny.first_mlp_weights())

    def test_momentum_one_keeps_the_teacher_at_the_start(self, small, tiny) -> None:
        before = {n: w.detach().clone() for n, w in tiny.weights().items()}
        options = {"gamma": 1.0, "lam": 1.0, "delta": 1.0}
        learner, _ = self.lived(small, tiny, options=options)
        teacher = learner.method.shared_copies()["teacher"].weights()
        assert all(torch.equal(teacher[n], w) for n, w in before.items())

    def test_momentum_zero_makes_it_the_student_where_that_moves(self, small, tiny) -> None:
        options = {"gamma": 0.0, "lam": 0.0, "delta": 0.5}
        learner, _ = self.lived(small, tiny, sessions=1, options=options)
        teacher, student = (
            learner.method.shared_copies()["teacher"].weights(),
            learner.student.backbone.weights(),
        )
        for name, mask in learner.student.selection.mask.items():
            assert torch.equal(teacher[name][mask], student[name][mask])

    def test_smoothing_per_session_is_rarer_than_per_step(self, small, tiny) -> None:
        def distance(interval: str) -> float:
            settings = small(method="dosapp", options={"interval": interval})
            net = tiny.shared_copy(own=list(tiny.weights()))
            learner = Learner(settings.learner(), net)
            learner.learn(build_scenario(settings, net.preprocess).session(0))
            mine, theirs = net.weights(), learner.method.shared_copies()["teacher"].weights()
            return sum(float((mine[n] - theirs[n]).detach().square().sum()) for n in mine)

        assert distance("session") > 2 * distance("step")

    def test_labels_come_from_seen_classes_only(self, small, tiny) -> None:
        learner, stream = self.lived(small, tiny, sessions=1)
        guess = learner.adapt(stream.session(1).unlabelled.read(range(12)))
        assert guess.labels.max() < len(learner.classes) == 3

    def test_all_weights_instead_of_candidates(self, small, tiny) -> None:
        learner, _ = self.lived(small, tiny, options={"weights": "all"})
        assert learner.student.selection.mask is None
        assert set(learner.student.selection.names) == set(tiny.weights())

    def test_follows_another_learner_with_that_learners_weights(self, small, tiny) -> None:
        settings = small(method="flyp", adapt="dosapp")
        learner, _ = method_checks.lived(settings, tiny)
        experts = learner.method.experts(learner.student)
        assert list(experts) == ["teacher", "student"]
        mine, theirs = learner.student.backbone.weights(), experts["teacher"].weights()
        assert all(mine[n] is not theirs[n] for n in mine)

    def test_momenta_out_of_order_are_a_warning_and_equal_ones_are_not(self) -> None:
        with pytest.warns(UserWarning, match="not γ < λ < δ"):
            Smoothing(gamma=0.9, lam=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Smoothing(gamma=0.99, lam=0.99, delta=0.99)


class TestRegistry:
    def test_every_method_says_what_it_is(self) -> None:
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
        assert (
            build_method("dosapp", options={"gamma": 0.5}).hyperparameters()["smoothing.gamma"]
            == 0.5
        )
        assert (
            build_method("dosapp", options={"learner.sparsity": 0.3}).hyperparameters()[
                "learner.sparsity"
            ]
            == 0.3
        )
        pair = build_method("spu", "dosapp", {"sparsity": 0.3})
        assert pair.labelled.sparsity == pair.unlabelled.learner.sparsity == 0.3
        pair = build_method("l2p", "eata", {"labelled.pull": 0.3, "unlabelled.pull": 2})
        assert (pair.labelled.pull, pair.unlabelled.pull) == (0.3, 2)

    def test_one_option_leaves_the_others_alone(self) -> None:
        default = build_method("dosapp").hyperparameters()
        assert default["learner.beside"] == "nothing"
        assert build_method("dosapp", options={"sparsity": 0.3}).hyperparameters() == default | {
            "learner.sparsity": 0.3
        }

    @pytest.mark.parametrize(
        ("method", "adapt", "options", "says"),
        [
            ("doapp", None, {}, "did you mean 'dosapp'"),
            ("spu", "flyp", {}, "cannot adapt without labels"),
            ("self-training", None, {}, "needs a learner before it"),
            ("dosapp", None, {"gama": 1}, "did you mean 'gamma'"),
            ("spu", None, {"sparsity": 0}, "sparsity is 0: input should be greater than 0"),
            ("spu", None, {"sparsity": 1.5}, "less than or equal to 1"),
            ("dosapp", None, {"labels": "me"}, "labels is 'me'"),
        ],
    )
    def test_mistakes_are_sentences(self, method, adapt, options, says) -> None:
        with pytest.raises(InputError, match=says):
            build_method(method, adapt, options)

    def test_no_label_can_reach_an_adapter(self) -> None:
        """The hook's signature has images only; `UnlabelledImages` has no labels to give."""
        import inspect

        for kind in (Method, *METHODS.values()):
            assert list(inspect.signature(kind.stream_loss).parameters) == [
                "self",
                "student",
                "pixels",
            ]


class TestTogether:
    """What must hold when one method's hooks meet another's."""

    def test_prototypes_are_taken_after_the_alignment(self, small, tiny) -> None:
        learner, stream = method_checks.lived(small(method="slca", adapt="rmt"), tiny, 1)
        session = stream.session(1)
        learner.learn(session)
        rows = (session.train.labels == 0).nonzero()[0]
        with torch.no_grad():
            mean = learner.student.backbone.encode_image(session.train.read(rows)).mean(dim=0)
        torch.testing.assert_close(learner.method.unlabelled.prototypes[3], mean)

    def test_a_teacher_begins_again_from_the_average_of_weights(self, small, tiny) -> None:
        settings = small(method="zscl", adapt="dosapp", options={"references": "signs"})
        learner = Learner(settings.learner(), tiny)
        learner.learn(build_scenario(settings, tiny.preprocess).session(0))
        mine = learner.student.backbone.weights()
        theirs = learner.method.unlabelled.teacher.weights()
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)

    def test_what_was_chosen_beside_the_mask_moves_on_the_stream_too(self, small, tiny) -> None:
        learner, _ = method_checks.lived(small(method="spu-released", adapt="dosapp"), tiny, 1)
        names = set(learner.student.selection.names)
        assert names == set(tiny.first_mlp_weights()) | set(tiny.spu_extra_weights())

    def test_in_a_review_a_teacher_rests_where_the_student_does(self, small, tiny) -> None:
        settings = small(method="slca", adapt="dosapp", options={"delta": 1.0})
        learner, stream = method_checks.lived(settings, tiny, 1)
        teacher = learner.method.unlabelled.teacher.weights()
        resting = next(iter(tiny.first_mlp_weights()))
        for lesson in learner.training_steps(stream.session(1)):
            if lesson.number == 6:
                before = teacher[resting].clone()
                moving = teacher["visual_projection.weight"].clone()
            if lesson.number == 9:
                assert torch.equal(teacher[resting], before)
                assert not torch.equal(teacher["visual_projection.weight"], moving)

    def test_zero_shot_is_the_untouched_model_whatever_a_method_adds(self, small, tmp_path) -> None:
        from dosapp.experiments.run import run

        plain, prompted = (
            run(small(method=name), tmp_path / name) for name in ("zero-shot", "dualprompt")
        )
        for metric in ("zero_shot_accuracy",):
            assert plain.metrics[metric] == prompted.metrics[metric]


def test_teachers_smooth_by_epoch_if_asked(small, tiny) -> None:
    settings = small(method="dosapp", options={"interval": "epoch", "gamma": 0.5})
    learner = Learner(settings.learner(), tiny)
    name = next(iter(tiny.first_mlp_weights()))
    teacher, student = learner.method.teacher, tiny.weights()[name]
    lessons = learner.lessons(build_scenario(settings, tiny.preprocess).session(0))
    start = student.detach().clone()
    for _ in range(3):
        next(lessons)
    assert torch.equal(teacher.weights()[name], start)
    after_one = student.detach().clone()
    next(lessons)
    torch.testing.assert_close(teacher.weights()[name], (start + after_one) / 2)
