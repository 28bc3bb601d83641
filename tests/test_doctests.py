"""Every example in a docstring of the package runs, offline and in an empty folder."""

import doctest
import importlib
import pkgutil
import warnings
from pathlib import Path

import pytest

import dosapp
from dosapp.errors import InputError

PACKAGE = Path(dosapp.__file__).parent
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def module_names() -> list[str]:
    """All modules with an example, found without importing them."""
    names = [module.name for module in pkgutil.walk_packages([str(PACKAGE)], "dosapp.")]
    return [name for name in names if ">>> " in source_file(name).read_text()]


def source_file(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("module", module_names())
def test_examples(module, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        tests = doctest.DocTestFinder().find(importlib.import_module(module))
    except (ImportError, InputError) as error:
        pytest.skip(f"needs a package that is not installed: {error}")
    examples = [test for test in tests if test.examples]
    assert examples, "no example is in a docstring"
    runner, report = doctest.DocTestRunner(optionflags=OPTIONS), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for test in examples:
            runner.run(test, out=report.append)
    assert runner.failures == 0, "".join(report)
    assert not list(tmp_path.iterdir()), "an example leaves files"


def test_there_are_examples() -> None:
    assert len(module_names()) > 30
