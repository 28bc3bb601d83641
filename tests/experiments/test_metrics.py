"""Metrics on matrices that can be checked by hand."""

import numpy as np
import pytest

from dosapp.experiments.metrics import (
    DEFINITIONS,
    MATRIX_METRICS,
    accuracy,
    average_incremental_accuracy,
    current_task_accuracy,
    expected_calibration_error,
    first_task_accuracy,
    forgetting,
    forgetting_matrix,
    forgetting_renate,
    forgetting_spu,
    forward_transfer,
    previous_tasks,
    sample_weighted_accuracy,
)

nan = np.nan
R = np.array([[90, nan, nan], [80, 92, nan], [70, 85, 94]])


def test_the_worked_example() -> None:
    assert accuracy(R) == 83
    assert forgetting(R) == 13.5
    assert (first_task_accuracy(R), current_task_accuracy(R)) == (70, 94)
    assert forgetting_spu(R) == pytest.approx(-22.33, abs=0.01)
    assert sample_weighted_accuracy(R, np.array([100, 300, 100])) == pytest.approx(83.8)
    assert average_incremental_accuracy(R) == pytest.approx((90 + 86 + 83) / 3)
    assert previous_tasks(R) == [90, 80, 77.5]
    assert previous_tasks(np.array([[10.0, 90.0, 80.0]])) == [60]  # joint training


def test_a_task_that_improves_has_negative_forgetting() -> None:
    better = np.array([[50, nan], [60, 90]])
    assert forgetting(better) == -10
    assert MATRIX_METRICS["forgetting_pycil"](better) == 0
    assert MATRIX_METRICS["backward_transfer"](better) == 10


def test_forgetting_ignores_sessions_before_the_task() -> None:
    measured = np.array([[90, 99, 0], [80, 92, 0], [70, 85, 94]], dtype=float)
    assert forgetting(measured) == 13.5
    assert forgetting_renate(measured) == 17  # its maximum includes zero-shot cells


def test_the_forgetting_matrix() -> None:
    F = forgetting_matrix(R)
    assert F[1, 0] == 10
    assert F[2].tolist()[:2] == [20, 7]
    assert np.isnan(F[0]).all()


def test_joint_training_has_no_forgetting() -> None:
    once = np.array([[90.0, 80.0]])
    assert accuracy(once) == 85
    names = [name for name in MATRIX_METRICS if name.startswith("forgetting")]
    assert all(np.isnan(MATRIX_METRICS[name](once)) for name in names)


def test_forward_transfer_excludes_the_first_task() -> None:
    assert forward_transfer(np.array([50.0, 60.0, 70.0]), np.array([40.0, 50.0, 50.0])) == 15


def test_every_metric_has_a_definition() -> None:
    assert set(MATRIX_METRICS) <= set(DEFINITIONS)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    """Written out: two bins of three, with gaps |0.9 - 2/3| and |0.3 - 1|, weighted 3 : 1."""
    confidence = np.array([0.9, 0.9, 0.9, 0.3])
    correct = np.array([True, True, False, True])
    expected = 100 * (3 / 4 * abs(0.9 - 2 / 3) + 1 / 4 * abs(0.3 - 1.0))
    assert expected_calibration_error(confidence, correct) == pytest.approx(expected)


def test_calibration_error_is_zero_for_calibrated_predictions() -> None:
    confidence, correct = np.array([0.5, 0.5, 1.0]), np.array([True, False, True])
    assert expected_calibration_error(confidence, correct) == pytest.approx(0)
