"""What the documents promise, done."""

import contextlib
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml
from PIL import Image

from dosapp import METHODS, Learner
from dosapp.backbones.registry import TINY
from dosapp.experiments.grid import read_grid, select_results
from dosapp.experiments.metrics import DEFINITIONS, MATRIX_METRICS, previous_tasks
from dosapp.experiments.result import Result
from dosapp.experiments.store import read_results
from dosapp.experiments.study import Study
from dosapp.experiments.tracking import TRACKERS
from dosapp.learner.export import export
from dosapp.paper.ledger import format_ledgers, read_ledgers
from dosapp.paper.reproduce import Scale, load_tables
from dosapp.report import speed
from dosapp.report.tables import (
    COLUMNS,
    WITH_COSTS,
    abilities_table,
    build_rows,
    paired_differences,
    stream_statistics,
    to_markdown,
)
from dosapp.testing import check_method
from support.cli import FLAGS, dosapp
from support.documents import ROOT, blocks, serving, shell_commands
from support.settings import SMALL, shared_only

README = (ROOT / "README.md").read_text()


def test_the_two_commands_are_the_makefiles() -> None:
    makes = [words[1] for words in shell_commands(README) if words[0] == "make"]
    assert makes == ["demo", "test"]
    for target in makes:
        assert f"\n{target}: " in (ROOT / "Makefile").read_text()


def test_every_dosapp_command_runs(tmp_path, monkeypatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    Image.new("RGB", (50, 40), (200, 90, 10)).save(tmp_path / "fox.jpg")
    extra = {"run": FLAGS, "grid": ["--dry-run"]}
    with contextlib.ExitStack() as stack:
        for program, command, *words in (c for c in shell_commands(README) if len(c) > 1):
            if program != "dosapp":
                continue
            if command == "serve":  # it goes on while the commands after it are tried
                monkeypatch.setenv("DOSAPP_URL", stack.enter_context(serving(words, tmp_path)))
                continue
            dosapp(command, *words, *extra.get(command, []), cwd=tmp_path)
    assert (tmp_path / "runs/x/result.json").exists()
    assert (tmp_path / "report/report.html").exists()


def test_the_python_example_learns(tmp_path, monkeypatch, capsys) -> None:
    """Zero-shot accuracy on its first ten classes is 78 %."""
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(README, "python")
    space: dict[str, object] = {}
    exec(code, space)  # our own README
    printed = re.findall(r"session \d: (\d+)%", capsys.readouterr().out)
    assert len(printed) == 2
    assert all(int(accuracy) >= 90 for accuracy in printed)
    assert Learner.load("shapes-learner").digest() == space["learner"].digest()


def test_the_method_of_the_guide_passes_every_check() -> None:
    (code,) = blocks((ROOT / "CONTRIBUTING.md").read_text(), "python")
    space: dict[str, object] = {}
    exec(code, space)
    check_method(space["ConfidentSelfTraining"], {"threshold": 0.2})


def test_the_examples_of_your_own_run(trained, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    exec(*blocks((ROOT / "CONTRIBUTING.md").read_text(), "python"), space)
    extend, use_onnx = blocks((ROOT / "docs" / "your-own.md").read_text(), "python")
    with contextlib.ExitStack() as stack:
        for registry in (METHODS, MATRIX_METRICS, DEFINITIONS, TRACKERS):
            stack.enter_context(mock.patch.dict(registry))
        exec(extend.replace("tasks=5", f"**{SMALL}"), space)
    *logged, worst = capsys.readouterr().out.splitlines()
    assert logged[0].startswith("1 {'session': 1, 'loss': ")
    assert 0 <= float(worst) <= 100
    learner, scenario = Learner(), trained[1]
    learner.learn(scenario.session(0))
    export(learner, Path("out"))
    pixels = scenario.tasks[0].test.read(range(4))
    space["pixels"] = pixels.numpy()
    exec(use_onnx, space)
    assert space["names"] == [prediction.label for prediction in learner.predict(pixels)]


def test_the_examples_for_scikit_learn_and_river_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for code in blocks((ROOT / "docs" / "integrations.md").read_text(), "python"):
        exec(code, {})
    printed = capsys.readouterr().out
    assert "(16, 4) " in printed
    assert "[16] Accuracy: " in printed
    assert len(Learner.load("colours").classes) == 4


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_lines_are_short(name) -> None:
    lines = (ROOT / name).read_text().splitlines()
    assert [line for line in lines if len(line) > 100] == []


def test_the_table_of_the_readme_is_the_reports() -> None:
    stored = read_results([ROOT / "results" / "hard"])
    rows = build_rows(select_results(ROOT / "configs" / "headline.yaml", stored))
    assert [len(row.results) for row in rows] == [3] * 9
    assert to_markdown(rows) in README


def test_the_architecture_names_every_module() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "dosapp"
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        if path.name.startswith("__") or parts[0] in (
            "bench",
            "drills",
            "cli",
            "methods",
            "testing",
        ):
            continue
        if parts[:2] in (("data", "paper_sets"), ("data", "synthetic"), ("paper", "ledger")):
            continue
        assert re.search(rf"\b{path.stem}\b", page), path


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda f: f.stem)
def test_every_config_opens_with_its_command_and_can_be_planned(file: Path) -> None:
    text, is_study = file.read_text(), file.name.startswith("study-")
    command = "study" if is_study else "grid"
    assert text.startswith(f"# dosapp {command} configs/{file.name}")
    assert list(Study.read(file).runs(held_out=True)) if is_study else read_grid(file)


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!http|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_result_format_is_described() -> None:
    text = (ROOT / "docs" / "result-format.md").read_text()
    for name in Result.model_fields:
        assert f"`{name}`" in text, name
    assert "forgetting" in DEFINITIONS


def test_the_notes_on_the_paper_name_tests_that_exist() -> None:
    page = (ROOT / "docs" / "paper-notes.md").read_text()
    tests = "\n".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(Test\w+|test_\w+)…?`", page)
    assert len(names) > 8
    for name in names:
        assert re.search(rf"(class|def) {name}", tests), name


def test_committed_results_are_whole_and_of_this_format() -> None:
    files = sorted((ROOT / "results").rglob("result.json"))
    for file in files:
        assert Result.read(file).key == file.parent.name


@pytest.mark.parametrize(
    "store", ["foundation", "hard", "mitigations", "probe", "real-small", "tiny"]
)
def test_committed_numbers_are_those_of_their_matrices(store) -> None:
    """By today's formulas: a definition cannot change and leave old numbers behind."""
    for result in read_results([ROOT / "results" / store]):
        R = np.array(result.R, dtype=float)
        for name, formula in MATRIX_METRICS.items():
            assert result.metrics[name] == pytest.approx(number(formula(R))), name
        for when, said in result.previous_tasks.items():
            measured = np.array(result.matrices[result.evaluated][when], dtype=float)
            assert said == pytest.approx(previous_tasks(measured))


def number(value: float) -> float | None:
    return None if np.isnan(value) else value


def test_the_tables_in_the_docs_are_the_reports() -> None:
    page = (ROOT / "docs" / "does-it-work.md").read_text()
    main, probe = (
        build_rows(read_results([ROOT / "results" / name])) for name in ("foundation", "probe")
    )
    for table in (
        to_markdown(main),
        paired_differences(main, "DoSAPP"),
        stream_statistics(main),
        to_markdown(probe),
    ):
        assert table in page


@pytest.mark.parametrize(
    ("page", "grid", "store"),
    [
        ("does-it-work", "hard", "hard"),
        ("does-it-work", "real", "real-small"),
        ("does-it-work", "real-batch-16", "real-small"),
        ("does-it-work", "real-gtsrb", "real-small"),
        ("beyond", "baselines", "hard"),
        ("beyond", "session-drift", "hard"),
        ("readings", "readings", "hard"),
    ],
)
def test_tables_of_a_grid_are_the_reports(page, grid, store) -> None:
    stored = read_results([ROOT / "results" / store])
    table = build_rows(select_results(ROOT / "configs" / f"{grid}.yaml", stored))
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert to_markdown(table) in text
    if grid in ("hard", "real"):
        assert paired_differences(table, "DoSAPP") in text


def test_the_tables_of_methods_are_the_reports() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()

    def table(name: str, store: str, *, only: str = ""):
        found = select_results(
            ROOT / "configs" / f"{name}.yaml", read_results([ROOT / "results" / store])
        )
        return build_rows(
            [r for r in found if not only or r.settings[only] or not r.settings["stream"]]
        )

    every = table("methods", "tiny")
    assert to_markdown(every, WITH_COSTS) in page
    assert abilities_table() in page
    short = {name: COLUMNS[name] for name in ("accuracy", "forgetting")}
    for only in ("imbalanced", "one_class"):
        part = table("mitigations", "mitigations", only=only)
        assert all(len(row.results) == 5 for row in part)
        assert to_markdown(part, short) in page
        assert paired_differences(part, "DoSAPP") in page


def test_the_tables_of_speed_are_what_was_measured() -> None:
    """From the committed files of the benchmark."""
    large, middle = (
        json.loads((ROOT / "results" / "bench" / name / "bench.json").read_text())
        for name in (".", "middle")
    )
    assert (large["model"], middle["model"]) == ("ViT-B-16", "middle")
    page = (ROOT / "docs" / "performance.md").read_text()
    assert speed.format_ratios(large) in page
    for name, value in large["more"].items():
        assert f"| {name} | {value:.3f} |" in page
    assert speed.format_growth(middle["growth"]) in page


def test_every_method_has_its_paragraph() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    for name in METHODS:
        assert re.search(rf"\*\*{name}\*\*", page), name


def test_shipped_rates_say_where_they_come_from() -> None:
    assert (TINY / "rates.yaml").read_text().startswith("# dosapp tune")
    rates = yaml.safe_load((TINY / "rates.yaml").read_text())
    for name in ("stream-gda", "stream-gda-ensemble"):
        assert rates["rates"].pop(name) == rates["rates"]["dosapp"]  # they train as DoSAPP
    assert set(rates["rates"]) == set(rates["seen"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:momenta")  # the ablations want them so
def test_the_committed_ledger_is_what_the_store_says(tmp_path) -> None:
    """Every cell again from stored results; nothing is computed and nothing is copied."""
    scale = Scale.from_name("tiny")
    wanted = format_ledgers(read_ledgers(list(load_tables()), scale, ROOT / "results" / "tiny"))
    assert (ROOT / "results" / "tiny" / "ledger-tiny.md").read_text() == wanted
    assert "not run" not in wanted


@shared_only
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*results cannot be compared with published ones")
def test_the_ledgers_of_real_images_are_what_the_store_says(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)  # the scale's paths are relative to it
    scale, store = Scale.from_name("real-small"), ROOT / "results" / "real-small"
    for file in store.glob("ledger-real-small-*.md"):
        name = file.stem.removeprefix("ledger-real-small-")
        assert file.read_text() == format_ledgers(read_ledgers([name], scale, store))


def test_the_page_counts_the_claims_as_the_ledger_does() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text()
    files = [ROOT / "results/tiny/ledger-tiny.json", *ROOT.glob("results/real-small/ledger-*.json")]
    for ledger in (ledger for file in files for ledger in json.loads(file.read_text())):
        outcomes = [claim["said"] for claim in ledger.get("claims", [])]
        if outcomes:
            words = ("agrees", "within noise", "disagrees", "uninformative")
            counts = [outcomes.count(word) for word in words]
            line = " | ".join([ledger["table"], *(str(count or "") for count in counts)])
            assert re.sub(" +", " ", f"| {line} |") in page, line
