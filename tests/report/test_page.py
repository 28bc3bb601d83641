"""The report's page in a real browser."""

from pathlib import Path

import pytest

from dosapp.experiments.store import read_results
from dosapp.report import write_report
from dosapp.report.tables import WITH_COSTS, build_rows, to_csv, to_latex
from support.settings import in_a_browser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("page")
    write_report(
        read_results([ROOT / "results" / "foundation"]), place, "A page", columns=WITH_COSTS
    )
    return place


@in_a_browser
def test_the_page_has_no_errors_and_its_table_can_be_sorted(folder, browser) -> None:
    messages: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: "file:" in request.url or messages.append(request.url))
    page.goto(f"file://{folder}/report.html")

    def column(n: int) -> list[str]:
        return page.locator(f"tbody tr td:nth-child({n + 1})").all_inner_texts()

    before = column(0)
    page.get_by_role("button", name="Acc").click()
    best_first = [float(text.split(" ")[0]) for text in column(1)]
    assert best_first == sorted(best_first, reverse=True)
    page.get_by_role("button", name="Acc").click()
    assert [float(text.split(" ")[0]) for text in column(1)] == best_first[::-1]
    page.get_by_role("button", name="F ↓").click()
    assert column(2)[-1] == "–"  # joint training has no forgetting
    page.get_by_role("button", name="method").click()
    assert column(0) == sorted(before, key=str.lower)
    figures = page.locator("figure svg")
    assert figures.count() >= 5
    assert all(figures.nth(n).bounding_box()["height"] > 100 for n in range(figures.count()))
    page.close()
    assert messages == []


@in_a_browser
def test_the_page_marks_the_best_explains_its_columns_and_suits_a_dark_phone(
    folder, browser
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    page.goto(f"file://{folder}/report.html")
    assert page.locator("td.best").all_inner_texts()[0] == "86.5 ± 0.7"  # SPU + D^u
    weights = page.locator("tr.ours td").evaluate_all(
        "cells => cells.map(c => getComputedStyle(c).fontWeight)"
    )
    assert set(weights) == {"400"}
    assert page.locator("dl").inner_text().count("at the end") >= 1
    assert page.evaluate("document.body.scrollWidth <= innerWidth")  # figures scroll by themselves
    assert page.locator("figure svg").first.bounding_box()["width"] >= 640
    assert "invert" in page.locator("figure").first.evaluate("f => getComputedStyle(f).filter")
    page.close()


def test_datasets_have_figures_of_their_own(tmp_path) -> None:
    stored = read_results([ROOT / "results" / "foundation", ROOT / "results" / "hard"])
    few = [r for r in stored if r.label in ("FLYP", "SPU + D^u", "DoSAPP")]
    table = write_report(few, tmp_path, "Two")
    assert {row.name for row in table} >= {"FLYP, shapes", "SPU + D^u, shapes-hard"}
    for data in ("shapes", "shapes-hard"):
        assert (tmp_path / f"accuracy-{data}.png").stat().st_size > 3000
        page = (tmp_path / "report.html").read_text()
        assert f"Accuracy on the tasks seen so far, {data}" in page
    assert not (tmp_path / "accuracy.png").exists()


def test_differences_to_a_row_are_in_the_page_too(tmp_path) -> None:
    stored = read_results([ROOT / "results" / "foundation"])
    few = [r for r in stored if r.label in ("SPU", "DoSAPP")]
    write_report(few, tmp_path, "Two", against="DoSAPP")
    page = (tmp_path / "report.html").read_text()
    assert "<th>difference to DoSAPP</th>" in page
    assert "<td>SPU</td><td>-2.4 ± 0.7</td>" in page


def test_every_figure_is_written_as_png_svg_and_pdf(folder) -> None:
    for name in ("accuracy", "forgetting", "stream", "plane", "labels"):
        for suffix in ("png", "svg", "pdf"):
            assert (folder / f"{name}.{suffix}").stat().st_size > 3000


def test_latex_has_the_best_of_each_column_in_bold() -> None:
    text = to_latex(build_rows(read_results([ROOT / "results" / "foundation"])))
    assert text.count(r"\textbf") == 4
    lines = {line.partition(" &")[0]: line for line in text.splitlines()}
    assert r"\textbf{86.5 $\pm$ 0.7}" in lines["SPU + $D^u$"]
    assert "textbf" not in lines["Joint"]  # a bound, like zero-shot


def test_csv_is_unrounded_and_holds_the_keys() -> None:
    import csv
    import io

    table = build_rows(read_results([ROOT / "results" / "foundation"]))
    lines = list(csv.DictReader(io.StringIO(to_csv(table))))
    ours = next(line for line in lines if line["method"] == "DoSAPP")
    assert float(ours["accuracy"]) == pytest.approx(86.3, abs=0.06)
    assert len(ours["keys"].split()) == int(ours["seeds"]) == 5
