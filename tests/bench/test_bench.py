"""The benchmark compares two ways of doing the same."""

import json

import pytest
import torch

from dosapp.bench.equivalence import NotEquivalentError, exact, near
from dosapp.bench.implementations import Implementations, storages
from dosapp.bench.measure import KEYS, bench, race
from dosapp.bench.model import middle, small
from dosapp.bench.scaling import growth, line
from dosapp.report.speed import TARGETS, UNMEASURED, slopes, table
from support.cli import dosapp


def test_both_do_the_same_in_both_phases() -> None:
    assert set(exact()) == {"losses", "student", "teacher"}  # or it would have raised


def test_both_do_the_same_in_single_precision() -> None:
    sides = Implementations(small()).sized(4, 10)
    assert set(near(sides)) == {"losses", "labels", "gradients"}
    teacher, student = sides.method.teacher.weights(), sides.student.backbone.weights()
    assert all(torch.equal(teacher[n], student[n]) for n in student)  # nothing is left behind


def test_a_difference_stops_the_benchmark() -> None:
    sides = Implementations(small()).sized(4, 10)
    with torch.no_grad():
        sides.plain.student.visual_projection.weight[0, 0] += 1
    with pytest.raises(NotEquivalentError, match="of the two implementations differ by"):
        near(sides)


def test_both_choose_the_same_mask_and_give_the_same_answers() -> None:
    sides = Implementations(small(), double=True).sized(6, 7)
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
        small(), repeats=1, batch_size=2, many=5, classes=(4, 9), batches=(1, 3), tasks=(1, 2, 12)
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


def test_repetitions_take_turns() -> None:
    said: list[str] = []
    found = race(
        {"a": lambda: said.append("a"), "b": lambda: said.append("b")},
        3,
        lambda name: said.append(" "),
    )
    assert "".join(said) == " b a a b b a"
    assert len(found["a"].seconds) == 3


def test_an_unknown_model_is_one_sentence() -> None:
    assert "did you mean 'middle'" in dosapp("bench", "--model", "midle", code=2).stderr


def test_it_can_all_be_measured() -> None:
    found = bench(small())
    assert all(ratio is not None for ratio in found["ratios"].values())


def thinking(sides: Implementations, step) -> dict[str, int]:
    """Tokens that go through the first MLP layers in one step, by tower, of all models together."""
    found = {"vision": 0, "text": 0}
    models = [sides.student.backbone.model, sides.method.teacher.model]
    models += [sides.plain.student, sides.plain.teacher]
    hooks = []
    for model in models:
        for name, tower in (("vision", model.vision_model), ("text", model.text_model)):

            def counted(module, given, made, name=name) -> None:
                found[name] += made.shape[:2].numel()

            hooks += [
                layer.mlp.fc1.register_forward_hook(counted) for layer in tower.encoder.layers
            ]
    step()
    for hook in hooks:
        hook.remove()
    return found


def test_the_work_of_a_step_is_what_the_arithmetic_needs() -> None:
    """Counted, not timed: two image passes of ours against three; captions of 12 tokens of which 5
    are shared, read by two experts, against 77 by two and once more for the loss."""
    sides = Implementations(middle()).sized(8, 20)
    ours, plain = thinking(sides, sides.stream), thinking(sides, sides.plain_stream)
    blocks, patches = 4, 6 * 6 + 1
    assert plain["vision"] == 3 * 8 * patches * blocks
    assert ours["vision"] == 2 * 8 * (patches * (blocks - 1) + 1)
    assert plain["text"] == (2 * 20 + 8) * 77 * blocks
    assert ours["text"] == 2 * ((20 * 7 + 5) * (blocks - 1) + 20)


@pytest.mark.slow
def test_ratios_do_not_fall() -> None:
    """The guard: far below what is measured on a quiet machine, so that noise does not reach it."""
    found = bench(middle(), quick=True)
    ratios, more = found["ratios"], found["more"]
    assert ratios["ttl_batch8_classes200"] > 3
    assert ratios["allreduce"] == pytest.approx(0.1, abs=1e-4)
    assert ratios["memory"] < 0.3
    assert ratios["update_share"] < 0.3
    assert more["evaluation_batch8_classes200"] > 3
