"""Tables and figures from made-up results."""

import re

import pytest

from dosapp.errors import InputError
from dosapp.experiments.result import Result, check_paired
from dosapp.report import describe_provenance, describe_scenarios
from dosapp.report.sweeps import find_sweeps
from dosapp.report.tables import (
    build_rows,
    escape_latex,
    metric_definitions,
    paired_differences,
    stream_statistics,
    to_latex,
    to_markdown,
)
from support.results import make_result

RESULTS = [
    make_result("A", 0, 80, 10),
    make_result("A", 1, 82, 12),
    make_result("B", 0, 85, None),
    make_result("B", 1, 86, None),
]


def test_mean_and_sample_deviation_over_seeds() -> None:
    lines = to_markdown(build_rows(RESULTS)).splitlines()
    assert lines[2] == "| A | 81.0 ± 1.4 | 11.0 ± 1.4 | 50.0 ± 0.0 | 50.0 ± 0.0 | 2 |"
    assert lines[3].startswith("| B | 85.5 ± 0.7 | – |")


def test_differences_are_paired_by_seed() -> None:
    lines = paired_differences(build_rows(RESULTS), "B").splitlines()
    assert lines[2] == "| A | -4.5 ± 0.7 | – | +0.0 ± 0.0 | +0.0 ± 0.0 | 2 |"
    with pytest.raises(InputError, match="unknown row 'C'"):
        paired_differences(build_rows(RESULTS), "C")


def test_rows_with_the_same_label_show_the_settings_that_differ() -> None:
    other = make_result("A", 0, 70, 5, lr=0.2)
    assert [row.name for row in build_rows([RESULTS[0], other])] == ["A (lr=0.1)", "A (lr=0.2)"]


def test_stream_statistics() -> None:
    lines = stream_statistics(build_rows(RESULTS[:2])).splitlines()
    assert lines[2] == "| A | 80.0 ± 0.0 | 2.0 ± 0.0 | 0.50 ± 0.00 | 1.0 ± 0.0 | 2 |"


def test_latex_has_the_best_of_each_dataset_in_bold() -> None:
    easy, hard = {"name": "pets", "boundaries": []}, {"name": "planes", "boundaries": []}
    table = build_rows(
        make_result(label, 0, acc, 10, data=stream["name"]).model_copy(update={"stream": stream})
        for label, acc, stream in (
            ("A", 90, easy),
            ("B", 80, easy),
            ("A", 30, hard),
            ("B", 40, hard),
        )
    )
    text = to_latex(table, {"accuracy": "Acc ↑"})
    assert re.findall(r"^(.*) & \\textbf{(.*)}", text, re.M) == [
        ("A, pets", "90.0"),
        ("B, planes", "40.0"),
    ]


class TestSameRun:
    """Rows hold the seeds of the same run: the settings that enter a key decide, no others."""

    @pytest.mark.parametrize(
        "elsewhere",
        [
            {"device": "cuda"},
            {"data_dir": "/elsewhere"},
            {"microbatch": 8},
            {"gradient_checkpointing": True},
            {"checkpointing": True},  # as version 0.1 spelled it
            {"compile": True},
            {"skip_bad_images": True},
            {"reactivation_interval": 3},  # without reactivation
        ],
    )
    def test_seeds_from_another_device_or_folder_are_the_same_row(self, elsewhere) -> None:
        [row] = build_rows([make_result("A", 0, 80, 10), make_result("A", 1, 82, 12, **elsewhere)])
        assert row.name == "A"
        assert row.values("accuracy") == [80, 82]

    def test_the_same_key_from_two_machines_is_one_result(self) -> None:
        first, second = (
            make_result("A", 0, 80, 10, device=device).model_copy(update={"key": "one"})
            for device in ("cpu", "cuda")
        )
        [row] = build_rows([first, second])
        assert row.results == (first,)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"data": "/here/pets"}, {"data": "/there/pets"}),
            ({"options": {"sparsity": 0.1}}, {"options": {}}),  # an option equal to its default
        ],
    )
    def test_paths_and_defaults_that_give_the_same_key_are_one_row(self, first, second) -> None:
        results = [make_result("spu", 0, 80, 10, **first), make_result("spu", 1, 82, 12, **second)]
        assert len(build_rows(results)) == 1

    def test_other_data_is_another_row(self) -> None:
        names = ("org/pets", "other/pets", "/d/cars+/d/pets", "/d/pets", "pets+cars")
        results = [make_result("spu", 0, 80, 10, data=name) for name in names]
        assert len(build_rows(results)) == len(names)

    def test_names_of_version_0_1_are_the_same_settings(self) -> None:
        old = make_result("spu", 0, 80, 10, memory=9, batch=32)
        new = make_result("spu", 1, 82, 12, buffer_size=9, batch_size=32)
        [row] = build_rows([old, new])
        assert row.name == "SPU + ER=9"
        assert row.stores_images

    def test_hyperparameters_of_version_0_1_are_the_same_options(self) -> None:
        old = make_result("dosapp", 0, 80, 10, options={"labels": "teacher", "gamma": 0.9})
        new = make_result("dosapp", 1, 82, 12, options={"pseudo_labels": "teacher", "gamma": 0.9})
        [row] = build_rows([old, new])
        assert row.name == "DoSAPP (pseudo_labels=teacher, gamma=0.9)"

    def test_labels_have_todays_names(self) -> None:
        [row] = build_rows([make_result("dosapp", 0, 80, 10, temper=True)])
        assert row.name == "DoSAPP + entropy lr"


class TestComparability:
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

    def test_training_and_stream_data_may_differ(self) -> None:
        settings = {"stream": False, "stream_fraction": 0.5, "stream_noise": 0.1, "buffer_size": 9}
        stream = {"name": "pets", "hash": "other"}
        check_paired(*self.changed(settings=settings, task={"stream": 0}, stream=stream))
        check_paired(*self.changed(R=[[1.0], [1.0]], stream=stream))  # joint training, and not
        check_paired(*self.changed(settings={"full_test": True}, task={"test": 10}))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"task": {"classes": ["dog"]}}, "one and two are of different tasks: task 1 has"),
            ({"task": {"test": 6}}, "different numbers of test images"),
            ({"settings": {"test_noise": 0.1}}, "test_noise is 0.0 and 0.1"),
            ({"seed": 1}, "seed is 0 and 1"),
            ({"stream": {"hash": "x"}}, "same settings but other images; the data has changed"),
            ({"backbone": {"name": "b", "fingerprint": "f"}}, "different backbones: a and b"),
        ],
    )
    def test_evaluation_data_may_not_differ(self, changes, message) -> None:
        one, two = self.changed(**changes)
        with pytest.raises(InputError, match=message):
            check_paired(one, two)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"task": {"classes": ["dog"]}}, r"different tasks: .* \(dog\) .*; report them apart"),
            ({"task": {"test": 6}, "seed": 1}, "different numbers of test images"),
            ({"stream": {"name": "pets", "hash": "x"}}, "the data has changed between them"),
            ({"backbone": {"name": "b", "fingerprint": "f"}}, "different backbones: a and b"),
        ],
    )
    def test_one_table_cannot_hold_both(self, changes, message) -> None:
        with pytest.raises(InputError, match=message):
            build_rows(self.changed(**changes))

    def test_a_refusal_names_the_folders_and_what_differs(self, tmp_path) -> None:
        for result in self.changed(task={"classes": ["dog"]}, settings={"tasks": 3}):
            result.write(tmp_path / result.key)
        with pytest.raises(InputError) as refused:
            build_rows([Result.read(tmp_path / key) for key in ("one", "two")])
        assert str(refused.value) == (
            f"results '{tmp_path}/one' and '{tmp_path}/two' are of different tasks: tasks is 10 "
            "and 3; report them apart"
        )

    def test_rows_with_another_evaluation_show_it(self) -> None:
        found = build_rows(self.changed(settings={"test_noise": 0.1}))
        assert [row.name for row in found] == ["A", "B (test_noise=0.1)"]
        found = build_rows(self.changed(settings={"full_test": True}, task={"test": 10}))
        assert [row.name for row in found] == ["A", "B (full test)"]

    def test_one_table_has_one_definition_of_a_metric(self) -> None:
        one, two = self.changed(definitions={"forgetting": "max"})
        one = one.model_copy(update={"definitions": {"forgetting": "mean"}})
        with pytest.raises(InputError, match=r"one and two define.*forgetting is 'mean' and 'max'"):
            build_rows([one, two])
        assert metric_definitions([one]) == "forgetting = mean"

    def test_no_result_replaces_another(self) -> None:
        one = make_result("A", 0, 80, 10)
        assert len(build_rows([one, one])) == 1  # the same result in two folders
        with pytest.raises(InputError, match="one and two have the same settings and seed, but"):
            build_rows([one.model_copy(update={"key": key}) for key in ("one", "two")])

    def test_seeds_of_one_row_have_the_same_tasks(self) -> None:
        one, _ = self.changed()
        two = make_result("A", 1, 80, 10).model_copy(update={"tasks": [], "key": "two"})
        with pytest.raises(InputError, match="one and two are of different tasks"):
            build_rows([one, two])


class TestSweeps:
    def results(self, **settings: list[object]) -> list[Result]:
        [(name, values)] = settings.items()
        return [make_result("dosapp", 0, 80, 10, **{name: value}) for value in values]

    def test_three_values_of_one_number_are_a_line(self) -> None:
        [sweep] = find_sweeps(build_rows(self.results(stream_fraction=[1.0, 0.25, 0.5])))
        assert sweep.setting == "stream_fraction"
        assert [value for value, _ in sweep.points] == [0.25, 0.5, 1.0]

    def test_a_default_value_is_a_point_of_the_sweep(self) -> None:
        options = [{}, {"sparsity": 0.3}, {"sparsity": 0.5}, {"sparsity": 0.5, "lam": 0.95}]
        [sweep] = find_sweeps(build_rows(self.results(options=options)))
        assert sweep.setting == "sparsity"
        assert [value for value, _ in sweep.points] == [0.1, 0.3, 0.5]

    def test_stored_hyperparameters_are_used_instead_of_the_defaults(self) -> None:
        results = [
            result.model_copy(update={"hyperparameters": {"pace": pace}})
            for pace, result in enumerate(self.results(options=[{}, {"lam": 0.95}, {"lam": 0.97}]))
        ]
        [sweep] = find_sweeps(build_rows(results))
        assert (sweep.setting, [value for value, _ in sweep.points]) == ("pace", [0, 1, 2])

    def test_a_removed_method_is_no_error(self) -> None:
        old = make_result("retired", 0, 70, 9, options={"depth": 3})
        assert (
            len(
                list(
                    find_sweeps(build_rows([old, *self.results(stream_fraction=[1.0, 0.25, 0.5])]))
                )
            )
            == 1
        )

    def test_two_values_are_no_sweep(self) -> None:
        assert not list(find_sweeps(build_rows(self.results(stream_fraction=[0.5, 0.25]))))


class TestFigures:
    @pytest.fixture(autouse=True)
    def close(self):
        plt = pytest.importorskip("matplotlib.pyplot")
        yield
        plt.close("all")

    def test_a_sweep_is_a_line_of_accuracy_and_one_of_forgetting(self) -> None:
        from dosapp.report.figures import draw_figures

        results = [
            make_result("dosapp", seed, 80 * share + seed, 10 - share, stream_fraction=share)
            for share in (1.0, 0.25, 0.5)
            for seed in (0, 2)
        ]
        drawn = draw_figures(build_rows(results))["sweeps"]
        left, right = drawn.axes
        accuracy, forgetting = (axes.containers[0].lines[0] for axes in (left, right))
        assert accuracy.get_linestyle() == forgetting.get_linestyle() == "-"
        assert list(accuracy.get_xdata()) == [0.25, 0.5, 1.0]
        assert list(accuracy.get_ydata()) == [21, 41, 81]
        assert list(forgetting.get_ydata()) == [9.75, 9.5, 9]
        assert left.get_xlabel() == "stream_fraction"
        assert left.get_xscale() == "linear"

    def test_a_sweep_over_magnitudes_is_logarithmic(self) -> None:
        from dosapp.report.figures import plot_sweeps

        options = [{"sparsity": value} for value in (0.01, 0.1, 0.5)]
        drawn = plot_sweeps(
            build_rows(make_result("dosapp", 0, 80, 10, options=one) for one in options)
        )
        assert drawn.axes[0].get_xscale() == "log"
        assert drawn.axes[0].get_xlabel() == "trainable share of candidates, c"
        assert plot_sweeps(build_rows(RESULTS)) is None

    def test_a_forgetting_map_marks_where_another_dataset_begins(self) -> None:
        from dosapp.report.figures import plot_forgetting_maps

        forgot = [[5.0 if i < t else None for i in range(5)] for t in range(5)]
        changes = {"R": [[50.0] * 5] * 5, "forgetting_matrix": forgot}
        streams = [{"name": "pets+planes", "boundaries": b} for b in ([2], [])]
        two, one = (
            plot_forgetting_maps(
                build_rows([RESULTS[0].model_copy(update={**changes, "stream": stream})])
            )
            for stream in streams
        )
        across, down = two.axes[0].lines
        assert list(across.get_xdata()) == [1.5, 1.5]  # between tasks 2 and 3
        assert list(down.get_ydata()) == [0.5, 0.5]  # between what follows sessions 2 and 3
        assert not one.axes[0].lines
        labels = [two.axes[0].get_yticklabels()[n].get_text() for n in (0, 1)]
        assert labels == ["2", "3"]


def test_bands_of_accuracy_stay_within_100_per_cent() -> None:
    from dosapp.report.figures import assign_colours, plot_accuracy

    results = [
        make_result("SPU", seed, a, 1.0).model_copy(update={"R": [[a], [a]]})
        for seed, a in enumerate((60.0, 100.0))
    ]
    rows = build_rows(results)
    [axes] = plot_accuracy(rows, assign_colours(rows)).axes
    assert axes.collections[0].get_paths()[0].vertices[:, 1].max() == 100


class TestManyRows:
    @pytest.fixture
    def many(self):
        learners = [
            make_result(f"L{n:02}", 0, 60.0 + n, 10.0, buffer_size=50 * (n == 3)) for n in range(16)
        ]
        return build_rows(
            [*learners, make_result("zero-shot", 0, 40.0, 5.0), make_result("Joint", 0, 90.0, None)]
        )

    def test_curves_become_a_table_sorted_by_final_accuracy(self, many) -> None:
        from dosapp.report.figures import assign_colours, plot_accuracy

        [axes] = plot_accuracy(many, assign_colours(many)).axes
        names = [tick.get_text() for tick in axes.get_yticklabels()]
        assert (names[:2], names[-1]) == (["Joint", "L15"], "zero-shot")
        assert [text.get_text() for text in axes.texts][:2] == ["90.0", "75.0"]
        assert not axes.lines

    def test_a_ranking_shows_zero_shot_and_joint_training_as_lines(self, many) -> None:
        from dosapp.report.figures import OTHER, assign_colours, plot_accuracy_forgetting

        accuracy, forgetting = plot_accuracy_forgetting(many, assign_colours(many)).axes
        names = [tick.get_text() for tick in accuracy.get_yticklabels()]
        assert names == [f"L{n:02}" for n in range(16)]  # the bounds are lines
        assert [text.get_text() for text in accuracy.texts] == ["zero-shot", "Joint"]
        marks = [one.lines[0] for one in forgetting.containers]
        hollow = [n for n, mark in enumerate(marks) if mark.get_markerfacecolor() == "white"]
        assert hollow == [3]
        assert {mark.get_color() for mark in marks} == {OTHER}


def test_names_are_safe_in_latex() -> None:
    assert escape_latex("SPU + D^u (a_b=50%)") == r"SPU + $D^u$ (a\_b=50\%)"
    assert escape_latex("{x}^2~$") == r"\{x\}\textasciicircum{}2\textasciitilde{}\$"


def test_a_report_names_all_backbones_and_machines() -> None:
    one, two = (make_result(label, 0, 1.0, None) for label in "AB")
    common = {"libraries": {"dosapp": "1", "torch": "2"}, "tasks": [{"classes": ["a", "b"]}]}
    one = one.model_copy(
        update={**common, "machine": "m", "backbone": {"name": "x", "fingerprint": "f"}}
    )
    other = {"machine": "n", "backbone": {"name": "y", "fingerprint": "g"}}
    two = one.model_copy(update={**other, "stream": {"name": "signs"}})
    assert describe_scenarios([one, two, one]).startswith(
        "pets: 2 classes in 1 sessions, signs: 2 classes in 1 sessions; after each session"
    )
    assert describe_provenance([one, two]) == (
        "backbone x (f) / backbone y (g), dosapp 1, torch 2, m / n"
    )


def test_a_seed_whose_gate_held_back_all_images_has_no_pseudo_label_accuracy() -> None:
    open_, shut = make_result("A", 0, 50.0, 1.0), make_result("A", 1, 50.0, 1.0)
    shut = shut.model_copy(update={"pseudo_labels": [None], "disagreement": [None]})
    assert "| A | 80.0 | 2.0 | 0.50 ± 0.00 |" in stream_statistics(build_rows([open_, shut]))
