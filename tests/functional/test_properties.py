"""What must hold for any numbers."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dosapp.experiments.metrics import (
    MATRIX_METRICS,
    backward_transfer,
    forgetting,
    forgetting_avalanche,
    forgetting_pycil,
    forgetting_spu,
)
from dosapp.functional.ema import ema_update, momentum_tensor
from dosapp.functional.masks import top_count, top_fraction
from dosapp.functional.named_tensors import bits_differ
from dosapp.functional.pseudo_labels import max_logit_labels
from dosapp.history.delta import apply_delta, compute_delta

unit = st.floats(0, 1, width=32)
matrices = st.integers(2, 6).flatmap(
    lambda n: arrays(np.float64, (n, n), elements=st.floats(0, 100))
)
quick = settings(max_examples=60, deadline=None)


@quick
@given(arrays(np.float32, (7, 9), elements=st.floats(0.125, 1, width=32)), st.floats(0.01, 1))
def test_top_fraction_is_exact_and_takes_nothing_smaller(values, fraction) -> None:
    score = torch.from_numpy(values)
    mask = top_fraction({"w": score}, fraction)["w"]
    assert int(mask.sum()) == top_count(fraction, 63)
    if not mask.all():
        assert score[mask].min() >= score[~mask].max()


@quick
@given(unit, unit, arrays(np.bool_, 8))
def test_p_and_q_sum_to_one(gamma, delta, bits) -> None:
    mask = torch.from_numpy(bits)
    p = momentum_tensor(mask, active=gamma, frozen=delta)
    q = (delta - gamma) * mask.float() + 1 - delta
    torch.testing.assert_close(p + q, torch.ones(8))


@quick
@given(arrays(np.float32, 6, elements=st.floats(-9, 9, width=32)), unit, arrays(np.bool_, 6))
def test_a_teacher_that_equals_the_student_stays_bit_identical(values, active, bits) -> None:
    weight = torch.from_numpy(values)
    teacher = {"w": weight.clone()}
    ema_update(teacher, {"w": weight}, {"w": torch.from_numpy(bits)}, active=active, frozen=0.9999)
    assert torch.equal(teacher["w"], weight)


@quick
@given(arrays(np.float32, (5, 4), elements=unit), arrays(np.float32, (5, 4), elements=unit))
def test_a_pseudo_label_is_some_experts_label(t, s) -> None:
    teacher, student = torch.from_numpy(t), torch.from_numpy(s)
    labels = max_logit_labels(teacher, student)
    assert ((labels == teacher.argmax(1)) | (labels == student.argmax(1))).all()


@quick
@given(matrices)
def test_forgetting_definitions_relate(R) -> None:
    last = len(R) - 1
    assert forgetting_pycil(R) >= max(forgetting(R), 0) - 1e-9
    assert forgetting(R) >= forgetting_avalanche(R) - 1e-9
    assert abs(forgetting_avalanche(R) + backward_transfer(R)) < 1e-9
    low = np.tril(R)
    by_hand = sum(low[:-1, j].max() - R[-1, j] for j in range(last)) - R[-1, -1]
    assert abs(forgetting_spu(R) - by_hand / len(R)) < 1e-9


@quick
@given(st.integers(2, 6), st.floats(1, 100))
def test_a_constant_learner_forgets_nothing(size, level) -> None:
    R = np.full((size, size), level)
    assert forgetting(R) == 0
    assert abs(forgetting_spu(R) + level / size) < 1e-9
    assert all(np.isfinite(formula(R)) for formula in MATRIX_METRICS.values())


@quick
@given(
    arrays(np.float32, (4, 9), elements=st.floats(-5, 5, width=32)),
    arrays(np.bool_, (4, 9)),
    arrays(np.float32, (4, 9), elements=st.floats(-5, 5, width=32)),
)
def test_changes_turn_old_into_new_bit_for_bit(old, where, other) -> None:
    before = {"student/w": torch.from_numpy(old), "teacher/w": torch.from_numpy(old) + 1}
    new = torch.where(torch.from_numpy(where), torch.from_numpy(other), before["student/w"])
    after = {
        "student/w": new,
        "teacher/w": before["teacher/w"] * 1,
        "mask/w": torch.from_numpy(where),
        "method/w": new * torch.from_numpy(where),
    }
    again = apply_delta(compute_delta(after, before), before)
    assert set(again) == set(after)
    assert not any(bits_differ(again[k], after[k]).any() for k in after)
