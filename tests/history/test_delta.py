"""Tensors stored as what changed in them."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dosapp.functional.named_tensors import bits_differ
from dosapp.history.delta import apply_delta, compute_delta


@settings(max_examples=60, deadline=None)
@given(
    arrays(np.float32, (4, 9), elements=st.floats(-5, 5, width=32)),
    arrays(np.bool_, (4, 9)),
    arrays(np.float32, (4, 9), elements=st.floats(-5, 5, width=32)),
)
def test_a_delta_turns_old_into_new_bit_for_bit(old, changed, other) -> None:
    before = {"student/w": torch.from_numpy(old), "teacher/w": torch.from_numpy(old) + 1}
    new = torch.where(torch.from_numpy(changed), torch.from_numpy(other), before["student/w"])
    after = {
        "student/w": new,
        "teacher/w": before["teacher/w"] * 1,
        "mask/w": torch.from_numpy(changed),
        "method/w": new * torch.from_numpy(changed),
    }
    result = apply_delta(compute_delta(after, before), before)
    assert set(result) == set(after)
    assert not any(bits_differ(result[k], after[k]).any() for k in after)


def test_names_of_the_format() -> None:
    old = {f"{role}/w": torch.zeros(8, 9) for role in ("student", "teacher")}
    old |= {"student/same": torch.ones(3), "method/é": torch.ones(3), "method/x": torch.ones(2)}
    new = {
        key: tensor.clone() for key, tensor in old.items() if "/é" not in key and "/x" not in key
    }
    new["student/w"][0, 0], new["teacher/w"][7, 8] = 1.0, 2.0
    new |= {"mask/w": torch.ones(8, 9, dtype=torch.bool), "method/count": torch.tensor([3])}
    delta = compute_delta(new, old)
    assert set(delta) == {
        "bits/w", "values/student/w", "shape/student/w", "values/teacher/w", "shape/teacher/w",
        "packed/mask/w", "shape/mask/w", "dense/method/count", "gone/"}  # fmt: skip
    assert delta["values/student/w"].tolist() == [1, 0]
    assert delta["values/teacher/w"].tolist() == [0, 2]
    assert delta["shape/mask/w"].tolist() == [8, 9]
    assert bytes(delta["gone/"].tolist()).decode().split("\n") == ["method/x", "method/é"]
