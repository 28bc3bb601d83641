"""The paper's tables as data, the runs they become, and a ledger that cannot invent a number."""

import json
import math
import shlex
from dataclasses import replace

import pytest

from dosapp.data.paper_sets.datasets import PaperDataset
from dosapp.errors import InputError
from dosapp.experiments.costs import estimate
from dosapp.experiments.grid import run_grid
from dosapp.experiments.plan import plan
from dosapp.experiments.ray_cluster import needs_gpu
from dosapp.experiments.result import check_paired
from dosapp.paper.ledger import lost, open_ledgers
from dosapp.paper.ledger.cells import Cell, value_of
from dosapp.paper.ledger.table import Ledger
from dosapp.paper.ledger.verdicts import judge_claim
from dosapp.paper.reproduce import Row, Scale, command, runs, table, tables, timed_runs
from dosapp.settings import RunSettings
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


class TestTables:
    def test_every_row_has_a_value_for_every_dataset_and_metric(self) -> None:
        for known in tables().values():
            for row in known.rows:
                assert set(row.values) == set(known.data), (known.name, row.name)
                assert all(len(v) == len(known.metrics) for v in row.values.values())

    def test_claims_are_about_rows_that_are_there(self) -> None:
        for known in tables().values():
            assert known.claims
            for better, than, *_ in known.claims:
                assert known.row(better)
                assert known.row(than)

    def test_a_few_numbers_as_printed(self) -> None:
        assert table("main").row("DoSAPP").values["gtsrb"] == [72.33, 1.02]
        assert table("test-time").row("SPU + RMT").values["cars"] == [62.32, 21.95]
        assert table("sparsity").row("0.3").values["cifar100"] == [80.91]
        assert table("long-sequence").row("SPU").values["aircraft+cars"][1] == 24.31

    def test_what_the_paper_says_twice_it_says_alike(self) -> None:
        ours = table("main").row("DoSAPP").values
        for name in ("test-time", "ablation", "teacher-labels", "full-test-set"):
            assert table(name).row("DoSAPP").values == ours
        assert table("main").row("SPU").values == table("test-time").row("SPU").values

    def test_an_unknown_one_is_a_sentence(self) -> None:
        with pytest.raises(InputError, match=r"unknown table 'mian'.*did you mean 'main'"):
            table("mian")
        with pytest.raises(InputError, match="unknown scale 'huge'"):
            Scale.named("huge")


class TestRuns:
    def test_shared_cells_are_one_run(self) -> None:
        tiny = Scale.named("tiny")
        alone = [len(runs([name], tiny)) for name in ("main", "test-time")]
        both = len(runs(["main", "test-time"], tiny))
        assert both == sum(alone) - 2 * 3  # SPU and DoSAPP are in both, three seeds each

    def test_at_the_papers_scale_the_data_are_the_papers(self) -> None:
        size = replace(Scale.named("paper"), references="x.csv")
        planned = runs(["main"], size)
        assert {one.data for one in planned} == {"aircraft", "cars", "cifar100", "cub", "gtsrb"}
        assert {one.memory for one in planned} == {0, 200, 1000}
        assert len(planned) == 15 * 5 * 5

    def test_zscl_without_references_is_left_out_and_the_others_are_not(self, tmp_path) -> None:
        size = Scale.named("paper")
        assert len(runs(["main"], size)) == 14 * 5 * 5
        book = Ledger(
            "main", replace(size, settings={**size.settings, "data_dir": tmp_path}), tmp_path
        )
        [cell, *_] = [cell for cell in book.cells() if cell.row.name == "ZSCL"]
        assert cell.status == "not run"
        assert any("'ZSCL' needs reference pictures" in reason for reason in book.reasons)

    def test_at_the_papers_scale_baselines_have_their_own_rates(self) -> None:
        found = {one.method: (one.lr, one.epochs) for one in runs(["main"], Scale.named("paper"))}
        assert found["dosapp"] == found["spu"] == found["flyp"] == (7.5e-6, 10)
        assert (found["lwf"], found["sparcl"], found["l2p"]) == ((1e-6, 5), (5e-6, 20), (7.5e-3, 5))

    def test_at_the_papers_scale_a_gpu_is_used_if_there_is_one(self) -> None:
        [one, *_] = runs(["noise"], Scale.named("paper"))
        assert one.device == "auto"
        assert needs_gpu(one)
        assert not needs_gpu(RunSettings())

    def test_rates_are_of_a_dataset(self) -> None:
        size = Scale.named("real-small")
        rates = {one.data: one.lr for one in runs(["sparsity"], size)}
        assert rates == {name: size.rates[name]["dosapp"] for name in ("cifar100", "gtsrb")}
        assert len(set(rates.values())) == 2

    def test_every_command_is_one_that_run_accepts(self, tmp_path) -> None:
        """Typed again, the command of a cell gives the same result under the same key."""
        (one, *_) = SMALL.runs(table("ablation").rows[3], "shapes")
        words = shlex.split(command(one))
        assert words[:2] == ["dosapp", "run"]
        said = dosapp(*words[1:], "--out", tmp_path / "x", "--json")
        assert json.loads(said.stdout)[0]["key"] == plan(one).key

    def test_a_command_holds_everything_that_is_not_the_default(self) -> None:
        settings = RunSettings(method="spu", stream=False, options={"sparsity": 0.3}, seed=2)
        rate = f"{settings.rate:g}"  # tuning again does not change what a command means
        said = f"dosapp run --method spu --seed 2 --lr {rate} --no-stream --set sparsity=0.3"
        assert command(settings) == said


class TestTime:
    def test_is_measured_in_turns_once_and_read_afterwards(self, tmp_path) -> None:
        [empty] = open_ledgers(["time"], SMALL, tmp_path)
        assert "not run" in empty.markdown()
        assert [v.said for v in empty.verdicts()] == ["not run", "not run"]
        first = open_ledgers(["time"], SMALL, tmp_path, measure=True)[0].facts()
        assert {row["row"]: len(row["seconds"]) for row in first["rows"]} == {
            "all parameters": 2,
            "DoSAPP": 2,
            "SPU + RMT": 2,
        }
        assert all(row["command"] and row["stream"] and row["finished"] for row in first["rows"])
        assert all(row["status"] == "run" and row["paper"] is None for row in first["rows"])
        assert [claim["pairs"] for claim in first["claims"]] == [2, 2]
        [again] = open_ledgers(["time"], SMALL, tmp_path)
        assert again.facts() == first
        assert "(1.00)" in again.markdown()
        assert "DoSAPP better than all parameters in seconds" in again.markdown()

    def test_at_the_papers_scale_ratios_are_set_against_the_papers(self, tmp_path) -> None:
        size = Scale.named("paper")
        [book] = open_ledgers(
            ["time"], replace(size, settings={**size.settings, "data_dir": tmp_path}), tmp_path
        )
        assert [row["status"] for row in book.times()] == ["not run"] * 3  # nor is it an error
        assert book.unread
        seconds = {"all parameters": [1.0, 1.1], "DoSAPP": [1.0, 1.0], "SPU + RMT": [2.0, 2.0]}
        images = PaperDataset.from_name(timed_runs(size)["DoSAPP"].data).images
        tasks = [{"train": images["train"], "test": images["test"] // 2}]
        book.measured = {"seconds": seconds, "backbone": "ViT-B-16", "tasks": tasks}
        assert [row["status"] for row in book.times()] == ["reproduced", "reproduced", "differs"]
        book.measured["backbone"] = "tiny"
        assert {row["status"] for row in book.times()} == {"run with another backbone"}
        assert {row["difference"] for row in book.times()} == {None}
        assert sum(book.times()[1]["paper_seconds"]) == pytest.approx(1016.35)
        assert "| paper | (1.03) | (1.00) | (1.03) |" in book.markdown()

    def test_a_dry_run_names_what_is_timed(self) -> None:
        said = dosapp("reproduce", "time", "--dry-run")
        assert len(said.stdout.splitlines()) == 3
        assert "3 run(s)" in said.stderr

    def test_an_estimate_is_a_few_steps_times_all_of_them(self) -> None:
        few = estimate(runs(["with-without-ttl"], SMALL))
        many = estimate(runs(["with-without-ttl"], replace(SMALL, seeds="0-7")))
        assert (few.runs, many.runs) == (4, 16)
        assert many.seconds > 2 * few.seconds > 0


def test_the_forgetting_maps_are_drawn_from_stored_results(tmp_path) -> None:
    [book] = open_ledgers(["forgetting-maps"], SMALL, tmp_path)
    book.draw(tmp_path / "maps")
    assert not (tmp_path / "maps.png").exists()
    run_grid(runs(["forgetting-maps"], replace(SMALL, seeds="0")), tmp_path)
    [book] = open_ledgers(["forgetting-maps"], replace(SMALL, seeds="0"), tmp_path)
    book.draw(tmp_path / "maps")
    assert (tmp_path / "maps.png").stat().st_size > 5000


class TestLedger:
    def test_is_filled_from_stored_results_and_nothing_else(self, tmp_path) -> None:
        name = "with-without-ttl"
        empty = Ledger(name, SMALL, tmp_path)
        assert {cell.status for cell in empty.cells()} == {"not run"}
        assert {v.said for v in empty.verdicts()} == {"not run"}
        run_grid(runs([name], SMALL), tmp_path)
        full = Ledger(name, SMALL, tmp_path)
        facts = full.facts()
        assert [c["seeds"] for c in facts["cells"]] == [2, 2]
        assert all(c["paper"] is None and c["difference"] is None for c in facts["cells"])
        assert all(len(c["stream"]) == 2 and c["command"] for c in facts["cells"])
        assert facts["cells"][1]["steps"] == [2, 3]
        assert facts["claims"][0]["pairs"] == 2
        text = full.markdown()
        assert "DoSAPP better than DoSAPP without TTL in accuracy" in text
        assert "39.14" not in text  # the paper's numbers are for the paper's scale

    def test_what_cannot_be_opened_here_was_not_run_here(self, tmp_path) -> None:
        away = replace(SMALL, data={"single": ["nowhere/x"], "long": ["nowhere/x"]})
        book = Ledger("with-without-ttl", away, tmp_path)
        assert {cell.status for cell in book.cells()} == {"not run"}
        assert "is not here" in book.unread[0]

    def test_a_ledger_is_not_replaced_by_one_that_lacks_results(self, tmp_path) -> None:
        [book] = open_ledgers(["noise"], SMALL, tmp_path)
        facts = book.facts()
        facts["cells"][0] |= {"ours": 50.0, "seeds": 2}
        place = tmp_path / "ledger-tiny-noise.json"
        place.write_text(json.dumps([facts]))
        refused = dosapp("reproduce", "noise", "--ledger", "--out", tmp_path, code=2)
        assert "stays as it is, since 1 of its cells would have fewer seeds now" in refused.stderr
        assert "not run" in refused.stdout  # what is there is shown
        assert json.loads(place.read_text()) == [facts]
        cells = [{"row": "a", "ours": 1.0, "seeds": n} for n in (3, 2)]
        three, two = ([{"table": "t", "cells": [cell]}] for cell in cells)
        assert (lost(three, two), lost(two, three)) == (1, 0)

    def test_a_file_under_the_wrong_key_or_changed_by_hand_fills_no_cell(self, tmp_path) -> None:
        name = "with-without-ttl"
        one, two = runs([name], replace(SMALL, seeds="0"))
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
        with pytest.raises(InputError, match=r"says accuracy 99\.9, but its own matrix gives"):
            Ledger(name, SMALL, tmp_path).cells()

    def test_a_claim_is_the_papers_only_where_its_own_numbers_say_so(self) -> None:
        found = {
            (name, *claim): besides
            for name, known in tables().items()
            for claim in known.claims
            if len(claim) == 3 and (besides := known.contradicted(*claim))
        }
        assert found == {
            ("main", "DoSAPP", "ZSCL", "accuracy"): ("cifar100",),
            ("main", "DoSAPP", "ZSCL", "forgetting"): ("cifar100",),
            ("main", "DoSAPP + ER=200", "SPU + ER", "accuracy"): ("gtsrb",),
            ("test-time", "SPU + D^u", "SPU + RMT", "accuracy"): ("aircraft", "cub"),
        }

    def test_and_is_not_judged_elsewhere(self, tmp_path) -> None:
        book = Ledger("main", Scale.named("real-small"), tmp_path)
        book._results = lambda row, data: {}
        assert book.verdicts()[4].besides == ("cifar100",)
        said = "DoSAPP better than ZSCL in accuracy (but in the paper not on cifar100)"
        assert said in "".join(book._claims())

    def test_earlier_tasks_before_and_after(self, tmp_path) -> None:
        run_grid(runs(["ttl-before-after"], SMALL), tmp_path)
        book = Ledger("ttl-before-after", SMALL, tmp_path)
        cells = book.cells()
        assert [len(cell.values) for cell in cells[:4]] == [2, 2, 2, 2]
        assert cells[4].values == []  # there are only two sessions
        assert cells[4].status == "not at this scale"
        assert book.verdicts()[0].pairs == 2

    @pytest.mark.parametrize(
        ("differences", "metric", "said"),
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
        self, differences, metric, said
    ) -> None:
        assert judge_claim("a", "b", metric, differences).said == said

    def test_the_interval_is_students(self) -> None:
        verdict = judge_claim("a", "b", "accuracy", [1.0, 2.0, 3.0])
        assert verdict.difference == 2.0
        assert verdict.half == pytest.approx(4.30 * 1 / math.sqrt(3))

    def test_at_the_papers_scale_a_cell_is_reproduced_or_differs(self) -> None:
        other: dict[str, object] = {}

        def status(ours: list[float], published: float | None, **more: str) -> str:
            found = [make_result("DoSAPP", n, value, 1.0) for n, value in enumerate(ours)]
            tasks = [{"train": 5994, "test": 2900}]  # of 5794, halved class by class
            real = {"tasks": tasks, "backbone": {"name": "here/ViT-B-16"}, **other}
            found = [result.model_copy(update=real) for result in found]
            row = Row("DoSAPP", {}, {}, **more)
            return Cell(row, "cub", "accuracy", published, found, RunSettings(), 2, True).status

        assert status([39.0, 39.6], 39.14) == "reproduced"
        assert status([30.0, 30.5], 39.14) == "differs"
        assert status([], 39.14) == "not run"
        assert status([39.0], 39.14, inconsistent="why") == "paper inconsistent"
        assert status([39.0], None, inconsistent="why") == "not published"
        assert status([39.0], 39.14) == "run with 1 of 2 seeds"
        assert status([36.5, 41.0], 39.14) == "reproduced"
        assert status([20.0, 52.0], 39.14) == "differs"  # noise does not make it right
        other = {"backbone": {"name": "tiny"}}
        assert status([39.0], 39.14) == "run with another backbone"
        for counts in ({"train": 800, "test": 2900}, {"train": 5994, "test": 800}):
            other = {"tasks": [counts]}
            assert status([39.0], 39.14) == "run with another number of pictures"

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
        assert value_of(result, "previous_tasks.after", 1) == 70
        assert value_of(result, "previous_tasks.before") == 55
        assert value_of(result, "previous_tasks.before", 7) is None


def test_the_command_prints_the_ledger_and_writes_it(tmp_path) -> None:
    listed = dosapp("reproduce", "--list").stdout
    assert all(name in listed for name in tables())
    said = dosapp("reproduce", "noise", "--ledger", "--out", tmp_path)
    assert "not run" in said.stdout
    facts = json.loads((tmp_path / "ledger-tiny-noise.json").read_text())
    assert facts[0]["table"] == "noise"
    assert "clean, noise" in (tmp_path / "ledger-tiny-noise.md").read_text()
    commands = dosapp("reproduce", "noise", "--dry-run", "--seeds", "0").stdout.splitlines()
    assert len(commands) == 4
    assert "--stream-noise 0.1" in commands[1]
