"""The paper's tables, their runs, and ledgers that are filled from stored results only."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from dosapp.cli.console import SetOption
from dosapp.cli.flags import with_settings
from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.errors import InputError
from dosapp.experiments.costs import estimate
from dosapp.experiments.grid import run_grid
from dosapp.experiments.plan import load_settings, plan, resolve_training
from dosapp.experiments.ray_cluster import needs_gpu
from dosapp.experiments.result import Result, check_paired
from dosapp.paper.ledger import compare_forgetting, count_lost_cells, read_ledgers
from dosapp.paper.ledger.cells import Cell, read_metric
from dosapp.paper.ledger.table import Ledger
from dosapp.paper.ledger.verdicts import find_uninformative, judge_claim
from dosapp.paper.reproduce import (
    Row,
    Scale,
    check_stored,
    format_command,
    get_table,
    list_runs,
    list_timed_runs,
    load_tables,
)
from dosapp.settings import RunSettings, parse_options
from support.cli import dosapp
from support.results import make_result

SMALL = Scale(
    "small",
    "0-1",
    {
        "classes": 6,
        "tasks": 2,
        "epochs": 1,
        "batch_size": 8,
        "stream_batch_size": 8,
        "train_images": 8,
        "test_images": 8,
        "lr": 1e-3,
    },
    {1000: 6, 200: 4},
    "signs",
    {"single": ["shapes"], "long": ["shapes+signs"]},
)


TTL = get_table("with-without-ttl")


class TestTables:
    def test_every_row_has_a_value_for_every_dataset_and_metric(self) -> None:
        for table in load_tables().values():
            for row in table.rows:
                assert set(row.published) == set(table.data), (table.name, row.name)
                assert all(len(v) == len(table.metrics) for v in row.published.values())

    def test_claims_are_about_rows_of_the_table(self) -> None:
        for table in load_tables().values():
            assert table.claims
            for better, than, *_ in table.claims:
                assert table.row(better)
                assert table.row(than)

    def test_a_few_numbers_as_printed(self) -> None:
        assert get_table("main").row("DoSAPP").published["gtsrb"] == [72.33, 1.02]
        assert get_table("test-time").row("SPU + RMT").published["cars"] == [62.32, 21.95]
        assert get_table("sparsity").row("0.3").published["cifar100"] == [80.91]
        assert get_table("long-sequence").row("SPU").published["aircraft+cars"][1] == 24.31

    def test_rows_that_occur_twice_have_the_same_values(self) -> None:
        ours = get_table("main").row("DoSAPP").published
        for name in ("test-time", "ablation", "teacher-labels", "full-test-set"):
            assert get_table(name).row("DoSAPP").published == ours
        assert get_table("main").row("SPU").published == get_table("test-time").row("SPU").published

    def test_an_unknown_name_is_an_input_error(self) -> None:
        with pytest.raises(InputError, match=r"unknown table 'mian'.*did you mean 'main'"):
            get_table("mian")
        with pytest.raises(InputError, match="unknown scale 'huge'"):
            Scale.from_name("huge")


class TestRuns:
    def test_shared_cells_are_one_run(self) -> None:
        tiny = Scale.from_name("tiny")
        alone = [len(list_runs([name], tiny)) for name in ("main", "test-time")]
        both = len(list_runs(["main", "test-time"], tiny))
        assert both == sum(alone) - 3 * 3  # SPU, its reading and DoSAPP are in both; three seeds

    def test_at_the_papers_scale_the_data_are_the_papers(self) -> None:
        size = replace(Scale.from_name("paper"), references="x.csv")
        planned = list_runs(["main"], size)
        assert {one.data for one in planned} == {"aircraft", "cars", "cifar100", "cub", "gtsrb"}
        assert {one.buffer_size for one in planned} == {0, 200, 1000}
        assert len(planned) == 16 * 5 * 5

    def test_zscl_without_references_is_left_out_and_the_others_are_not(self, tmp_path) -> None:
        size = Scale.from_name("paper")
        assert len(list_runs(["main"], size)) == 15 * 5 * 5
        ledger = Ledger(
            "main", replace(size, settings={**size.settings, "data_dir": tmp_path}), tmp_path
        )
        [cell, *_] = [cell for cell in ledger.cells() if cell.row.name == "ZSCL"]
        assert cell.status == "not run"
        assert any("'ZSCL' needs reference images" in reason for reason in ledger.notes)

    def test_at_the_papers_scale_baselines_have_their_own_rates(self) -> None:
        planned = list_runs(["main"], Scale.from_name("paper"))
        rates = {one.method: (one.lr, one.epochs) for one in planned}
        assert rates["dosapp"] == rates["spu"] == rates["flyp"] == (7.5e-6, 10)
        assert (rates["lwf"], rates["sparcl"], rates["l2p"]) == ((1e-6, 5), (5e-6, 20), (7.5e-3, 5))

    def test_at_the_papers_scale_a_gpu_is_used_if_there_is_one(self) -> None:
        [one, *_] = list_runs(["noise"], Scale.from_name("paper"))
        assert one.device == "auto"
        assert needs_gpu(one)
        assert not needs_gpu(RunSettings())

    def test_rates_are_of_a_dataset(self) -> None:
        size = Scale.from_name("real-small")
        rates = {one.data: one.lr for one in list_runs(["sparsity"], size)}
        assert rates == {
            name: size.learning_rates[name]["dosapp"] for name in ("cifar100", "gtsrb")
        }
        assert len(set(rates.values())) == 2

    def test_settings_can_be_of_a_dataset(self) -> None:
        runs = list_runs(["sparsity"], Scale.from_name("real-small"))
        assert {(one.data, one.batch_size) for one in runs} == {("cifar100", 64), ("gtsrb", 16)}

    def test_a_printed_command_computes_the_same_result(self, tmp_path) -> None:
        (one, *_) = SMALL.runs(get_table("ablation").rows[3], "shapes")
        words = shlex.split(format_command(one))
        assert words[:2] == ["dosapp", "run"]
        printed = dosapp(*words[1:], "--out", tmp_path / "x", "--json").stdout
        assert json.loads(printed)[0]["key"] == plan(one).key

    def test_a_command_holds_everything_that_is_not_the_default(self) -> None:
        settings = RunSettings(
            method="spu", stream=False, options={"sparsity": 0.3}, seed=2, lr=0.002
        )
        wanted = "dosapp run --method spu --seed 2 --lr 0.002 --no-stream --set sparsity=0.3"
        assert format_command(settings) == wanted

    def test_a_command_holds_the_tuned_learning_rate(self) -> None:
        """So that tuning again does not change its meaning."""
        settings = RunSettings(method="spu")
        assert f"--lr {resolve_training(settings).lr}" in format_command(settings)

    @pytest.mark.parametrize("scale", ["tiny", "real-small", "paper"])
    def test_every_printed_command_is_parsed_to_the_same_settings(self, scale) -> None:
        size = replace(Scale.from_name(scale), seeds="3", references="a file.csv")
        for one in [*list_runs(list(load_tables()), size), *list_timed_runs(size).values()]:
            again = parse_command(format_command(one))
            assert resolve_training(again) == resolve_training(one)

    @pytest.mark.filterwarnings("ignore:momenta")
    @pytest.mark.parametrize(
        "settings",
        [
            {"lr": 0.123456789, "weight_decay": 1 / 3},
            {"lr": 1e-3, "stream_noise": 0.1 + 0.2, "stream_fraction": 2 / 3},
            {"lr": 1e-3, "options": {"sparsity": 0.123456789, "lam": 0.1 + 0.2}},
            {"lr": 1.23456789e-7, "options": {"sparsity": 1e-06}},
            {"lr": 1e-3, "template": "a {}, 'quoted' # not a comment"},
        ],
    )
    def test_numbers_in_commands_are_exact(self, settings) -> None:
        one = RunSettings.parse({"classes": 6, "tasks": 2, **settings})
        assert plan(parse_command(format_command(one))).key == plan(one).key


def parse_command(line: str) -> RunSettings:
    """Settings that `dosapp run` gets from a command line, by the flags that it has."""
    app, parsed = typer.Typer(), []

    @app.command()
    @with_settings(RunSettings)
    def run(flags: dict[str, Any], options: SetOption = None) -> None:
        parsed.append(load_settings(None, {**flags, "options": parse_options(options or [])}))

    program, command, *words = shlex.split(line)
    assert (program, command) == ("dosapp", "run")
    app(words, standalone_mode=False)
    return parsed[0]


class TestDryRun:
    def test_stored_runs_are_marked(self, tmp_path) -> None:
        names = ["with-without-ttl", "time"]
        planned = list_runs(names, SMALL)
        assert not any(is_stored for _, is_stored in check_stored(names, SMALL, tmp_path / "none"))
        run_grid(planned[:1], tmp_path)
        checked = check_stored(names, SMALL, tmp_path)
        assert [one for one, is_stored in checked if is_stored] == planned[:1]
        assert [one for one, _ in checked] == [*planned, *list_timed_runs(SMALL).values()]
        read_ledgers(["time"], SMALL, tmp_path, measure=True)[0].to_dict()
        assert all(is_stored for _, is_stored in check_stored(["time"], SMALL, tmp_path))

    def test_runs_without_their_data_are_missing(self, tmp_path) -> None:
        away = replace(SMALL, data={"single": ["nowhere/x"], "long": ["nowhere/x"]})
        assert not any(is_stored for _, is_stored in check_stored(["noise"], away, tmp_path))

    def test_nothing_is_loaded(self, monkeypatch) -> None:
        def fail(*_: object, **__: object) -> None:
            pytest.fail("loads")

        monkeypatch.setattr("dosapp.experiments.plan.load_backbone", fail)
        monkeypatch.setattr("dosapp.experiments.plan.load_dataset", fail)
        results = Path(__file__).parents[2] / "results"
        checked = check_stored(["main"], Scale.from_name("tiny"), results / "tiny")
        assert any(is_stored for _, is_stored in checked)
        assert "measure what it would cost" in dosapp("reproduce", "--help").stdout

    def test_commands_are_printed_with_what_is_done_as_a_comment(self, tmp_path) -> None:
        results = Path(__file__).parents[2] / "results"
        arguments = ("reproduce", "noise", "--seeds", "0,7", "--dry-run", "--out", results / "tiny")
        printed = dosapp(*arguments)
        lines = printed.stdout.splitlines()
        assert [line.endswith("  # done") for line in lines] == ["--seed 7" not in x for x in lines]
        assert "8 runs, 4 done\n--estimate measures" in printed.stderr
        assert len({parse_command(line.partition("  #")[0]).seed for line in lines}) == 2

    def test_timed_runs_are_listed(self) -> None:
        printed = dosapp("reproduce", "time", "--dry-run")
        assert len(printed.stdout.splitlines()) == 3
        assert "3 runs" in printed.stderr


class TestTime:
    def test_times_are_measured_once_and_read_afterwards(self, tmp_path) -> None:
        [empty] = read_ledgers(["time"], SMALL, tmp_path)
        assert "not run" in empty.markdown()
        assert [v.outcome for v in empty.verdicts()] == ["not run", "not run"]
        first = read_ledgers(["time"], SMALL, tmp_path, measure=True)[0].to_dict()
        assert {row["row"]: len(row["seconds"]) for row in first["rows"]} == {
            "all parameters": 2,
            "DoSAPP": 2,
            "SPU + RMT": 2,
        }
        assert all(row["command"] and row["stream"] and row["finished"] for row in first["rows"])
        assert all(row["status"] == "run" and row["paper"] is None for row in first["rows"])
        assert [claim["pairs"] for claim in first["claims"]] == [2, 2]
        [again] = read_ledgers(["time"], SMALL, tmp_path)
        assert again.to_dict() == first
        assert "(1.00)" in again.markdown()
        assert "DoSAPP better than all parameters in seconds" in again.markdown()

    def test_at_the_papers_scale_ratios_are_compared_with_the_papers(self, tmp_path) -> None:
        size = Scale.from_name("paper")
        [ledger] = read_ledgers(
            ["time"], replace(size, settings={**size.settings, "data_dir": tmp_path}), tmp_path
        )
        assert [row["status"] for row in ledger.time_rows()] == ["not run"] * 3
        assert ledger.unavailable
        seconds = {"all parameters": [1.0, 1.1], "DoSAPP": [1.0, 1.0], "SPU + RMT": [2.0, 2.0]}
        images = PaperDataset.from_name(list_timed_runs(size)["DoSAPP"].data).images
        tasks = [{"train": images["train"], "test": images["test"] // 2}]
        ledger.measured = {"seconds": seconds, "backbone": "ViT-B-16", "tasks": tasks}
        assert [row["status"] for row in ledger.time_rows()] == [
            "reproduced",
            "reproduced",
            "differs",
        ]
        ledger.measured["backbone"] = "tiny"
        assert {row["status"] for row in ledger.time_rows()} == {"run with another backbone"}
        assert {row["difference"] for row in ledger.time_rows()} == {None}
        assert sum(ledger.time_rows()[1]["paper_seconds"]) == pytest.approx(1016.35)
        assert "| paper | (1.03) | (1.00) | (1.03) |" in ledger.markdown()

    def test_an_estimate_is_a_few_steps_times_all_of_them(self) -> None:
        few = estimate(list_runs(["with-without-ttl"], SMALL))
        many = estimate(list_runs(["with-without-ttl"], replace(SMALL, seeds="0-7")))
        assert (few.runs, many.runs) == (4, 16)
        assert many.seconds > 2 * few.seconds > 0


def test_the_forgetting_maps_are_drawn_from_stored_results(tmp_path) -> None:
    [ledger] = read_ledgers(["forgetting-maps"], SMALL, tmp_path)
    ledger.draw_figure(tmp_path / "maps")
    assert not (tmp_path / "maps.png").exists()
    run_grid(list_runs(["forgetting-maps"], replace(SMALL, seeds="0")), tmp_path)
    [ledger] = read_ledgers(["forgetting-maps"], replace(SMALL, seeds="0"), tmp_path)
    ledger.draw_figure(tmp_path / "maps")
    assert (tmp_path / "maps.png").stat().st_size > 5000


class TestLedger:
    def test_a_ledger_is_filled_from_stored_results_only(self, tmp_path) -> None:
        name = "with-without-ttl"
        empty = Ledger(name, SMALL, tmp_path)
        assert {cell.status for cell in empty.cells()} == {"not run"}
        assert {v.outcome for v in empty.verdicts()} == {"not run"}
        run_grid(list_runs([name], SMALL), tmp_path)
        full = Ledger(name, SMALL, tmp_path)
        facts = full.to_dict()
        assert [c["seeds"] for c in facts["cells"]] == [2, 2]
        assert all(c["paper"] is None and c["difference"] is None for c in facts["cells"])
        assert all(len(c["stream"]) == 2 and c["command"] for c in facts["cells"])
        assert facts["cells"][1]["steps"] == [2, 3]
        assert facts["claims"][0]["pairs"] == 2
        text = full.markdown()
        assert "DoSAPP better than DoSAPP without TTL in accuracy" in text
        assert "39.14" not in text  # the paper's numbers are for the paper's scale

    def test_cells_whose_data_is_not_available_were_not_run(self, tmp_path) -> None:
        away = replace(SMALL, data={"single": ["nowhere/x"], "long": ["nowhere/x"]})
        ledger = Ledger("with-without-ttl", away, tmp_path)
        assert {cell.status for cell in ledger.cells()} == {"not run"}
        assert "is not a local path" in ledger.unavailable[0]

    def test_a_ledger_is_not_replaced_by_one_that_lacks_results(self, tmp_path) -> None:
        [ledger] = read_ledgers(["noise"], SMALL, tmp_path)
        facts = ledger.to_dict()
        facts["cells"][0] |= {"ours": 50.0, "seeds": 2}
        place = tmp_path / "ledger-tiny-noise.json"
        place.write_text(json.dumps([facts]))
        refused = dosapp("reproduce", "noise", "--ledger", "--out", tmp_path, code=2)
        assert "is kept, because 1 of its cells would have fewer seeds now" in refused.stderr
        assert "not run" in refused.stdout  # the ledger is still printed
        assert json.loads(place.read_text()) == [facts]
        cells = [{"row": "a", "ours": 1.0, "seeds": n} for n in (3, 2)]
        three, two = ([{"table": "t", "cells": [cell]}] for cell in cells)
        assert (count_lost_cells(three, two), count_lost_cells(two, three)) == (1, 0)

    def test_a_result_with_the_wrong_key_or_edited_by_hand_is_refused(self, tmp_path) -> None:
        name = "with-without-ttl"
        one, two = list_runs([name], replace(SMALL, seeds="0"))
        first, second = (
            tmp_path / outcome.result.key for outcome in run_grid([one, two], tmp_path)
        )
        whole = (first / "result.json").read_text()
        (first / "result.json").write_text((second / "result.json").read_text())
        with pytest.raises(InputError, match="is the result of another run"):
            Ledger(name, SMALL, tmp_path).cells()
        changed = json.loads(whole)
        changed["metrics"]["accuracy"] = 99.9
        (first / "result.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=r"states accuracy 99\.9, but its own matrix gives"):
            Ledger(name, SMALL, tmp_path).cells()

    def test_datasets_on_which_the_paper_contradicts_its_claims(self) -> None:
        contradicting = {
            (name, *claim): datasets
            for name, table in load_tables().items()
            for claim in table.claims
            if len(claim) == 3 and (datasets := table.contradicting_datasets(*claim))
        }
        assert contradicting == {
            ("main", "DoSAPP", "ZSCL", "accuracy"): ("cifar100",),
            ("main", "DoSAPP", "ZSCL", "forgetting"): ("cifar100",),
            ("main", "DoSAPP + ER=200", "SPU + ER", "accuracy"): ("gtsrb",),
            ("test-time", "SPU + D^u", "SPU + RMT", "accuracy"): ("aircraft", "cub"),
        }

    def test_are_excluded_from_the_verdict(self, tmp_path) -> None:
        scale = Scale.from_name("real-small")
        scale = replace(scale, settings={"backbone": "tiny", "data_dir": tmp_path}, seeds="0")
        ledger = Ledger("main", scale, tmp_path)
        assert ledger.verdicts()[4].excluded == ("cifar100",)
        claim = "DoSAPP better than ZSCL in accuracy (but in the paper not on cifar100)"
        assert claim in "".join(ledger.claim_lines())

    def test_accuracy_on_earlier_tasks_before_and_after_the_stream(self, tmp_path) -> None:
        run_grid(list_runs(["ttl-before-after"], SMALL), tmp_path)
        ledger = Ledger("ttl-before-after", SMALL, tmp_path)
        cells = ledger.cells()
        assert [len(cell.values) for cell in cells[:4]] == [2, 2, 2, 2]
        assert cells[4].values == []  # there are only two sessions
        assert cells[4].status == "not at this scale"
        assert ledger.verdicts()[0].pairs == 2

    @pytest.mark.parametrize(
        ("differences", "metric", "outcome"),
        [
            ([2.0, 2.5, 3.0], "accuracy", "agrees"),
            ([2.0, 2.5, 3.0], "forgetting", "disagrees"),
            ([-2.0, -2.5, -3.0], "forgetting", "agrees"),
            ([2.0, -2.5, 3.0], "accuracy", "within noise"),
            ([2.0], "accuracy", "too few"),
            ([], "accuracy", "not run"),
        ],
    )
    def test_a_claim_is_judged_by_the_interval_of_paired_differences(
        self, differences, metric, outcome
    ) -> None:
        assert judge_claim("a", "b", metric, differences).outcome == outcome

    def test_the_interval_uses_students_t(self) -> None:
        verdict = judge_claim("a", "b", "accuracy", [1.0, 2.0, 3.0])
        assert verdict.difference == 2.0
        assert verdict.half_interval == pytest.approx(4.30 * 1 / math.sqrt(3))

    def test_at_the_papers_scale_a_cell_is_reproduced_or_differs(self) -> None:
        other: dict[str, object] = {}

        def status(ours: list[float], published: float | None, **more: str) -> str:
            results = [make_result("DoSAPP", n, value, 1.0) for n, value in enumerate(ours)]
            tasks = [{"train": 5994, "test": 2900}]  # of 5794, halved class by class
            real = {"tasks": tasks, "backbone": {"name": "here/ViT-B-16"}, **other}
            results = [result.model_copy(update=real) for result in results]
            row = Row("DoSAPP", {}, {}, **more)
            return Cell(row, "cub", "accuracy", published, results, RunSettings(), 2, True).status

        assert status([39.0, 39.6], 39.14) == "reproduced"
        assert status([30.0, 30.5], 39.14) == "differs"
        assert status([], 39.14) == "not run"
        assert status([39.0], 39.14, inconsistent="why") == "paper inconsistent"
        assert status([39.0], None, inconsistent="why") == "not published"
        assert status([39.0], 39.14) == "run with 1 of 2 seeds"
        assert status([36.5, 41.0], 39.14) == "reproduced"
        assert status([20.0, 52.0], 39.14) == "differs"  # a wide interval is capped
        other = {"backbone": {"name": "tiny"}}
        assert status([39.0], 39.14) == "run with another backbone"
        for counts in ({"train": 800, "test": 2900}, {"train": 5994, "test": 800}):
            other = {"tasks": [counts]}
            assert status([39.0], 39.14) == "run with another number of images"

    def test_other_definitions_or_tasks_are_not_compared(self) -> None:
        one, two = make_result("A", 0, 1, 1), make_result("B", 0, 1, 1)
        check_paired(one, two)
        with pytest.raises(InputError, match="define their metrics differently"):
            check_paired(
                one.model_copy(update={"definitions": {"forgetting": "x"}}),
                two.model_copy(update={"definitions": {"forgetting": "y"}}),
            )
        with pytest.raises(InputError, match="different tasks"):
            check_paired(one, two.model_copy(update={"tasks": [{"classes": ["a"]}]}))

    def test_a_metric_by_session_or_over_all_but_the_first(self) -> None:
        line = {"before": [90.0, 60.0, 50.0], "after": [90.0, 70.0, 60.0]}
        result = make_result("A", 0, 1, 1).model_copy(update={"previous_tasks": line})
        assert read_metric(result, "previous_tasks.after", 1) == 70
        assert read_metric(result, "previous_tasks.before") == 55
        assert read_metric(result, "previous_tasks.before", 7) is None


def test_published_forgetting_is_compared_by_both_definitions(tmp_path) -> None:
    run_grid(list_runs(["with-without-ttl"], SMALL), tmp_path)
    ledger = Ledger("with-without-ttl", SMALL, tmp_path)
    rows = [replace(row, published={"shapes": [50.0, 10.0]}) for row in TTL.rows]
    ledger.table = replace(TTL, metrics=["accuracy", "forgetting"], rows=rows)
    stored = ledger.cells()[2].results
    errors = ledger.forgetting_errors()
    for name, values in errors.items():
        assert values[1] == pytest.approx(np.mean([r.metrics[name] for r in stored]) - 10.0)
    lines = compare_forgetting([ledger])
    best = min(errors, key=lambda name: np.mean(np.abs(errors[name])))
    expected = {"forgetting": "The paper's formula fits", "forgetting_spu": "SPU's code fits"}
    assert expected[best] in "\n".join(lines)
    assert compare_forgetting([Ledger("with-without-ttl", SMALL, tmp_path)]) == []


def test_published_numbers_say_whose_weights_they_are_of(tmp_path) -> None:
    scale = Scale.from_name("paper")
    scale = replace(scale, settings={**scale.settings, "backbone": "tiny", "data_dir": tmp_path})
    text = Ledger("noise", scale, tmp_path).markdown()
    assert "Published: CLIP ViT-B/16 with OpenAI's weights. Ours: not run." in text
    assert "OpenAI" not in Ledger("noise", SMALL, tmp_path).markdown()


class TestUninformative:
    """A claim is not judged where nothing was learned or nothing can be learned."""

    @staticmethod
    def result(method: str, R: list[list[float | None]], zero_shot: float = 40.0) -> Result:
        accuracy = float(np.mean(R[-1]))
        result = make_result(method, 0, accuracy, None)
        metrics = {**result.metrics, "zero_shot_accuracy": zero_shot}
        return result.model_copy(update={"R": R, "metrics": metrics})

    def test_an_expert_that_never_left_zero_shot(self) -> None:
        zero_shot = {0: self.result("zero-shot", [[60.0, None], [50.0, 30.0]])}
        stuck = self.result("dosapp", [[60.5, None], [50.5, 30.0]])
        moved = self.result("dosapp", [[80.0, None], [50.0, 30.0]])  # the same at the end
        assert find_uninformative([stuck], zero_shot, {}) == "dosapp never left zero-shot"
        assert find_uninformative([moved, zero_shot[0]], zero_shot, {}) == ""
        assert find_uninformative([stuck], {}, {}) == ""  # not known

    def test_joint_training_that_gains_nothing(self) -> None:
        moved = self.result("dosapp", [[80.0, None], [50.0, 30.0]])
        assert "joint training gains 2.0 points" in find_uninformative(
            [moved], {}, {0: self.result("joint", [[42.0, 42.0]])}
        )
        assert find_uninformative([moved], {}, {0: self.result("joint", [[70.0, 70.0]])}) == ""

    def test_such_claims_are_not_counted(self, tmp_path) -> None:
        """Momenta of 1 keep the teacher, which answers, at zero-shot."""
        still = {"method": "dosapp", "options": {"gamma": 1.0, "lam": 1.0, "delta": 1.0}}
        rows = [replace(row, settings={**row.settings, **still}) for row in TTL.rows]
        ledger = Ledger("with-without-ttl", SMALL, tmp_path)
        ledger.table = replace(TTL, rows=rows)
        wanted = [Row("zero-shot", {"method": "zero-shot"}, {}), *rows]
        run_grid([run for row in wanted for run in SMALL.runs(row, "shapes")], tmp_path)
        [verdict, *_] = ledger.verdicts()
        assert (verdict.outcome, verdict.pairs) == ("uninformative", 0)
        assert "never left zero-shot" in ledger.markdown()


def test_the_command_prints_the_ledger_and_writes_it(tmp_path) -> None:
    listed = dosapp("reproduce", "--list").stdout
    assert all(name in listed for name in load_tables())
    printed = dosapp("reproduce", "noise", "--ledger", "--out", tmp_path)
    assert "not run" in printed.stdout
    facts = json.loads((tmp_path / "ledger-tiny-noise.json").read_text())
    assert facts[0]["table"] == "noise"
    assert "clean, noise" in (tmp_path / "ledger-tiny-noise.md").read_text()
    commands = dosapp("reproduce", "noise", "--dry-run", "--seeds", "0").stdout.splitlines()
    assert len(commands) == 4
    assert "--stream-noise 0.1" in commands[1]
