"""The paper's mitigations, each on its own, and with adapters that know nothing of them."""

import math

import pytest
import torch
from torch import tensor

from dosapp.experiments.plan import build_scenario, enabled_mitigations, plan, run_label
from dosapp.experiments.run import run
from dosapp.functional.class_skew import class_skew
from dosapp.functional.masks import reactivate_entries
from dosapp.learner.learner import Learner
from dosapp.learner.mitigations import BatchCheck, Mitigations
from dosapp.methods.base import AdaptResult
from support import method_checks

ON = {
    "gate": {"confidence_gate": 0.9},
    "temper": {"entropy_lr_scaling": True},
    "skew": {"skew_aware_ema": True},
    "readmit": {"mask_reactivation": 0.5, "reactivation_interval": 1},
    "all": {
        "confidence_gate": 0.5,
        "entropy_lr_scaling": True,
        "skew_aware_ema": True,
        "mask_reactivation": 0.5,
        "reactivation_interval": 1,
    },
}


@pytest.fixture
def met(small, tiny):
    def make(sessions: int = 1, **changes: object):
        settings = small(**{"method": "dosapp", **changes})
        learner = Learner(settings.learner(), tiny.shared_copy(own=list(tiny.weights())))
        stream = build_scenario(settings, tiny.preprocess)
        for t in range(sessions):
            learner.learn(stream.session(t))
        return learner, stream.session(1).unlabelled.read(range(12))

    return make


class TestSkew:
    def test_is_zero_for_equal_counts_and_one_for_one_class(self) -> None:
        assert class_skew(tensor([5.0, 5.0, 5.0])) == pytest.approx(0, abs=1e-6)
        assert class_skew(tensor([9.0, 0.0, 0.0])) == pytest.approx(1)
        half = 1 - math.log(2) / math.log(4)
        assert class_skew(tensor([8.0, 8.0, 0.0, 0.0])) == pytest.approx(half)

    def test_does_not_take_few_answers_for_a_skew(self) -> None:
        counts = torch.zeros(100)
        counts[:4] = 1
        assert class_skew(counts) == pytest.approx(0, abs=1e-6)

    def test_moves_lambda_towards_delta(self, met) -> None:
        learner, pixels = met(skew_aware_ema=True)
        student, method = learner.student, learner.method
        name = next(iter(student.backbone.first_mlp_weights()))
        learner.adapt(pixels[:1].repeat(12, 1, 1, 1))  # one class, and the loss is not zero
        assert student.stream_skew == pytest.approx(1)
        before = method.teacher.weights()[name].clone()
        learner.adapt(pixels[:1].repeat(12, 1, 1, 1))
        now = student.backbone.weights()[name].detach()
        expected = 0.9999 * before + (1 - 0.9999) * now
        torch.testing.assert_close(method.teacher.weights()[name], expected)

    def test_is_forgotten_when_lessons_begin(self, met) -> None:
        learner, pixels = met(skew_aware_ema=True)
        learner.adapt(pixels[:1].repeat(12, 1, 1, 1))
        assert learner.student.stream_skew > 0
        stream = build_scenario(
            method_checks.RunSettings.parse({}), learner.student.backbone.preprocess
        )
        next(learner.training_steps(stream.session(0)))
        assert learner.student.stream_skew == 0


class TestGate:
    def test_learns_only_from_images_an_expert_is_sure_of(self, met) -> None:
        learner, pixels = met(confidence_gate=0.99)
        pixels[::2] = (
            pixels[::2] + torch.rand(pixels[::2].shape, generator=torch.Generator().manual_seed(0))
        ) / 2  # half are hard to see
        sure = torch.stack(
            [
                (net.logit_scale * learner.student.logits(pixels, net)).softmax(1).max(1).values
                for net in learner.method.experts(learner.student).values()
            ]
        ).max(0).values  # fmt: skip
        seen = []
        stream_loss = learner.method.stream_loss

        def remember(student, shown):
            seen.append(shown)
            return stream_loss(student, shown)

        object.__setattr__(learner.method, "stream_loss", remember)
        guess = learner.adapt(pixels)
        assert 0 < len(seen[0]) < len(pixels)
        assert torch.equal(seen[0], pixels[sure >= 0.99])
        assert len(guess.labels) == len(pixels)
        assert torch.equal(guess.shown, sure >= 0.99)

    def test_what_it_kept_back_is_in_no_count_of_labels(self, small, tmp_path, monkeypatch) -> None:
        def look(self, student, method, pixels) -> BatchCheck:
            return BatchCheck(torch.arange(len(pixels)) == 0, torch.full((len(pixels),), -1))

        monkeypatch.setattr(Mitigations, "look", look)  # one of each batch is learned from
        found = run(small(stream_batch_size=4, confidence_gate=0.5), tmp_path / "x")
        assert min(found.pseudo_labels) > 50  # or at most a quarter would be right

    def test_takes_no_step_when_nobody_is_sure(self, met) -> None:
        learner, pixels = met(confidence_gate=0.999999)
        before = learner.digest()
        noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0))
        guess = learner.adapt(noise)
        assert guess.loss is None
        assert len(guess.labels) == len(pixels)
        assert learner.digest() == before


class TestTemper:
    def test_the_rate_is_one_minus_the_share_of_the_largest_entropy(self, met) -> None:
        learner, pixels = met(entropy_lr_scaling=True, method="spu", adapt="self-training")
        logits = learner.student.backbone.logit_scale * learner.student.logits(pixels)
        p = logits.detach().softmax(1)
        by_hand = 1 - float(-(p * p.log()).sum(1).mean()) / math.log(3)
        view = learner.mitigations.check_batch(learner.student, learner.method, pixels)
        assert view.rate == pytest.approx(by_hand, rel=1e-4)
        assert 0 < view.rate < 1

    def test_a_lower_rate_moves_less(self, met) -> None:
        def way(**changes: object) -> float:
            learner, pixels = met(method="spu", adapt="self-training", **changes)
            now = learner.student.backbone.first_mlp_weights()
            start = {n: w.detach().clone() for n, w in now.items()}
            learner.adapt(pixels)
            return sum(float((w.detach() - start[n]).abs().sum()) for n, w in now.items())

        full = way()
        assert way(stream_lr=5e-4) == pytest.approx(full / 2, rel=1e-2)
        assert way(entropy_lr_scaling=True) < full


class TestReadmission:
    mask = {"w": tensor([True] * 4 + [False] * 8)}
    scores = {"w": tensor([9.0, 8, 7, 6, 5, 4, 3, 2, 1.5, 1.2, 0, 0])}
    owner = {"w": tensor([3, 3, 3, 3, 1, 1, 1, 2, 2, 2, 0, 0]).short()}

    def admitted(self, turn: int, share: float = 0.5) -> list[int]:
        found = reactivate_entries(self.mask, self.scores, self.owner, share, turn)["w"]
        return found.nonzero().squeeze(1).tolist()

    def test_each_past_session_gets_an_equal_part_by_its_scores(self) -> None:
        assert self.admitted(0) == [0, 1, 4, 7]  # the two lowest of its own rest

    def test_and_the_next_turn_goes_on_where_this_one_stopped(self) -> None:
        assert self.admitted(1) == [0, 1, 5, 8]
        assert self.admitted(2) == [0, 1, 6, 9]
        assert self.admitted(3) == self.admitted(0)

    def test_the_mask_keeps_its_size_and_entries_nobody_chose_stay_out(self) -> None:
        for turn in range(5):
            found = self.admitted(turn, 0.9)
            assert len(found) == 4
            assert max(found) < 10

    def test_no_share_no_change(self) -> None:
        assert self.admitted(0, 0.0) == [0, 1, 2, 3]

    @pytest.mark.parametrize("pair", [("dosapp", None), ("spu", "self-training")])
    def test_works_in_the_stream_of_any_masked_learner(self, pair, met) -> None:
        learner, pixels = met(
            2, method=pair[0], adapt=pair[1], mask_reactivation=0.5, reactivation_interval=2
        )
        own = learner.mitigations.base
        turns = [learner.student.selection.mask]
        for _ in range(2):
            learner.adapt(pixels)
            turns.append(learner.student.selection.mask)
        assert turns[0] is turns[1]  # a turn is two steps
        for lent in (turns[0], turns[2]):
            assert any(not torch.equal(lent[n], m) for n, m in own.items())
            assert all(int(lent[n].sum()) == int(m.sum()) for n, m in own.items())
        assert any(not torch.equal(turns[0][n], turns[2][n]) for n in own)

    def test_says_so_when_there_is_no_mask_to_lend_from(self, met) -> None:
        with pytest.warns(UserWarning, match="readmit has no effect"):
            met(method="flyp", adapt="tent", mask_reactivation=0.5)


@pytest.mark.parametrize("on", ON.values(), ids=ON)
@pytest.mark.parametrize("pair", [("dosapp", None), ("spu", "rmt"), ("flyp", "tent")])
def test_each_goes_with_each_kind_of_adapter(on, pair, small, tiny, tmp_path) -> None:
    if pair[0] == "flyp":
        on = {**on, "mask_reactivation": 0.0}  # it has no mask to lend from, and says so
    settings = small(method=pair[0], adapt=pair[1], **on)
    method_checks.load_of_save_answers_and_learns_the_same(settings, tiny, tmp_path / "x")


def test_off_is_exactly_nothing(small) -> None:
    settings = small(method="dosapp")
    assert enabled_mitigations(settings) == {}
    assert Mitigations().tensors() == {}
    guess = AdaptResult(tensor([1]))
    assert BatchCheck(tensor([True])).completed(guess) is guess


def test_on_is_another_result_with_another_name(small) -> None:
    off, on = (
        plan(small(method="dosapp")),
        plan(small(method="dosapp", confidence_gate=0.9, entropy_lr_scaling=True)),
    )
    assert off.key != on.key
    assert run_label(on.settings) == "DoSAPP + confidence_gate=0.9 + temper"


def test_a_stream_of_one_class_is_as_long_as_before(small, tiny) -> None:
    settings = small(one_class=True)
    stream, usual = (
        build_scenario(settings, tiny.preprocess),
        build_scenario(small(), tiny.preprocess),
    )
    for t in range(2):
        assert len(set(stream.stream_labels(t))) == 1
        assert len(stream.stream_labels(t)) == len(usual.stream_labels(t))
    assert stream.hash != usual.hash
