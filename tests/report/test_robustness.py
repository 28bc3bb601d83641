"""Worst runs, variance over seeds and class orders, and the gain of the stream."""

import pytest

from dosapp.errors import InputError
from dosapp.experiments.result import Result
from dosapp.report.robustness import robustness_table, tail_mean
from dosapp.report.stream_gain import compute_stream_gains
from dosapp.report.tables import build_rows, paired_differences
from support.results import make_result


def of_order(order: int | None, seed: int, accuracy: float, *classes: str) -> Result:
    result = make_result("spu", seed, accuracy, 5.0, class_order_seed=order)
    metrics = {**result.metrics, "calibration_error": 4.0}
    tasks = [{"classes": [name], "test": 3} for name in classes or ("ant", "bee")]
    return result.model_copy(update={"tasks": tasks, "metrics": metrics})


def test_the_tail_is_the_worst_tenth_and_at_least_one_run() -> None:
    assert tail_mean([3.0, 1.0, 2.0]) == 1.0
    assert tail_mean([float(n) for n in range(20)]) == 0.5


class TestClassOrders:
    RESULTS = [
        of_order(None, 0, 60.0),
        of_order(None, 1, 62.0),
        of_order(1993, 0, 50.0, "bee", "ant"),
        of_order(1993, 1, 52.0, "bee", "ant"),
    ]

    def test_their_variance_is_apart_from_the_seeds(self) -> None:
        lines = robustness_table(build_rows(self.RESULTS)).splitlines()
        assert len(lines) == 3  # both orders are one line
        cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
        # worst of four; ECE; std of (60, 62) and of (50, 52); std of (61, 51)
        assert cells[1:] == ["50.0", "4.0 ± 0.0", "1.4", "7.1", "4"]

    def test_rows_name_their_order(self) -> None:
        names = [row.name for row in build_rows(self.RESULTS)]
        assert names == ["SPU (class_order_seed=None)", "SPU (class_order_seed=1993)"]

    def test_differences_are_within_an_order(self) -> None:
        table = build_rows(self.RESULTS)
        assert len(paired_differences(table, table[0].name).splitlines()) == 2  # the head only

    def test_other_classes_are_not_another_order(self) -> None:
        with pytest.raises(InputError, match="are of different classes"):
            build_rows([of_order(None, 0, 60.0), of_order(7, 0, 60.0, "ant", "cat")])


class TestStreamGain:
    def test_a_run_is_paired_with_the_one_without_a_stream(self) -> None:
        still = [
            make_result("spu", n, 50.0 + n, 9.0).model_copy(update={"pseudo_labels": [None, None]})
            for n in (0, 1)
        ]
        streams = [
            make_result("spu", n, 54.0, 6.0, adapt="self-training", imbalanced=n == 1).model_copy(
                update={"pseudo_labels": [90.0, 60.0]}
            )
            for n in (0, 1)
        ]
        alone = make_result("flyp", 0, 54.0, 6.0, adapt="self-training")
        gains = compute_stream_gains([*still, *streams, alone])
        assert [(g.seed, g.accuracy, g.forgetting, g.correct) for g in gains] == [
            (0, 4.0, -3.0, 60.0),
            (1, 3.0, -3.0, 60.0),
        ]
        assert gains[0].label == "SPU + D^u"

    def test_hyperparameters_of_the_labelled_method_must_agree(self) -> None:
        still = make_result("spu", 0, 50.0, 9.0, options={"sparsity": 0.3}).model_copy(
            update={"pseudo_labels": [None, None]}
        )
        other = make_result("spu", 0, 54.0, 6.0, adapt="rmt").model_copy(
            update={"pseudo_labels": [90.0, 60.0]}
        )
        assert compute_stream_gains([still, other]) == []
