"""Properties of the metrics for any accuracy matrix."""

import numpy as np
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

quick = settings(max_examples=60, deadline=None)
matrices = st.integers(2, 6).flatmap(
    lambda n: arrays(np.float64, (n, n), elements=st.floats(0, 100))
)


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
