"""The public names of `import dosapp`: one list, importable and documented."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import BaseModel

import dosapp

CLASSES = [name for name in dosapp.PUBLIC if inspect.isclass(getattr(dosapp, name))]
FUNCTIONS = [name for name in dosapp.PUBLIC if inspect.isfunction(getattr(dosapp, name))]
ERRORS = [name for name in CLASSES if issubclass(getattr(dosapp, name), Exception)]
PROTOCOLS = ["Backbone", "Batches", "Expert"]  # implemented, not called
# Values that are made by functions and hooks, whose examples show them.
VALUES = ["Batch", "Prediction", "Result", "Split", "Task", "TrainingStage"]


def public_object(name: str) -> object:
    return getattr(dosapp, name)


def test_types_are_published_and_checked() -> None:
    assert (Path(dosapp.__file__).parent / "py.typed").exists()
    root = Path(__file__).parents[1]
    assert tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mypy"]["strict"] is True
    assert "$(BIN)/mypy" in (root / "Makefile").read_text()


def test_the_version_is_that_of_the_package() -> None:
    assert dosapp.__version__ == importlib.metadata.version("dosapp")


def test_dir_lists_every_public_name_once() -> None:
    assert dir(dosapp) == sorted(["__version__", *dosapp.PUBLIC])
    assert len(set(dosapp.__all__)) == len(dosapp.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Lerner'"):
        _ = dosapp.Lerner


def test_the_stub_names_each_once() -> None:
    """Type checkers read the stub; the package reads its list from it."""
    tree = ast.parse(Path(dosapp.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    assert len(names) == len(set(names)) == len(dosapp.PUBLIC)
    # Only names that are imported "as" themselves are public to a type checker.
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    others = [node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)]
    assert others == ["__version__", "PUBLIC"]


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, dosapp; dir(dosapp); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("name", CLASSES + FUNCTIONS)
class TestEveryName:
    def test_is_defined_where_the_list_says(self, name) -> None:
        assert public_object(name).__module__ == dosapp.PUBLIC[name]
        assert public_object(name).__name__ == name

    def test_has_a_summary_line(self, name) -> None:
        summary = (public_object(name).__doc__ or "").splitlines()[0]
        assert summary.endswith(".")

    def test_has_an_example(self, name) -> None:
        if name not in [*ERRORS, *PROTOCOLS, *VALUES]:
            assert "Example:\n" in public_object(name).__doc__
            assert ">>> " in public_object(name).__doc__


def test_other_public_names_are_values() -> None:
    assert set(dosapp.PUBLIC) - set(CLASSES) - set(FUNCTIONS) == {"METHODS"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_describe_arguments_and_results(name) -> None:
    function = public_object(name)
    arguments = function.__doc__.partition("Args:\n")[2]
    for parameter in inspect.signature(function).parameters:
        assert f"        {parameter}: " in arguments, parameter
    returns_none = inspect.signature(function).return_annotation in (None, "None")
    assert ("Returns:\n" in function.__doc__) != returns_none


@pytest.mark.parametrize("name", CLASSES)
def test_classes_describe_the_arguments_of_their_constructor(name) -> None:
    """Of a constructor that is written out; fields of dataclasses have comments instead."""
    cls = public_object(name)
    is_value = is_dataclass(cls) or issubclass(cls, BaseModel) or name in PROTOCOLS
    if "__init__" in vars(cls) and not is_value:
        arguments = cls.__doc__.partition("Args:\n")[2]
        for parameter in list(inspect.signature(cls).parameters):
            assert f"        {parameter}: " in arguments, parameter


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_have_docstrings(name) -> None:
    cls = public_object(name)
    for attribute, value in vars(cls).items():
        is_method = inspect.isfunction(value) or isinstance(value, classmethod | property)
        if is_method and not attribute.startswith("_"):
            # A wrapper of a backbone has the same interface.
            documented = getattr(dosapp.Backbone, attribute, None) or getattr(cls, attribute)
            assert inspect.getdoc(documented), attribute


@pytest.mark.parametrize("name", ["LearnerSettings", "RunSettings"])
def test_every_setting_is_described_and_typed(name) -> None:
    fields = public_object(name).model_fields
    assert all(field.description for field in fields.values())
    assert set(fields) <= set(get_type_hints(public_object(name)))
