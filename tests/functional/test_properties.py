"""Properties of the paper's formulas for any values."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dosapp.functional.ema import ema_update, momentum_tensor
from dosapp.functional.masks import top_count, top_fraction
from dosapp.functional.pseudo_labels import max_logit_labels

unit = st.floats(0, 1, width=32)
quick = settings(max_examples=60, deadline=None)


@quick
@given(arrays(np.float32, (7, 9), elements=st.floats(0.125, 1, width=32)), st.floats(0.01, 1))
def test_top_fraction_is_exact_and_selects_the_largest(values, fraction) -> None:
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
