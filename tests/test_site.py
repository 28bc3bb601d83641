"""The documentation site and its tutorials."""

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import nbformat
import pytest
import typer
from nbclient import NotebookClient

import dosapp
from dosapp import METHODS
from dosapp.cli import app
from support.cli import FLAGS
from support.cli import dosapp as run_dosapp
from support.documents import ROOT, blocks, shell_commands
from support.settings import CHROMIUM, in_a_browser

TUTORIALS = ROOT / "docs" / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "docs" / "start.md", TUTORIALS / "add-a-method.md"]
PAGES += [TUTORIALS / "reproduce-the-paper.md"]
SMALLER = {
    "run": FLAGS,
    # 0.1 breaks the model, so that there is something to choose
    "tune": ["--train-images", "8", "--epochs", "1", "--tries", "1", "--rates", "1e-5,0.1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_tutorial_run(page, tmp_path, monkeypatch) -> None:
    """On a smaller scenario. A service is started by the README's test and by a notebook."""
    found = shell_commands(page.read_text())
    assert found
    (method,) = blocks((ROOT / "CONTRIBUTING.md").read_text(), "python")
    (tmp_path / "my_method.py").write_text(method)  # as the tutorial on methods says
    monkeypatch.setattr(sys, "path", list(sys.path))
    with mock.patch.dict(METHODS):
        for program, command, *words in found:
            assert program == "dosapp"
            if command != "serve":
                run_dosapp(command, *words, *SMALLER.get(command, []), cwd=tmp_path)
            else:
                assert [program, command, *words] in shell_commands(README)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_draws_its_figures(file, tmp_path) -> None:
    notebook = nbformat.read(file, as_version=4)
    stored = count_figures(notebook)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": tmp_path}}).execute()
    assert count_figures(notebook) == stored > 0


def count_figures(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_notebooks_are_stored_with_small_outputs_and_no_errors() -> None:
    assert [file.stem for file in NOTEBOOKS] == ["compare-methods", "deploy", "your-own-data"]
    for file in NOTEBOOKS:
        assert file.stat().st_size < 200_000
        cells = [c for c in nbformat.read(file, as_version=4).cells if c.cell_type == "code"]
        assert all(cell.execution_count for cell in cells), "store it as it was executed"
        kinds = {output.get("name", output.output_type) for c in cells for output in c.outputs}
        assert kinds <= {"stdout", "display_data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it; a warning, such as a broken link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
class TestSite:
    def test_references_are_complete(self, site) -> None:
        commands = (site / "reference" / "commands.html").read_text()
        for name in typer.main.get_command(app).commands:
            assert f"dosapp {name}" in commands
        python = (site / "reference" / "python.html").read_text()
        for name in dosapp.PUBLIC:
            assert f'id="{name.lower()}"' in python
        for name in METHODS:
            assert (site / "methods" / f"{name}.html").exists()
        assert not list((ROOT / "docs").rglob("commands.md")), "generated pages are not sources"

    def test_nothing_is_loaded_from_elsewhere(self, site) -> None:
        loaded = re.compile(
            r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
            r"""|<link\b(?![^>]*canonical)[^>]*\bhref=["']?(?:https?:)?//"""
        )
        for page in site.rglob("*.html"):
            assert not loaded.search(page.read_text()), page
        for sheet in site.rglob("*.css"):
            assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text()), sheet

    @in_a_browser
    def test_search_works_from_a_disk(self, site) -> None:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM)
            page = browser.new_page()
            requested: list[str] = []
            page.on("request", lambda request: requested.append(request.url))
            page.goto((site / "index.html").as_uri())
            # Typed, not filled: the search box listens to keys, and `fill` presses none.
            query = page.locator("[data-md-component=search-query]")
            query.press_sequentially("pseudo-label")
            page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
            browser.close()
        assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in requested)
