"""The paper's mitigations, each alone and with adapters that do not know of them."""

import math

import pytest
import torch
from torch import tensor

from dosapp.experiments.identity import run_label
from dosapp.experiments.plan import build_scenario, plan
from dosapp.experiments.run import run
from dosapp.learner.learner import Learner
from dosapp.learner.mitigations import BatchCheck, Mitigations
from dosapp.methods.base import AdaptResult
from dosapp.testing.method_checks import check_save_and_load

ENABLED = {
    "gate": {"confidence_gate": 0.9},
    "entropy lr": {"entropy_lr_scaling": True},
    "skew": {"skew_aware_ema": True},
    "reactivation": {"mask_reactivation": 0.5, "reactivation_interval": 1},
    "all": {
        "confidence_gate": 0.5,
        "entropy_lr_scaling": True,
        "skew_aware_ema": True,
        "mask_reactivation": 0.5,
        "reactivation_interval": 1,
    },
}


@pytest.fixture
def train(small, tiny):
    """Train a learner on some sessions; return it and a batch of the stream."""

    def make(sessions: int = 1, **changes: object):
        settings = small(**{"method": "dosapp", **changes})
        learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        scenario = build_scenario(settings, tiny.preprocess)
        for t in range(sessions):
            learner.learn(scenario.session(t))
        return learner, scenario.session(1).unlabelled.read(range(12))

    return make


class TestSkewAwareEMA:
    def test_changes_lambda_towards_delta(self, train) -> None:
        learner, pixels = train(skew_aware_ema=True)
        student, method = learner.student, learner.method
        name = next(iter(student.backbone.first_mlp_weights()))
        learner.adapt(pixels[:1].repeat(12, 1, 1, 1))  # one class, and the loss is not zero
        assert student.stream_skew == pytest.approx(1)
        before = method.teacher.weights()[name].clone()
        learner.adapt(pixels[:1].repeat(12, 1, 1, 1))
        weight = student.backbone.weights()[name].detach()
        expected = 0.9999 * before + (1 - 0.9999) * weight
        torch.testing.assert_close(method.teacher.weights()[name], expected)

    def test_is_reset_when_a_session_begins(self, train, small) -> None:
        learner, pixels = train(skew_aware_ema=True)
        learner.adapt(pixels[:1].repeat(12, 1, 1, 1))
        assert learner.student.stream_skew > 0
        scenario = build_scenario(small(), learner.preprocess)
        next(learner.training_steps(scenario.session(0)))
        assert learner.student.stream_skew == 0


class TestConfidenceGate:
    def test_learns_only_from_images_of_which_an_expert_is_sure(self, train) -> None:
        learner, pixels = train(confidence_gate=0.99)
        noise = torch.rand(pixels[::2].shape, generator=torch.Generator().manual_seed(0))
        pixels[::2] = (pixels[::2] + noise) / 2  # half are hard to recognise
        student = learner.student
        confidence = torch.stack(
            [
                (e.logit_scale * student.score_images(pixels, e)).softmax(1).max(1).values
                for e in learner.method.experts(student).values()
            ]
        ).max(0).values  # fmt: skip
        batches, stream_loss = [], learner.method.stream_loss

        def record(student, batch):
            batches.append(batch)
            return stream_loss(student, batch)

        object.__setattr__(learner.method, "stream_loss", record)
        result = learner.adapt(pixels)
        assert 0 < len(batches[0]) < len(pixels)
        assert torch.equal(batches[0], pixels[confidence >= 0.99])
        assert len(result.labels) == len(pixels)
        assert torch.equal(result.trusted, confidence >= 0.99)
        assert result.gated == len(pixels) - len(batches[0])

    def test_gated_images_are_not_counted_as_pseudo_labels(
        self, small, tmp_path, monkeypatch
    ) -> None:
        def trust_one(self, student, method, pixels) -> BatchCheck:
            return BatchCheck(torch.arange(len(pixels)) == 0, torch.full((len(pixels),), -1))

        monkeypatch.setattr(Mitigations, "check_batch", trust_one)  # of each batch
        result = run(small(stream_batch_size=4, confidence_gate=0.5), tmp_path / "x")
        assert min(result.pseudo_labels) > 50  # with the others at most a quarter would be right

    def test_takes_no_step_when_no_expert_is_sure(self, train) -> None:
        learner, pixels = train(confidence_gate=0.999999)
        before = learner.digest()
        noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0))
        result = learner.adapt(noise)
        assert result.loss is None
        assert not result.stepped
        assert len(result.labels) == result.gated == len(pixels)
        assert learner.digest() == before


class TestEntropyScaling:
    def test_the_factor_is_one_minus_the_share_of_the_maximal_entropy(self, train) -> None:
        learner, pixels = train(entropy_lr_scaling=True, method="spu", adapt="self-training")
        logits = learner.student.backbone.logit_scale * learner.student.score_images(pixels)
        p = logits.detach().softmax(1)
        by_hand = 1 - float(-(p * p.log()).sum(1).mean()) / math.log(3)
        check = learner.mitigations.check_batch(learner.student, learner.method, pixels)
        assert check.lr_scale == pytest.approx(by_hand, rel=1e-4)
        assert 0 < check.lr_scale < 1

    def test_a_lower_rate_changes_weights_less(self, train) -> None:
        def distance(**changes: object) -> float:
            learner, pixels = train(method="spu", adapt="self-training", **changes)
            weights = learner.student.backbone.first_mlp_weights()
            before = {n: w.detach().clone() for n, w in weights.items()}
            learner.adapt(pixels)
            return sum(float((w.detach() - before[n]).abs().sum()) for n, w in weights.items())

        full = distance()
        assert distance(stream_lr=5e-4) == pytest.approx(full / 2, rel=1e-2)
        assert distance(entropy_lr_scaling=True) < full


class TestMaskReactivation:
    @pytest.mark.parametrize("pair", [("dosapp", None), ("spu", "self-training")])
    def test_works_on_the_stream_of_any_masked_method(self, pair, train) -> None:
        learner, pixels = train(
            2, method=pair[0], adapt=pair[1], mask_reactivation=0.5, reactivation_interval=2
        )
        own = learner.mitigations.stream_mask
        masks = [learner.student.selection.mask]
        for _ in range(2):
            learner.adapt(pixels)
            masks.append(learner.student.selection.mask)
        assert own
        assert masks[0] is masks[1]  # a turn is two steps
        for mask in (masks[0], masks[2]):
            assert any(not torch.equal(mask[n], m) for n, m in own.items())
            assert all(int(mask[n].sum()) == int(m.sum()) for n, m in own.items())
        assert any(not torch.equal(masks[0][n], masks[2][n]) for n in own)

    def test_warns_when_the_method_has_no_mask(self, train) -> None:
        with pytest.warns(UserWarning, match="mask_reactivation has no effect"):
            train(method="flyp", adapt="tent", mask_reactivation=0.5)


@pytest.mark.parametrize("enabled", ENABLED.values(), ids=ENABLED)
@pytest.mark.parametrize("pair", [("dosapp", None), ("spu", "rmt"), ("flyp", "tent")])
def test_each_works_with_each_kind_of_adapter(enabled, pair, small, tiny, tmp_path) -> None:
    if pair[0] == "flyp":
        enabled = {**enabled, "mask_reactivation": 0.0}  # it has no mask, and warns
    settings = small(method=pair[0], adapt=pair[1], **enabled)
    check_save_and_load(settings, tiny, tmp_path)


def test_disabled_they_leave_no_trace(small) -> None:
    names = {"gate", "temper", "skew_aware", "readmit", "readmit_every", "stream_lr", "rivals"}
    assert not names & set(plan(small(method="dosapp")).identity)
    assert Mitigations().state_dict() == {}
    result, pixels = AdaptResult(tensor([1])), torch.zeros(1)
    assert BatchCheck().add_skipped_labels(result) is result
    assert BatchCheck().select_trusted(pixels) is pixels


def test_enabled_they_give_another_key_and_label(small) -> None:
    disabled = plan(small(method="dosapp"))
    enabled = plan(small(method="dosapp", confidence_gate=0.9, entropy_lr_scaling=True))
    assert disabled.key != enabled.key
    assert run_label(enabled.settings) == "DoSAPP + gate=0.9 + entropy lr"
