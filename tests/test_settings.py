"""Settings: names of today and of version 0.1, and mistakes as one sentence."""

import pytest

from dosapp.errors import InputError
from dosapp.settings import LearnerSettings, RunSettings, parse_options, read_yaml

# Values that differ from the defaults, by the names of version 0.1.
LEARNER_VALUES = {
    "memory": 7,
    "batch": 3,
    "caption": "a drawing of a {}.",
    "rivals": True,
    "gate": 0.5,
    "temper": True,
    "skew_aware": True,
    "readmit": 0.25,
    "readmit_every": 4,
    "checkpointing": True,
}
OTHER_TOOLS = {
    "wd": 0.1,
    "learning_rate": 1e-3,
    "num_train_epochs": 3,
    "per_device_train_batch_size": 5,
}
RUN_VALUES = {**LEARNER_VALUES, "stream_batch": 5, "fraction": 0.5, "chunks": True}


def test_names_of_open_clip_and_transformers_mean_the_same() -> None:
    ours = {LearnerSettings.aliases[name]: value for name, value in OTHER_TOOLS.items()}
    assert LearnerSettings.parse(OTHER_TOOLS) == LearnerSettings.parse(ours)
    assert ours == {"weight_decay": 0.1, "lr": 1e-3, "epochs": 3, "batch_size": 5}


@pytest.mark.parametrize(
    ("kind", "values"), [(LearnerSettings, LEARNER_VALUES), (RunSettings, RUN_VALUES)]
)
class TestNamesOfVersion01:
    def test_every_alias_is_tested(self, kind, values) -> None:
        assert set(kind.aliases) == set(values) | set(OTHER_TOOLS)
        assert set(kind.aliases.values()) <= set(kind.model_fields)

    def test_they_mean_the_same_in_the_constructor_and_in_parse(self, kind, values) -> None:
        today = {kind.aliases[name]: value for name, value in values.items()}
        assert kind(**values) == kind(**today) == kind.parse(values) == kind.parse(today)
        for name, value in values.items():
            settings = kind(**{name: value})
            assert (
                getattr(settings, kind.aliases[name])
                == value
                != getattr(kind(), kind.aliases[name])
            )

    def test_dumps_have_todays_names(self, kind, values) -> None:
        dumped = kind(**values).model_dump()
        assert not set(kind.aliases) & set(dumped)
        assert kind(**dumped) == kind(**values)

    def test_both_names_at_once_are_an_error(self, kind, values) -> None:
        for old, value in values.items():
            with pytest.raises(InputError, match=f"{kind.aliases[old]} is given twice"):
                kind.parse({old: value, kind.aliases[old]: value})


def test_a_value_out_of_range_is_one_sentence_with_todays_name() -> None:
    with pytest.raises(InputError, match=r"^buffer_size is -1: input should be greater than"):
        RunSettings.parse({"memory": -1})
    with pytest.raises(InputError, match=r"^template is 'x': write \{\} once"):
        RunSettings.parse({"caption": "x"})


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown key in x\.yaml 'epoch'; did you mean 'epochs'"):
        RunSettings.parse({"epoch": 1}, "x.yaml")


def test_a_run_has_the_settings_of_its_learner() -> None:
    values = {**LEARNER_VALUES, "method": "spu", "head_session_drift": False}
    run = RunSettings(**{**RUN_VALUES, **values})
    assert run.learner() == LearnerSettings(**values)


def test_an_experiment_is_about_the_papers_method_and_a_learner_has_the_default_one() -> None:
    run, learner = RunSettings().learner(), LearnerSettings()
    assert (run.method, run.head_session_drift) == ("dosapp", False)
    assert (learner.method, learner.head_session_drift) == ("stream-gda-ensemble", None)
    differ = {name for name, value in learner if value != getattr(run, name)}
    assert differ == {"method", "head_session_drift"}


def test_options_are_read_as_yaml() -> None:
    assert parse_options(["a=0.3", "b.c=true", "d=x y"]) == {"a": 0.3, "b.c": True, "d": "x y"}
    for wrong in ("a", "=1"):
        with pytest.raises(InputError, match="write it as name=value"):
            parse_options([wrong])


def test_a_settings_file_is_a_mapping(tmp_path) -> None:
    file = tmp_path / "x.yaml"
    with pytest.raises(InputError, match="does not exist"):
        read_yaml(file)
    file.write_text("")
    assert read_yaml(file) == {}
    file.write_text("- 1")
    with pytest.raises(InputError, match="is a list; give key: value"):
        read_yaml(file)
    file.write_text("a: [")
    with pytest.raises(InputError, match="is not YAML"):
        read_yaml(file)


class TestMistakesInPython:
    """The constructor says the same sentence as the command line."""

    def test_a_wrong_name_gets_a_suggestion(self) -> None:
        with pytest.raises(InputError, match=r"^unknown setting 'bathc_size'; did you mean 'batch"):
            LearnerSettings(bathc_size=8)

    def test_a_wrong_value_is_one_sentence(self) -> None:
        with pytest.raises(InputError, match=r"^epochs is 0: input should be greater than"):
            RunSettings(epochs=0)
        with pytest.raises(InputError, match="are two orders of one stream"):
            RunSettings(correlated=True, one_class=True)
        with pytest.raises(InputError, match="task_column 'date' orders the classes"):
            RunSettings(task_column="date", class_order_seed=1)
