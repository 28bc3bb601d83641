"""Methods of the user's own, named `module:Class` in settings."""

import json
import sys

import pytest
import yaml

from dosapp import METHODS, Learner, LearnerSettings
from dosapp.errors import InputError
from support.cli import FLAGS, dosapp

SOURCE = """
from dosapp.methods.flyp import FLYP
from dosapp import method_dataclass

@method_dataclass
class Mine(FLYP):
    summary = "{}"
    reference = "me"
    strength: float = 1.0

class Undeclared(FLYP):
    strength: float = 1.0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with `own_method.py`, which is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_method.py").write_text(SOURCE.format("first"))
    yield tmp_path
    forget()


def forget() -> None:
    for name in [name for name in METHODS if ":" in name]:
        del METHODS[name]
    for module in ("own_method", "own_base"):
        sys.modules.pop(module, None)


def test_a_run_imports_it_and_its_source_is_in_the_key(folder) -> None:
    command = ["run", "--method", "own_method:Mine", "--set", "strength=2", "--json", *FLAGS]
    (first,) = json.loads(dosapp(*command, cwd=folder).stdout)
    assert first["label"] == "Mine (strength=2)"
    forget()
    assert "Mine" in dosapp("report", "runs", cwd=folder).stdout  # needs the result only
    (folder / "own_method.py").write_text(SOURCE.format("second, and longer"))
    (second,) = json.loads(dosapp(*command, cwd=folder).stdout)
    assert second["key"] != first["key"]
    assert second["weights"] == first["weights"]


def test_an_edited_base_class_is_another_run(folder) -> None:
    keys = []
    for version in ("first", "second, and longer"):
        (folder / "own_base.py").write_text(SOURCE.format(version))
        (folder / "own_method.py").write_text(
            "import own_base\nclass Mine(own_base.Mine):\n    summary = 'the same'\n"
        )
        out = dosapp("run", "--method", "own_method:Mine", "--json", *FLAGS, cwd=folder).stdout
        keys.append(json.loads(out)[0]["key"])
        forget()
    assert keys[0] != keys[1]


def test_grids_tuning_and_the_list_of_methods_import_it(folder) -> None:
    assert "strength=1.0" in dosapp("methods", "own_method:Mine", cwd=folder).stdout
    forget()
    (folder / "grid.yaml").write_text(yaml.safe_dump({"method": ["flyp", "own_method:Mine"]}))
    assert "Mine, shapes, seed 0" in dosapp("grid", "grid.yaml", "--dry-run", cwd=folder).stdout
    forget()
    flags = ["--classes", 6, "--tasks", 2, "--train-images", 6, "--epochs", 1, "--tries", 1]
    out = dosapp(
        "tune", "--methods", "own_method:Mine", "--rates", "1e-5,2e-2", *flags, cwd=folder
    ).stdout
    assert "own_method:Mine: --lr " in out


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent_module:Mine", "cannot be imported (ModuleNotFoundError: No module named"),
        ("own_method:Mime", "unknown class 'Mime'; did you mean 'Mine'?"),
        ("own_method:method_dataclass", "is no method; give a subclass of Method"),
        ("own_method:Undeclared", "Undeclared lacks @method_dataclass, so 'strength' is no"),
        (":Mine", "the method ':Mine' cannot be imported"),
        ("own_method:", "unknown class ''"),
    ],
)
def test_a_wrong_name_is_one_sentence(folder, name, sentence) -> None:
    error = dosapp("run", "--method", name, cwd=folder, code=2).stderr
    assert sentence in error
    assert error.count("\n") == 1
    assert not (folder / "runs").exists()


def test_the_file_of_a_learner_imports_nothing(folder, monkeypatch) -> None:
    """Whoever writes a learner's folder must not choose what is imported."""
    monkeypatch.chdir(folder)
    (folder / "own_method.py").write_text("raise SystemExit('imported')")
    with pytest.raises(InputError, match="'own_method:Mine' is not registered, and only settings"):
        Learner(LearnerSettings(method="own_method:Mine"))
    assert "own_method" not in sys.modules
