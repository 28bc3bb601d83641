"""Metrics: functions of the accuracy matrix R.

`R[t, j]` is the accuracy in per cent on task j after session t, over the classes seen by then. A
cell that was not measured is NaN, so that it cannot be taken for zero. "Forgetting" has several
definitions in published code: each is here under its own name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def accuracy(R: Matrix) -> float:
    """Mean accuracy over all tasks at the end.

    Example:
        >>> accuracy(np.array([[90.0, np.nan], [80.0, 92.0]]))
        86.0
    """
    return float(np.mean(R[-1]))


def first_task_accuracy(R: Matrix) -> float:
    """Accuracy on the first task at the end."""
    return float(R[-1, 0])


def current_task_accuracy(R: Matrix) -> float:
    """Accuracy on the last task at the end."""
    return float(R[-1, -1])


def average_incremental_accuracy(R: Matrix) -> float:
    """Mean over sessions of the accuracy on the tasks seen by then."""
    return float(np.mean([np.nanmean(row) for row in R]))


def learning_accuracy(R: Matrix) -> float:
    """Mean accuracy on each task just after it was learned."""
    return float(np.mean(np.diag(R))) if _is_square(R) else np.nan


def forgetting(R: Matrix) -> float:
    """The paper's F: mean drop from the best accuracy since a task was learned.

    Example:
        >>> forgetting(np.array([[90.0, np.nan], [80.0, 92.0]]))
        10.0
    """
    return _mean([np.max(R[j:-1, j]) - R[-1, j] for j in _earlier_tasks(R)])


def forgetting_spu(R: Matrix) -> float:
    """As in the released code of SPU."""
    if not _is_square(R):
        return np.nan
    filled = np.nan_to_num(np.tril(R))
    return float(np.mean(filled[:-1].max(axis=0) - filled[-1])) if len(R) > 1 else np.nan


def forgetting_pycil(R: Matrix) -> float:
    """As in PyCIL, PILOT and Mammoth: never negative."""
    return _mean([np.max(R[j:, j]) - R[-1, j] for j in _earlier_tasks(R)])


def forgetting_avalanche(R: Matrix) -> float:
    """As in Avalanche: drop since the task was learned."""
    return _mean([R[j, j] - R[-1, j] for j in _earlier_tasks(R)])


def forgetting_renate(R: Matrix) -> float:
    """As in Renate: the best accuracy includes sessions before the task."""
    return _mean([np.max(R[:-1, j]) - R[-1, j] for j in _earlier_tasks(R)])


def forgetting_libcontinual(R: Matrix) -> float:
    """As in LibContinual: backward transfer."""
    return backward_transfer(R)


def backward_transfer(R: Matrix) -> float:
    """Mean gain since each task was learned."""
    return _mean([R[-1, j] - R[j, j] for j in _earlier_tasks(R)])


def forward_transfer(ahead: Matrix, zero_shot: Matrix) -> float:
    """Mean gain over zero-shot accuracy on each task just before it is learned, without the first.

    Args:
        ahead: Accuracy on each task just before it is learned.
        zero_shot: Accuracy of the pretrained model, over the same classes.
    """
    return float(np.mean((ahead - zero_shot)[1:])) if len(ahead) > 1 else np.nan


def sample_weighted_accuracy(R: Matrix, sizes: NDArray[np.int64]) -> float:
    """Accuracy at the end over all test images; `sizes` are their numbers per task."""
    return float(np.average(R[-1], weights=sizes))


def expected_calibration_error(
    confidence: NDArray[np.floating[Any]], correct: NDArray[np.bool_], bins: int = 15
) -> float:
    """Mean gap between confidence and accuracy over bins of equal width, in per cent.

    Args:
        confidence: The probability of each prediction `[N]`.
        correct: Whether it is right `[N]`.
        bins: Number of bins of confidence.

    Example:
        >>> expected_calibration_error(np.array([0.75, 0.75]), np.array([True, False]))
        25.0
    """
    bin_of = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(bin_of, weights=confidence - correct, minlength=bins)
    return 100 * float(np.abs(gaps).sum()) / len(correct)


def previous_tasks(R: Matrix) -> list[float]:
    """Per session, mean accuracy on the tasks before it (on its own tasks, in the first)."""
    before = range(len(R)) if _is_square(R) else [R.shape[1]]  # joint training has one session
    return [float(np.nanmean(R[t, : max(n, 1)])) for t, n in enumerate(before)]


def forgetting_matrix(R: Matrix) -> Matrix:
    """F[t, i] = R[i, i] - R[t, i] for t > i, else NaN."""
    if not _is_square(R):
        return np.full_like(R, np.nan)
    F: Matrix = np.diag(R)[None, :] - R
    F[np.triu_indices(len(R))] = np.nan
    return F


# Each has an entry in `DEFINITIONS`.
MATRIX_METRICS: Mapping[str, Callable[[Matrix], float]] = {
    f.__name__: f
    for f in (
        accuracy,
        forgetting,
        first_task_accuracy,
        current_task_accuracy,
        average_incremental_accuracy,
        learning_accuracy,
        backward_transfer,
        forgetting_spu,
        forgetting_pycil,
        forgetting_avalanche,
        forgetting_renate,
        forgetting_libcontinual,
    )
}

# Stored in every result and compared between results, so the wording must not change.
DEFINITIONS: Mapping[str, str] = {
    "accuracy": "1/T Σ_j R[T,j]",
    "forgetting": "1/(T-1) Σ_{j<T} max_{j≤i<T} (R[i,j] - R[T,j])  (the paper; continuum)",
    "first_task_accuracy": "R[T,1]",
    "current_task_accuracy": "R[T,T]",
    "average_incremental_accuracy": "1/T Σ_t 1/t Σ_{j≤t} R[t,j]  (PILOT's average accuracy)",
    "learning_accuracy": "1/T Σ_j R[j,j]",
    "backward_transfer": "1/(T-1) Σ_{j<T} (R[T,j] - R[j,j])",
    "forward_transfer": "1/(T-1) Σ_{j>1} (before learning task j - zero-shot), on task j",
    "sample_weighted_accuracy": "Σ_j n_j R[T,j] / Σ_j n_j  (SPU's accuracy)",
    "forgetting_spu": "1/T Σ_{j≤T} (max_{i<T} R[i,j] - R[T,j]), unseen cells zero",
    "forgetting_pycil": "1/(T-1) Σ_{j<T} max_{j≤i≤T} (R[i,j] - R[T,j])  (PyCIL, PILOT, Mammoth)",
    "forgetting_avalanche": "1/(T-1) Σ_{j<T} (R[j,j] - R[T,j])",
    "forgetting_renate": "1/(T-1) Σ_{j<T} max_{i<T} (R[i,j] - R[T,j]); needs R before learning",
    "forgetting_libcontinual": "1/(T-1) Σ_{j<T} (R[T,j] - R[j,j]); opposite sign",
    "zero_shot_accuracy": "accuracy of the untouched model over all classes, mean over tasks",
    "calibration_error": "ECE at the end: Σ_b |Σ_{i in b} (confidence_i - correct_i)| / n, 15 bins",
    "control_accuracy": "zero-shot accuracy on classes nobody trains, among themselves, at the end",
    "control_kept": "control_accuracy less its value before any learning",
}


def _is_square(R: Matrix) -> bool:
    return bool(R.shape[0] == R.shape[1])


def _earlier_tasks(R: Matrix) -> list[int]:
    """Tasks learned before the last session; none in joint training."""
    return list(range(len(R) - 1)) if _is_square(R) else []


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else np.nan
