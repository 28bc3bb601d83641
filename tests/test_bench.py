"""The benchmark compares two ways of doing the same."""

import json

import pytest
import torch

from dosapp.bench.growth import growth, line
from dosapp.bench.measure import KEYS, bench, race
from dosapp.bench.model import small
from dosapp.bench.same import Differ, exact, near
from dosapp.bench.sides import Sides, storages
from dosapp.report.speed import TARGETS, UNMEASURED, slopes, table
from test_cli import dosapp


def test_both_do_the_same_in_both_phases() -> None:
    assert set(exact()) == {"losses", "student", "teacher"}  # or it would have raised


def test_both_do_the_same_in_single_precision() -> None:
    sides = Sides(small()).sized(4, 10)
    assert set(near(sides)) == {"losses", "labels", "gradients"}
    teacher, student = sides.method.teacher.weights(), sides.student.net.weights()
    assert all(torch.equal(teacher[n], student[n]) for n in student)  # nothing is left behind


def test_a_difference_stops_the_benchmark() -> None:
    sides = Sides(small()).sized(4, 10)
    with torch.no_grad():
        sides.plain.student.visual_projection.weight[0, 0] += 1
    with pytest.raises(Differ, match="of the two implementations differ by"):
        near(sides)


def test_both_choose_the_same_mask_and_give_the_same_answers() -> None:
    sides = Sides(small(), double=True).sized(6, 7)
    mine, theirs = sides.selection(), sides.plain_selection()
    assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    assert torch.equal(sides.evaluation(), sides.plain_evaluation())


def test_the_figures_are_ratios_and_all_there(tmp_path) -> None:
    said = dosapp(
        "bench", "--model", "small", "--quick", "--json", "--out", tmp_path / "made"
    ).stdout
    found = json.loads(said)
    assert set(found["ratios"]) == set(KEYS) == set(TARGETS)
    for name, ratio in found["ratios"].items():  # batch 64 is left out when it has to be quick
        assert (ratio is None) == ("batch64" in name or name == "limit"), name
    assert found["ratios"]["ttl_batch8_classes200"] > 1
    assert found["ratios"]["allreduce"] == pytest.approx(0.1, abs=0.002)
    assert 0 < found["ratios"]["update_share"] < 1
    assert {n.partition("_")[0] for n in found["more"]} >= {"plain", "selection", "evaluation"}
    for name in ("bench.json", "bench.md", "bench.png", "bench.svg"):
        assert (tmp_path / "made" / name).stat().st_size > 0


def test_growth_is_measured_at_every_size() -> None:
    found = growth(
        small(), repeats=1, batch=2, many=5, classes=(4, 9), batches=(1, 3), tasks=(1, 2, 12)
    )
    assert [found[n]["x"] for n in ("classes", "batch", "tasks")] == [[4, 9], [1, 3], [1, 2, 12]]
    held = found["bytes"]["y"]  # random masks: a growing union, until all is no more work
    assert held[1] > held[0]
    assert held[2] <= held[0]
    assert slopes(found).count("\n") == slopes(None).count("\n")
    assert line([1, 2, 3], [2.0, 4.0, 6.0])["slope"] == pytest.approx(2)


def test_what_was_not_measured_says_so() -> None:
    assert table(None).count(UNMEASURED) == len(TARGETS)


def test_a_storage_is_counted_once() -> None:
    tensor = torch.zeros(10)
    assert storages([tensor, tensor[:5], None, tensor.view(2, 5), torch.zeros(2)]) == 48


def test_repetitions_take_turns_and_the_first_is_not_counted() -> None:
    said: list[str] = []
    found = race(
        {"a": lambda: said.append("a"), "b": lambda: said.append("b")},
        3,
        lambda name: said.append(" "),
    )
    assert "".join(said) == " b a a b b a a b"
    assert len(found["a"].seconds) == 3


def test_an_unknown_model_is_one_sentence() -> None:
    assert "did you mean 'middle'" in dosapp("bench", "--model", "midle", code=2).stderr


def test_it_can_all_be_measured() -> None:
    found = bench(small())
    assert all(ratio is not None for ratio in found["ratios"].values())
