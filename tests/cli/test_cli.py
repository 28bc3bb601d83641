"""The commands of experiments and lists, exit codes, and flags under old and new names."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest
import yaml
from PIL import Image

from dosapp.cli.console import (
    describe_no_learning,
    describe_short_stream,
    describe_small_test,
    describe_tiny_backbone,
    print_results,
)
from dosapp.errors import (
    BusyError,
    CorruptRecordError,
    DivergedError,
    InputError,
    ReadOnlyError,
    StorageError,
    TooLargeError,
)
from dosapp.experiments.grid import parse_seeds, read_grid
from dosapp.methods.registry import METHODS, STAGES
from dosapp.paper.reproduce import Scale
from dosapp.runtime.extras import missing_extra
from dosapp.service.settings import ServiceSettings
from dosapp.settings import LearnerSettings, RunSettings
from support.cli import FLAGS, dosapp
from support.results import make_result
from support.settings import SMALL

ROOT = Path(__file__).parents[2]


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from dosapp.cli import app\n"
        "for arguments in (['--help'], ['run', '--help'], ['grid', '--help']):\n"
        "    assert CliRunner().invoke(app, arguments).exit_code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_run_writes_a_result_and_resumes(tmp_path) -> None:
    command = ["run", "--data", "shapes", "--method", "dosapp", "--seed", 0, *FLAGS]
    command += ["--out", "runs/x"]
    dosapp(*command, "--resume", cwd=tmp_path)  # starts if the folder does not exist
    result = json.loads((tmp_path / "runs/x/result.json").read_text())
    assert set(result["metrics"]) >= {
        "accuracy",
        "forgetting",
        "first_task_accuracy",
        "current_task_accuracy",
    }
    assert set(result["matrices"]) == {"teacher", "student"}
    again = dosapp(*command, cwd=tmp_path, code=2)
    assert again.stderr.count("\n") == 1
    assert "already holds a run; add --resume" in again.stderr
    assert json.loads(dosapp(*command, "--resume", "--json", cwd=tmp_path).stdout)[0] == result


def test_flags_override_a_settings_file(tmp_path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "method": "flyp", "buffer_size": 3, "seed": 4}))
    flags = ["--method", "spu", "--adapt", "self-training", "--buffer-size", 6]
    flags += ["--set", "sparsity=0.3"]
    done = dosapp("run", file, *flags, "--out", tmp_path / "r", "--json")
    settings = json.loads(done.stdout)[0]["settings"]
    assert (settings["method"], settings["buffer_size"], settings["seed"]) == ("spu", 6, 4)
    assert settings["options"] == {"sparsity": 0.3}
    assert "session 2/2" in done.stderr  # plain lines, since this is no terminal


def test_every_summary_fits_a_narrow_terminal_and_there_is_a_version() -> None:
    text = subprocess.run(
        [sys.executable, "-m", "dosapp", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": "80"},
    ).stdout
    assert "reproduce" in text
    assert "..." not in text.partition("Commands:")[2]
    assert re.fullmatch(r"dosapp \d+\.\d+\.\d+\n", dosapp("--version").stdout)


def test_a_dry_run_marks_finished_runs_and_needs_no_data(tmp_path) -> None:
    (tmp_path / "g.yaml").write_text(yaml.safe_dump({**SMALL, "method": ["zero-shot", "flyp"]}))
    dosapp("grid", tmp_path / "g.yaml", "--out", tmp_path, "--seeds", "0")
    shutil.rmtree(next(p.parent for p in tmp_path.rglob("result.json") if "FLYP" in p.read_text()))
    listed = dosapp("grid", tmp_path / "g.yaml", "--out", tmp_path, "--seeds", "0", "--dry-run")
    assert listed.stdout.splitlines() == ["zero-shot, shapes, seed 0, done", "FLYP, shapes, seed 0"]
    arguments = ("reproduce", "noise", "--scale", "real-small", "--dry-run", "--estimate")
    paper = dosapp(*arguments, cwd=tmp_path)
    seeds = parse_seeds(Scale.from_name("real-small").seeds)
    assert len(paper.stdout.splitlines()) == 4 * 2 * len(seeds)
    assert "cannot be estimated here: backbone folder" in paper.stderr


def test_lists_as_text_and_json() -> None:
    facts = json.loads(dosapp("methods", "--json").stdout)
    assert set(facts) == {*METHODS, *STAGES}
    assert facts["dosapp"]["settings"]["ema.gamma"] == 0.8
    assert facts["note"]["stores_data"]
    assert "--set sparsity=0.1" in dosapp("methods", "spu").stdout
    listed = dosapp("methods").stdout
    assert all(f"{name}  {method.summary[:20]}" in listed for name, method in METHODS.items())
    assert "stores images of the stream" in listed
    assert "memory_size=64" in listed
    assert "| DoSAPP | yes | yes | yes | yes | yes |" in dosapp("methods", "--abilities").stdout
    assert "signs" in json.loads(dosapp("datasets", "--json").stdout)
    assert "ViT-B-16" in dosapp("backbones").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--method doapp", "did you mean 'dosapp'"),
        ("--data shaps", "did you mean 'shapes'"),
        ("--data shapes+", "unknown dataset ''"),
        ("--tasks 500", "tasks is 500, but shapes has 6 classes"),
        ("--set sparsity=2", "dosapp: sparsity is 2"),
        ("--set sparsity", "write it as name=value"),
        ("--set colour=red", "unknown setting 'colour'"),
        ("--backbone ViT-B-16", "could not be loaded"),
        ("--stream-fraction 3", "stream_fraction is 3.0"),
        ("--data /nowhere/at/all", "does not exist"),
        ("--class-order /nowhere", "cannot be read"),
        ("--set sparsity=[", "cannot be read as a value"),
        ("--backbone tyni", "did you mean 'tiny'"),
    ],
)
def test_wrong_input_is_one_sentence_and_writes_nothing(
    arguments: str, message: str, tmp_path
) -> None:
    flags = ["--classes", "6"] if arguments.startswith("--tasks") else FLAGS
    done = dosapp("run", *flags, *arguments.split(), "--out", "x", cwd=tmp_path, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("dosapp: ")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "command", ["run --tasks two", "serve x --port two", "client predict x --top two"]
)
def test_a_value_of_a_wrong_type_is_named_with_its_flag(command: str, tmp_path) -> None:
    *_, flag, value = command.split()
    error = dosapp(*command.split(), cwd=tmp_path, code=2).stderr.splitlines()[-1]
    assert f"'{flag}'" in error
    assert f"'{value}'" in error


def test_an_unreadable_image_stops_a_run_before_it_trains(tmp_path) -> None:
    for name in ("cat", "dog", "emu"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for n in range(9):
            Image.new("RGB", (40, 40), (n * 20, 60, 90)).save(tmp_path / "pets" / name / f"{n}.png")
    command = ["run", "--data", "pets", "--tasks", 3, "--epochs", 1, "--batch-size", 4]
    dosapp(*command, "--out", "good", cwd=tmp_path)
    broken = tmp_path / "pets" / "emu" / "4.png"
    broken.write_bytes(broken.read_bytes()[:50])
    done = dosapp(*command, "--out", "bad", cwd=tmp_path, code=2)
    assert "emu/4.png' cannot be read" in done.stderr
    assert not (tmp_path / "bad").exists()


def test_unusual_momenta_are_a_note(tmp_path) -> None:
    done = dosapp("run", *FLAGS, "--set", "lam=0.5", "--out", "x", cwd=tmp_path)
    assert "note: momenta" in done.stderr


def test_pretraining_can_be_repeated(tmp_path) -> None:
    dosapp("pretrain", "--steps", 2, "--out", "mine", cwd=tmp_path)
    flags = ["--backbone", "mine", "--method", "zero-shot", "--out", "x"]
    assert "already" not in dosapp("run", *FLAGS, *flags, cwd=tmp_path).stderr


def test_a_broken_torchvision_is_ignored_or_explained(tmp_path) -> None:
    """Some users have one; if transformers cannot be imported, the error is one sentence."""
    folder = tmp_path / "site" / "torchvision"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    done = subprocess.run(
        [sys.executable, "-m", "dosapp", "run", *FLAGS, "--method", "zero-shot", "--out", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        timeout=300,
    )
    assert done.returncode in (0, 2)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or "pip uninstall torchvision" in done.stderr


def test_grid_and_report_print_where_they_wrote(tmp_path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(yaml.safe_dump({**SMALL, "method": ["zero-shot", "spu"], "seeds": "0-1"}))
    assert dosapp("grid", file, "--dry-run", cwd=tmp_path).stdout.count("\n") == 4
    first = dosapp("grid", file, cwd=tmp_path)
    assert "4/4" in first.stderr
    stamps = [p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("result.json"))]
    dosapp("grid", file, cwd=tmp_path)
    assert [p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("result.json"))] == stamps
    done = dosapp("report", "runs", "--out", "r", cwd=tmp_path)
    assert "r/report.html" in done.stdout
    page = (tmp_path / "r/report.html").read_text()
    assert "SPU" in page
    assert page.count("<svg") >= 2
    assert not re.findall(r"(?:src|href)=.https?:", page)  # works offline
    assert (tmp_path / "r/accuracy.png").stat().st_size > 10_000
    assert "±" in (tmp_path / "r/report.md").read_text()


COMMANDS = {"run": RunSettings, "new": LearnerSettings, "serve": ServiceSettings}
ALIASES = [(command, old) for command, model in COMMANDS.items() for old in model.aliases]
EXAMPLES = {bool: True, int: 7, float: 0.5, str: "a {}", Path: "folder"}


@pytest.mark.parametrize(("command", "old"), ALIASES)
def test_names_of_version_0_1_give_the_same_settings(command, old, settings_of, tmp_path) -> None:
    model = COMMANDS[command]
    new, path = model.aliases[old], tmp_path / "new"
    [kind, *_] = typing.get_args(model.model_fields[new].annotation) or [
        model.model_fields[new].annotation
    ]
    value = EXAMPLES[kind]
    expected = model.parse({new: value})
    assert expected != model()
    assert model.parse({old: value}) == expected
    positional = [] if command == "run" else [path]

    def flag(name: str) -> list[object]:
        return [f"--{name.replace('_', '-')}", *([] if kind is bool else [value])]

    assert settings_of(command, *positional, *flag(old)) == expected
    both = dosapp(command, *positional, *flag(old), *flag(new), code=2).stderr
    assert both == f"dosapp: {new} is given twice, also under another name; give it once\n"
    if command == "run":
        file = tmp_path / "x.yaml"
        file.write_text(yaml.safe_dump({old: value}))
        assert settings_of("run", file) == expected
        assert settings_of("run", file, *flag(new)) == expected
        assert read_grid(file) == [expected]
        file.write_text(yaml.safe_dump({old: value, new: value}))
        assert dosapp("run", file, code=2).stderr == both
        assert dosapp("grid", file, code=2).stderr == both


def test_old_switches_can_be_switched_off_and_are_not_in_the_help(settings_of) -> None:
    assert settings_of("run", "--no-rivals") == RunSettings(all_class_negatives=False)
    text = dosapp("run", "--help").stdout
    assert "--all-class-negatives" in text
    assert "--rivals" not in text


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("wrong"), 2, "wrong"),
        (TooLargeError("large"), 2, "large"),
        (CorruptRecordError("corrupt"), 1, "corrupt"),
        (StorageError("full"), 1, "full"),
        (DivergedError("NaN"), 1, "NaN"),
        (BusyError("busy"), 1, "busy"),
        (ReadOnlyError("replica"), 1, "replica"),
        (PermissionError(errno.EACCES, "denied", "x.yaml"), 2, "cannot use 'x.yaml' (denied)"),
        (OSError(errno.ENOSPC, "full", "x.yaml"), 1, "cannot use 'x.yaml' (full)"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), 1, "ConnectionResetError: [Errno 104]"),
    ],
)
def test_exit_codes_by_kind_of_error(error, code, message, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("dosapp.experiments.plan.load_settings", fail)
    stderr = dosapp("run", code=code).stderr
    assert stderr.startswith(f"dosapp: {message}")
    assert stderr.count("\n") == 1
    assert "the disk" not in stderr


def test_ctrl_c_exits_with_130(monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dosapp.experiments.plan.load_settings", interrupt)
    assert "the same command continues it" in dosapp("run", code=130).stderr


def test_failed_runs_of_a_grid_exit_with_1(tmp_path) -> None:
    (tmp_path / "g.yaml").write_text(yaml.safe_dump({**SMALL, "method": "flyp", "lr": 1e12}))
    stderr = dosapp("grid", tmp_path / "g.yaml", "--out", tmp_path / "store", code=1).stderr
    assert "1 of 1 runs failed; first: " in stderr


@pytest.mark.parametrize(
    ("feature", "extra", "package"),
    [("a report", "report", "matplotlib"), ("serving", "serve,ray", None)],
)
def test_a_missing_extra_can_be_installed_from_a_clone(feature, extra, package) -> None:
    error = missing_extra(feature, extra, ImportError(name=package) if package else None)
    needed = package or "packages that are missing"
    assert str(error) == f"{feature} needs {needed}; in a clone: pip install -e '.[{extra}]'"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extra.split(",")) <= set(extras["optional-dependencies"])


def test_no_message_or_page_installs_from_an_index() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for file in [*(ROOT / "src").rglob("*.py"), *pages]:
        assert "pip install 'dosapp[" not in file.read_text(), file


class TestNothingLearned:
    def test_a_run_that_stays_at_zero_shot_says_what_would_help(self, tmp_path) -> None:
        flags = ("--data", "shapes-hard", "--method", "spu", "--lr", "1e-9")
        printed = dosapp("run", *FLAGS, *flags, "--out", tmp_path / "x")
        assert "zero-shot" in printed.stdout
        assert "nothing was learned with learning rate 1e-09" in printed.stderr
        assert "Try --auto-lr, 'dosapp tune'" in printed.stderr

    def test_a_run_that_ends_below_zero_shot_says_what_would_help(self, tmp_path) -> None:
        flags = ("--method", "flyp", "--lr", "1e-2", "--epochs", "1")
        printed = dosapp("run", *FLAGS, *flags, "--out", tmp_path / "x")
        assert "less than its zero-shot accuracy" in printed.stderr
        assert "a smaller --lr" in printed.stderr

    def test_a_run_that_learns_says_nothing(self, tmp_path) -> None:
        flags = ("--method", "flyp", "--lr", "3e-4", "--epochs", "6", "--train-images", "20")
        printed = dosapp("run", *FLAGS, *flags, "--out", tmp_path / "x")
        assert "nothing was learned" not in printed.stderr


@pytest.mark.parametrize(("zero_shot", "is_said"), [(50.0, True), (99.5, False)])
def test_a_run_that_had_nothing_to_learn_says_nothing(zero_shot, is_said) -> None:
    result = make_result("SPU", 0, zero_shot, 0.0, epochs=1, batch_size=8)
    result.metrics["zero_shot_accuracy"] = zero_shot
    note = describe_no_learning(result)
    assert ("nothing was learned with learning rate 0.1, 1 epoch and" in note) is is_said
    assert bool(note) is is_said


def test_no_name_in_a_table_is_cut_and_a_note_is_printed_once(capsys) -> None:
    label = "SPU + a method with a name as long as half of the line"
    results = [
        make_result(label, seed, 50.0, 1.0, data="photos", backbone="tiny", stream_batch_size=8)
        for seed in range(2)
    ]
    changes = {"steps": {"stream": [1]}, "stream": {"name": "pets", "images": [8]}}
    print_results([result.model_copy(update=changes) for result in results], as_json=False)
    printed = capsys.readouterr()
    assert any(label in line and "50.0 ± 0.0" in line for line in printed.out.splitlines())
    for line in ("Acc = accuracy at", "F = what", "FTA = accuracy on the first", "CTA = ", "zero-"):
        assert f"\n{line}" in printed.out
    assert printed.err.count("took one step") == printed.err.count("'tiny' knows") == 1


def test_photos_with_the_embedded_backbone_are_a_note() -> None:
    def describe(data: str, backbone: str) -> str:
        return describe_tiny_backbone(
            [make_result("SPU", 0, 50.0, 1.0, data=data, backbone=backbone)]
        )

    assert "for photos give --backbone ViT-B-16" in describe("photos", "tiny")
    assert describe("shapes+signs", "tiny") == describe("photos", "ViT-B-16") == ""


def test_a_stream_of_one_step_is_a_note() -> None:
    def describe(*steps: int, size: int | None = 64) -> str:
        result = make_result("SPU", 0, 50.0, 1.0, stream_batch_size=size)
        stream = {"name": "pets", "images": [16, 32]}
        return describe_short_stream(
            result.model_copy(update={"steps": {"stream": [*steps]}, "stream": stream})
        )

    assert "32 images or fewer are one batch of 64" in describe(1, 1)
    assert "a smaller --stream-batch-size" in describe(1, 1)
    assert "Give more test images" in describe(1, 1, size=None)  # it was chosen already
    assert describe(0, 0) == describe(1, 2) == describe() == ""


def test_few_test_images_are_a_note() -> None:
    def describe(*counts: int) -> str:
        tasks = [{"test": count} for count in counts]
        return describe_small_test(
            make_result("SPU", 0, 50.0, 1.0).model_copy(update={"tasks": tasks})
        )

    assert "has 6 images, so each is worth 16.7 points" in describe(4, 2)
    assert describe(25, 25) == describe() == ""


class TestStoredRuns:
    def test_a_run_prints_how_it_trained(self, tmp_path) -> None:
        printed = dosapp("run", *FLAGS, "--method", "spu", "--lr", "0.002", cwd=tmp_path).stdout
        assert "trained with learning rate 0.002, " in printed

    def test_a_stored_result_is_not_called_written(self, tmp_path) -> None:
        command = ("run", *FLAGS, "--method", "zero-shot")
        first, second = (dosapp(*command, cwd=tmp_path) for _ in range(2))
        assert "wrote runs/" in first.stdout
        assert "stored, not computed; --force computes it again" in second.stdout
        before = next(tmp_path.rglob("result.json")).stat().st_mtime_ns
        assert "wrote runs/" in dosapp(*command, "--force", cwd=tmp_path).stdout
        assert next(tmp_path.rglob("result.json")).stat().st_mtime_ns > before

    def test_force_keeps_the_stored_result_until_another_is_there(self, tmp_path) -> None:
        command = ("run", *FLAGS, "--method", "spu", "--out", "x")
        dosapp(*command, cwd=tmp_path)
        stored = (tmp_path / "x" / "result.json").read_bytes()
        refused = dosapp(*command, "--lr", "0.5", "--force", cwd=tmp_path, code=2)
        assert "holds a run with other settings" in refused.stderr
        assert (tmp_path / "x" / "result.json").read_bytes() == stored
        assert "wrote x/" in dosapp(*command, "--force", cwd=tmp_path).stdout
        assert not (tmp_path / "x.forced").exists()

    def test_force_deletes_nothing_but_runs(self, tmp_path) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "fox.jpg").write_text("x")
        refused = dosapp("run", *FLAGS, "--force", "--out", tmp_path / "photos", code=2)
        assert "holds no run, so --force does not replace it" in refused.stderr
        assert (tmp_path / "photos" / "fox.jpg").exists()
