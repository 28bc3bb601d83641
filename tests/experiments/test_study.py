"""Studies: which runs, paired and corrected differences, and held-out data that opens once."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from scipy import stats

from dosapp.errors import InputError
from dosapp.experiments.study import Study, open_held_out
from dosapp.report.study import Comparison, compare_variants, correct_holm, format_study
from support.cli import dosapp
from support.results import make_result
from support.settings import SMALL

VALUES = {
    "reference": "plain",
    "variants": {
        "plain": {"method": "spu"},
        "wide": {"method": "spu", "options": {"sparsity": 0.3}},
    },
    "development": {"shapes": {"data": "shapes"}},
    "held_out": {"signs": {"data": "signs"}},
    "settings": SMALL,
    "seeds": "0-1",
    "class_orders": [None, 1993],
}


def write(path, **changes):
    path.write_text(yaml.safe_dump({**VALUES, **changes}))
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "study.yaml")


class TestRuns:
    def test_variants_times_datasets_times_seeds_times_orders(self, file) -> None:
        study = Study.read(file)
        assert len(list(study.runs())) == 2 * 1 * 2 * 2
        runs = list(study.runs(held_out=True))
        assert len(runs) == 2 * 2 * 2 * 2
        assert {run.settings.data for run in runs if run.is_held_out} == {"signs"}
        assert {run.settings.class_order_seed for run in runs} == {None, 1993}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"reference": "plane"}, "unknown variant 'plane'; did you mean 'plain'"),
            ({"variant": {}}, "did you mean 'variants'"),
            ({"variants": {"plain": {"methd": "spu"}}}, "did you mean 'method'"),
            (
                {"variants": {"plain": {"method": "absent:Mine"}}},
                "'absent:Mine' cannot be imported",
            ),
            ({"seeds": "x"}, "seeds"),
            ({"held_out": {"shapes": {}}}, "has 'shapes' in development and in held_out"),
        ],
    )
    def test_mistakes_are_one_sentence(self, tmp_path, changes, message) -> None:
        with pytest.raises(InputError, match=message):
            Study.read(write(tmp_path / "wrong.yaml", **changes))


class TestHeldOut:
    def test_it_is_recorded_when_it_was_opened(self, file) -> None:
        first = open_held_out(file, Study.read(file))
        assert open_held_out(file, Study.read(file)) == first
        assert json.loads(file.with_suffix(".opened.json").read_text()) == first

    def test_variants_cannot_change_afterwards(self, file) -> None:
        opened = open_held_out(file, Study.read(file))["opened"]
        write(file, variants={**VALUES["variants"], "better": {"method": "dosapp"}})
        with pytest.raises(InputError, match=f"was opened on {opened[:10]}.* with other variants"):
            open_held_out(file, Study.read(file))

    def test_neither_can_the_data_or_the_reference(self, file) -> None:
        open_held_out(file, Study.read(file))
        for changes in (
            {"held_out": {"signs": {"data": "signs", "lr": 0.1}}},
            {"reference": "wide"},
        ):
            with pytest.raises(InputError, match="with other variants"):
                open_held_out(file, Study.read(write(file, **changes)))

    def test_there_must_be_some(self, file) -> None:
        with pytest.raises(InputError, match="has no held_out data to open"):
            open_held_out(file, Study.read(write(file, held_out={})))
        assert not file.with_suffix(".opened.json").exists()

    def test_more_seeds_may_follow(self, file) -> None:
        open_held_out(file, Study.read(file))
        open_held_out(file, Study.read(write(file, seeds="0-4")))


class TestComparisons:
    RESULTS = {
        "shapes": {
            "plain": {(n, None): make_result("A", n, 50.0 + n, 10.0) for n in range(3)},
            "better": {(n, None): make_result("B", n, 60.0 + 1.5 * n, 10.0) for n in range(3)},
        }
    }

    def test_differences_are_paired_with_students_t(self) -> None:
        found = compare_variants(self.RESULTS, "plain")
        [better] = [c for c in found if c.variant == "better" and c.metric == "accuracy"]
        gaps = np.array([10.0, 10.5, 11.0])
        assert better.difference == pytest.approx(gaps.mean())
        half = stats.t.ppf(0.975, 2) * gaps.std(ddof=1) / np.sqrt(3)
        assert better.half_interval == pytest.approx(half)
        assert better.p_value == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue)
        assert "61.5 (+10.5 ± 1.2*)" in format_study(found, {})

    def test_holm_multiplies_the_smallest_p_by_the_number_of_comparisons(self) -> None:
        one = Comparison("d", "v", "accuracy", 0.0, 0.0, 0.0, 0.01, 3)
        family = [one, replace(one, p_value=0.04), replace(one, p_value=0.03)]
        corrected = correct_holm([*family, replace(one, variant="plain", p_value=0.5)], "plain")
        assert [c.p_holm for c in corrected[:3]] == pytest.approx([0.03, 0.06, 0.06])
        assert np.isnan(corrected[3].p_holm)


def test_the_command_computes_compares_and_draws(file, tmp_path) -> None:
    write(file, class_orders=[None])
    printed = dosapp("study", file, "--out", tmp_path / "out").stdout
    assert "| wide |" in printed
    assert "Development data only" in printed
    assert not file.with_suffix(".opened.json").exists()
    assert (tmp_path / "out" / "study-pareto.png").stat().st_size > 3000
    opened = dosapp("study", file, "--out", tmp_path / "out", "--held-out").stdout
    assert "**signs (held out)**" in opened
    assert "Held-out data was opened on" in opened
    again = dosapp("study", file, "--out", tmp_path / "out", "--held-out", "--report-only").stdout
    assert again == opened


def test_nothing_stored_is_one_sentence(file, tmp_path) -> None:
    refused = dosapp("study", file, "--out", tmp_path / "out", "--report-only", code=2)
    assert "compute it first" in refused.stderr
