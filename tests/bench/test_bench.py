"""The benchmark: both implementations agree, and every ratio is measured."""

import json

import pytest
import torch

from dosapp.bench.equivalence import NotEquivalentError, check_float32, check_float64
from dosapp.bench.implementations import Implementations, storage_bytes
from dosapp.bench.measure import KEYS, run_benchmark, time_alternating
from dosapp.bench.model import middle, small
from dosapp.bench.scaling import fit_line, measure_growth
from dosapp.report.speed import TARGETS, UNMEASURED, format_growth, format_ratios
from support.cli import dosapp


def test_both_agree_in_both_phases() -> None:
    assert set(check_float64()) == {"losses", "student", "teacher"}  # or it would have raised


def test_both_agree_in_single_precision() -> None:
    pair = Implementations(small()).set_size(4, 10)
    assert set(check_float32(pair)) == {"losses", "labels", "gradients"}
    teacher, student = pair.method.teacher.weights(), pair.student.backbone.weights()
    assert all(torch.equal(teacher[n], student[n]) for n in student)  # the shift is undone


def test_a_difference_stops_the_benchmark() -> None:
    pair = Implementations(small()).set_size(4, 10)
    with torch.no_grad():
        pair.baseline.student.visual_projection.weight[0, 0] += 1
    with pytest.raises(NotEquivalentError, match="of the two implementations differ by"):
        check_float32(pair)


def test_both_select_the_same_mask_and_predict_the_same() -> None:
    pair = Implementations(small(), double=True).set_size(6, 7)
    mask, baseline_mask = pair.select_mask(), pair.baseline_select_mask()
    assert all(torch.equal(mask[n], baseline_mask[n]) for n in mask)
    assert torch.equal(pair.evaluate(), pair.baseline_evaluate())


def test_every_ratio_is_printed_and_written(tmp_path) -> None:
    stdout = dosapp(
        "bench", "--model", "small", "--quick", "--json", "--out", tmp_path / "bench"
    ).stdout
    benchmark = json.loads(stdout)
    assert set(benchmark["ratios"]) == set(KEYS) == set(TARGETS)
    for name, ratio in benchmark["ratios"].items():  # --quick omits batch 64
        assert (ratio is None) == ("batch64" in name or name == "limit"), name
    assert benchmark["ratios"]["ttl_batch8_classes200"] > 1
    assert benchmark["ratios"]["allreduce"] == pytest.approx(0.1, abs=0.002)
    assert 0 < benchmark["ratios"]["update_share"] < 1
    assert {n.partition("_")[0] for n in benchmark["more"]} >= {"plain", "selection", "evaluation"}
    for name in ("bench.json", "bench.md", "bench.png", "bench.svg"):
        assert (tmp_path / "bench" / name).stat().st_size > 0


def test_growth_is_measured_at_every_size() -> None:
    growth = measure_growth(
        small(), repeats=1, batch_size=2, num_classes=5, classes=(4, 9), batches=(1, 3),
        tasks=(1, 2, 12),
    )  # fmt: skip
    assert [growth[n]["x"] for n in ("classes", "batch", "tasks")] == [[4, 9], [1, 3], [1, 2, 12]]
    num_bytes = growth["bytes"]["y"]  # the union of random masks grows until the EMA is dense
    assert num_bytes[1] > num_bytes[0]
    assert num_bytes[2] <= num_bytes[0]
    assert format_growth(growth).count("\n") == format_growth(None).count("\n")
    assert fit_line([1, 2, 3], [2.0, 4.0, 6.0])["slope"] == pytest.approx(2)


def test_unmeasured_ratios_are_marked() -> None:
    assert format_ratios(None).count(UNMEASURED) == len(TARGETS)


def test_a_storage_is_counted_once() -> None:
    tensor = torch.zeros(10)
    assert storage_bytes([tensor, tensor[:5], None, tensor.view(2, 5), torch.zeros(2)]) == 48


def test_repetitions_alternate() -> None:
    calls: list[str] = []
    timings = time_alternating(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        3,
        lambda name: calls.append(" "),
    )
    assert "".join(calls) == " b a a b b a"
    assert len(timings["a"].seconds) == 3


def test_an_unknown_model_is_one_sentence() -> None:
    assert "did you mean 'middle'" in dosapp("bench", "--model", "midle", code=2).stderr


def test_nothing_is_left_unmeasured() -> None:
    benchmark = run_benchmark(small())
    assert all(ratio is not None for ratio in benchmark["ratios"].values())


def count_tokens(pair: Implementations, step) -> dict[str, int]:
    """Tokens through the first MLP layers in one step, per tower, of all models together."""
    tokens = {"vision": 0, "text": 0}
    models = [pair.student.backbone.model, pair.method.teacher.model]
    models += [pair.baseline.student, pair.baseline.teacher]
    hooks = []
    for model in models:
        for name, tower in (("vision", model.vision_model), ("text", model.text_model)):

            def count(module, inputs, output, name=name) -> None:
                tokens[name] += output.shape[:2].numel()

            hooks += [layer.mlp.fc1.register_forward_hook(count) for layer in tower.encoder.layers]
    step()
    for hook in hooks:
        hook.remove()
    return tokens


def test_the_work_of_a_step_is_what_the_arithmetic_needs() -> None:
    """Counted, not timed: two image passes of ours against three; captions of 12 tokens, 5 of them
    shared, encoded by two experts, against 77 by two and once more for the loss."""
    pair = Implementations(middle()).set_size(8, 20)
    ours = count_tokens(pair, pair.stream_step)
    baseline = count_tokens(pair, pair.baseline_stream_step)
    blocks, patches = 4, 6 * 6 + 1
    assert baseline["vision"] == 3 * 8 * patches * blocks
    assert ours["vision"] == 2 * 8 * (patches * (blocks - 1) + 1)
    assert baseline["text"] == (2 * 20 + 8) * 77 * blocks
    assert ours["text"] == 2 * ((20 * 7 + 5) * (blocks - 1) + 20)


@pytest.mark.slow
def test_ratios_do_not_fall() -> None:
    """Limits far below what is measured on a quiet machine, so that noise does not reach them."""
    benchmark = run_benchmark(middle(), quick=True)
    ratios, more = benchmark["ratios"], benchmark["more"]
    assert ratios["ttl_batch8_classes200"] > 3
    assert ratios["allreduce"] == pytest.approx(0.1, abs=1e-4)
    assert ratios["memory"] < 0.3
    assert ratios["update_share"] < 0.3
    assert more["evaluation_batch8_classes200"] > 3


def test_methods_are_compared(tmp_path) -> None:
    flags = ("--model", "small", "--quick", "--json", "--out", tmp_path)
    costs = json.loads(dosapp("bench", "--methods", "dosapp,stream-gda", *flags).stdout)
    assert costs["dosapp"]["time"] == 1
    assert costs["stream-gda"]["time"] > 0
    assert costs["dosapp"]["head_mb"] == 0 < costs["stream-gda"]["head_mb"]
    # a sparse teacher copies candidate layers only; the expert before the session all weights
    assert 0 < costs["dosapp"]["copies_mb"] < costs["stream-gda"]["copies_mb"]
    assert (tmp_path / "methods.json").exists()


def test_a_method_without_a_stream_is_refused() -> None:
    failed = dosapp("bench", "--methods", "dosapp,spu", "--model", "small", code=2)
    assert "'spu' does not adapt" in failed.stderr
