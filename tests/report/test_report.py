"""Tables from results that were never run."""

import re

import pytest

from dosapp.errors import InputError
from dosapp.experiments.result import Result, check_paired
from dosapp.report import intro, provenance
from dosapp.report.sweeps import sweeps
from dosapp.report.tables import footnote, latex, markdown, on_the_stream, paired, rows, tex
from support.results import make_result

RESULTS = [
    make_result("A", 0, 80, 10),
    make_result("A", 1, 82, 12),
    make_result("B", 0, 85, None),
    make_result("B", 1, 86, None),
]


def test_mean_and_sample_deviation_over_seeds() -> None:
    lines = markdown(rows(RESULTS)).splitlines()
    assert lines[2] == "| A | 81.0 ± 1.4 | 11.0 ± 1.4 | 50.0 ± 0.0 | 50.0 ± 0.0 | 2 |"
    assert lines[3].startswith("| B | 85.5 ± 0.7 | – |")


def test_a_difference_is_taken_seed_by_seed() -> None:
    lines = paired(rows(RESULTS), "B").splitlines()
    assert lines[2] == "| A | -4.5 ± 0.7 | – | +0.0 ± 0.0 | +0.0 ± 0.0 | 2 |"
    with pytest.raises(InputError, match="unknown row 'C'"):
        paired(rows(RESULTS), "C")


def test_namesakes_are_told_apart_by_what_differs() -> None:
    other = make_result("A", 0, 70, 5, lr=0.2)
    assert [row.name for row in rows([RESULTS[0], other])] == ["A (lr=0.1)", "A (lr=0.2)"]


def test_what_the_stream_was_like() -> None:
    lines = on_the_stream(rows(RESULTS[:2])).splitlines()
    assert lines[2] == "| A | 80.0 ± 0.0 | 2.0 ± 0.0 | 0.50 ± 0.00 | 1.0 ± 0.0 | 2 |"


def test_latex_has_the_best_of_each_dataset_in_bold() -> None:
    easy, hard = {"name": "pets", "boundaries": []}, {"name": "planes", "boundaries": []}
    table = rows(
        make_result(label, 0, acc, 10, data=stream["name"]).model_copy(update={"stream": stream})
        for label, acc, stream in (
            ("A", 90, easy),
            ("B", 80, easy),
            ("A", 30, hard),
            ("B", 40, hard),
        )
    )
    text = latex(table, {"accuracy": "Acc ↑"})
    assert re.findall(r"^(.*) & \\textbf{(.*)}", text, re.M) == [
        ("A, pets", "90.0"),
        ("B, planes", "40.0"),
    ]


class TestWhatMayBeCompared:
    def changed(self, **changes: object) -> tuple[Result, Result]:
        task = {"classes": ["cat"], "train": 9, "stream": 5, "test": 5}
        small = {"name": "a", "fingerprint": "e"}
        one = make_result("A", 0, 80, 10).model_copy(
            update={"tasks": [task], "key": "one", "backbone": small}
        )
        two = make_result("B", changes.pop("seed", 0), 85, 10, **changes.pop("settings", {}))
        tasks = [{**task, **changes.pop("task", {})}]
        return one, two.model_copy(
            update={"tasks": tasks, "key": "two", "backbone": small, **changes}
        )

    def test_what_is_taught_and_streamed_may_differ(self) -> None:
        settings = {"stream": False, "stream_fraction": 0.5, "stream_noise": 0.1, "buffer_size": 9}
        stream = {"name": "pets", "hash": "other"}
        check_paired(*self.changed(settings=settings, task={"stream": 0}, stream=stream))
        check_paired(*self.changed(R=[[1.0], [1.0]], stream=stream))  # joint training, and not
        check_paired(*self.changed(settings={"full_test": True}, task={"test": 10}))

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"task": {"classes": ["dog"]}}, "one and two are of different tasks"),
            ({"task": {"test": 6}}, "different numbers of test pictures"),
            ({"settings": {"test_noise": 0.1}}, "test_noise is 0.0 and 0.1"),
            ({"seed": 1}, "seed is 0 and 1"),
            ({"stream": {"hash": "x"}}, "same settings but other pictures; the data has changed"),
            ({"backbone": {"name": "b", "fingerprint": "f"}}, "different backbones: a and b"),
        ],
    )
    def test_what_is_measured_may_not(self, changes, says) -> None:
        one, two = self.changed(**changes)
        with pytest.raises(InputError, match=says):
            check_paired(one, two)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"task": {"classes": ["dog"]}}, "different tasks; report them apart"),
            ({"task": {"test": 6}, "seed": 1}, "different numbers of test pictures"),
            ({"stream": {"name": "pets", "hash": "x"}}, "the data has changed between them"),
            ({"backbone": {"name": "b", "fingerprint": "f"}}, "different backbones: a and b"),
        ],
    )
    def test_nor_may_one_table_hold_both(self, changes, says) -> None:
        with pytest.raises(InputError, match=says):
            rows(self.changed(**changes))

    def test_rows_that_were_asked_otherwise_say_so(self) -> None:
        found = rows(self.changed(settings={"test_noise": 0.1}))
        assert [row.name for row in found] == ["A", "B (test_noise=0.1)"]
        found = rows(self.changed(settings={"full_test": True}, task={"test": 10}))
        assert [row.name for row in found] == ["A", "B (full test)"]

    def test_one_table_has_one_definition_of_a_metric(self) -> None:
        one, two = self.changed(definitions={"forgetting": "max"})
        one = one.model_copy(update={"definitions": {"forgetting": "mean"}})
        with pytest.raises(InputError, match=r"one and two define.*forgetting is 'mean' and 'max'"):
            rows([one, two])
        assert footnote([one]) == "forgetting = mean"

    def test_no_result_silently_replaces_another(self) -> None:
        one = make_result("A", 0, 80, 10)
        assert len(rows([one, one])) == 1  # found in two places
        with pytest.raises(InputError, match="one and two have the same settings and seed, but"):
            rows([one.model_copy(update={"key": key}) for key in ("one", "two")])

    def test_seeds_of_one_row_have_the_same_tasks(self) -> None:
        one, _ = self.changed()
        two = make_result("A", 1, 80, 10).model_copy(update={"tasks": [], "key": "two"})
        with pytest.raises(InputError, match="one and two are of different tasks"):
            rows([one, two])


class TestSweeps:
    def results(self, **settings: list[object]) -> list[Result]:
        [(name, values)] = settings.items()
        return [make_result("dosapp", 0, 80, 10, **{name: value}) for value in values]

    def test_three_values_of_one_number_are_a_line(self) -> None:
        [sweep] = sweeps(rows(self.results(fraction=[1.0, 0.25, 0.5])))
        assert sweep.setting == "fraction"
        assert [value for value, _ in sweep.points] == [0.25, 0.5, 1.0]

    def test_the_default_is_a_point_though_nobody_wrote_it_down(self) -> None:
        options = [{}, {"sparsity": 0.3}, {"sparsity": 0.5}, {"sparsity": 0.5, "lam": 0.95}]
        [sweep] = sweeps(rows(self.results(options=options)))
        assert sweep.setting == "sparsity"
        assert [value for value, _ in sweep.points] == [0.1, 0.3, 0.5]

    def test_a_method_that_is_no_more_spoils_nothing(self) -> None:
        old = make_result("retired", 0, 70, 9, options={"depth": 3})
        assert len(list(sweeps(rows([old, *self.results(fraction=[1.0, 0.25, 0.5])])))) == 1

    def test_two_values_are_none(self) -> None:
        assert not list(sweeps(rows(self.results(fraction=[0.5, 0.25]))))


class TestPictures:
    """What the axes hold; how it looks is for eyes."""

    @pytest.fixture(autouse=True)
    def close(self):
        plt = pytest.importorskip("matplotlib.pyplot")
        yield
        plt.close("all")

    def test_a_sweep_is_a_line_of_accuracy_and_one_of_forgetting(self) -> None:
        from dosapp.report.figures import figures

        results = [
            make_result("dosapp", seed, 80 * share + seed, 10 - share, fraction=share)
            for share in (1.0, 0.25, 0.5)
            for seed in (0, 2)
        ]
        drawn = figures(rows(results))["sweeps"]
        left, right = drawn.axes
        accuracy, forgetting = (axes.containers[0].lines[0] for axes in (left, right))
        assert accuracy.get_linestyle() == forgetting.get_linestyle() == "-"
        assert list(accuracy.get_xdata()) == [0.25, 0.5, 1.0]
        assert list(accuracy.get_ydata()) == [21, 41, 81]
        assert list(forgetting.get_ydata()) == [9.75, 9.5, 9]
        assert left.get_xlabel() == "fraction"
        assert left.get_xscale() == "linear"

    def test_a_sweep_over_magnitudes_is_logarithmic(self) -> None:
        from dosapp.report.figures import swept

        options = [{"sparsity": value} for value in (0.01, 0.1, 0.5)]
        drawn = swept(rows(make_result("dosapp", 0, 80, 10, options=one) for one in options))
        assert drawn.axes[0].get_xscale() == "log"
        assert drawn.axes[0].get_xlabel() == "share of candidates that move, c"
        assert swept(rows(RESULTS)) is None

    def test_a_map_has_a_line_where_another_dataset_begins(self) -> None:
        from dosapp.report.figures import forgetting_maps

        forgot = [[5.0 if i < t else None for i in range(5)] for t in range(5)]
        changes = {"R": [[50.0] * 5] * 5, "forgetting_matrix": forgot}
        streams = [{"name": "pets+planes", "boundaries": b} for b in ([2], [])]
        two, one = (
            forgetting_maps(rows([RESULTS[0].model_copy(update={**changes, "stream": stream})]))
            for stream in streams
        )
        across, down = two.axes[0].lines
        assert list(across.get_xdata()) == [1.5, 1.5]  # between tasks 2 and 3
        assert list(down.get_ydata()) == [0.5, 0.5]  # between what follows sessions 2 and 3
        assert not one.axes[0].lines
        labels = [two.axes[0].get_yticklabels()[n].get_text() for n in (0, 1)]
        assert labels == ["2", "3"]


class TestMoreRowsThanLinesCanTellApart:
    @pytest.fixture
    def grid_progress(self):
        learners = [
            make_result(f"L{n:02}", 0, 60.0 + n, 10.0, buffer_size=50 * (n == 3)) for n in range(16)
        ]
        return rows(
            [*learners, make_result("zero-shot", 0, 40.0, 5.0), make_result("Joint", 0, 90.0, None)]
        )

    def test_they_become_a_sheet_with_the_best_at_the_end_first(self, many) -> None:
        from dosapp.report.figures import colours, curves

        [axes] = curves(many, colours(many)).axes
        names = [tick.get_text() for tick in axes.get_yticklabels()]
        assert (names[:2], names[-1]) == (["Joint", "L15"], "zero-shot")
        assert [text.get_text() for text in axes.texts][:2] == ["90.0", "75.0"]
        assert not axes.lines

    def test_a_ranking_shows_where_learning_nothing_and_all_at_once_end(self, many) -> None:
        from dosapp.report.figures import OTHER, colours, plane

        accuracy, forgetting = plane(many, colours(many)).axes
        names = [tick.get_text() for tick in accuracy.get_yticklabels()]
        assert names == [f"L{n:02}" for n in range(16)]  # the bounds are lines
        assert [text.get_text() for text in accuracy.texts] == ["zero-shot", "Joint"]
        marks = [one.lines[0] for one in forgetting.containers]
        hollow = [n for n, mark in enumerate(marks) if mark.get_markerfacecolor() == "white"]
        assert hollow == [3]
        assert {mark.get_color() for mark in marks} == {OTHER}


def test_names_are_safe_in_latex() -> None:
    assert tex("SPU + D^u (a_b=50%)") == r"SPU + $D^u$ (a\_b=50\%)"
    assert tex("{x}^2~$") == r"\{x\}\textasciicircum{}2\textasciitilde{}\$"


def test_a_report_names_all_that_its_results_do_not_share() -> None:
    one, two = (make_result(label, 0, 1.0, None) for label in "AB")
    common = {"libraries": {"dosapp": "1", "torch": "2"}, "tasks": [{"classes": ["a", "b"]}]}
    one = one.model_copy(
        update={**common, "machine": "m", "backbone": {"name": "x", "fingerprint": "f"}}
    )
    other = {"machine": "n", "backbone": {"name": "y", "fingerprint": "g"}}
    two = one.model_copy(update={**other, "stream": {"name": "signs"}})
    assert intro([one, two, one]).startswith(
        "pets: 2 classes in 1 sessions, signs: 2 classes in 1 sessions; after each"
    )
    assert provenance([one, two]) == ("backbone x (f) / backbone y (g), dosapp 1, torch 2, m / n")


def test_a_seed_whose_gate_let_nothing_through_has_no_share_of_right_labels() -> None:
    open_, shut = make_result("A", 0, 50.0, 1.0), make_result("A", 1, 50.0, 1.0)
    shut = shut.model_copy(update={"pseudo_labels": [None], "disagreement": [None]})
    assert "| A | 80.0 | 2.0 | 0.50 ± 0.00 |" in on_the_stream(rows([open_, shut]))
