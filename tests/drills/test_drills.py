"""The drills, small: what they look for is found when it is there."""

import pytest

from dosapp.drills import bad_input, crash, guards
from dosapp.history.history import Version

pytest.importorskip("fastapi")


def test_bad_requests_are_refused_for_what_they_are_and_change_nothing(tmp_path) -> None:
    found = bad_input.drill(tmp_path / "learner", 145)  # five of each kind
    assert found["wrong"] == []
    assert found["weights_unchanged"]
    assert sum(found["codes"].values()) == 145
    at_the_door = {kind for kind in found["codes"] if kind.endswith(("401", "403"))}
    assert at_the_door == {"wrong token: 401", "weak token: 403"}


def test_a_service_that_turns_everybody_away_does_not_pass(tmp_path, monkeypatch) -> None:
    from dosapp.service.tokens import Tokens

    monkeypatch.setattr(Tokens, "caller", lambda self, token: None)
    found = bad_input.drill(tmp_path / "learner", 29)
    assert found["wrong"][0].startswith("an honest request got 401")
    assert len(found["wrong"]) > 20


@pytest.mark.slow
def test_two_thousand_of_them(tmp_path) -> None:
    found = bad_input.drill(tmp_path / "learner", 2040)
    assert found["wrong"] == []
    assert found["weights_unchanged"]


@pytest.mark.slow
def test_killed_in_the_middle_of_everything(tmp_path) -> None:
    found = crash.drill(tmp_path / "learner", 4)
    assert found["lost"] == found["mixed"] == found["errors_while_alive"] == []
    assert found["answers"] > 0
    assert found["ended_with"] == 0
    assert found["intervals"] > 0
    assert found["pictures_adapted"] >= 8 * found["intervals"]
    assert found["most_pictures_unlearned_by_a_kill"] <= 32


def test_what_a_kill_took_would_be_noticed() -> None:
    def version(number: int, reason: str, *classes: str) -> Version:
        return Version(number, "", "", reason, "", 0, {"classes": list(classes)}, {})

    first, then = version(1, "the service began", "owl"), version(3, "4 steps on the stream", "owl")
    taught = version(2, "taught fox, hen", "owl", "fox", "hen")
    seen = crash.StreamSample(versions={1}, lessons=[(2, ("fox", "hen"))], began=2, adapted=64)
    later = version(3, "4 steps on the stream", "owl", "fox", "hen")
    assert crash._lost(3, [first, taught, later], seen) == []
    gone = "the lesson of version 2 is gone"
    assert crash._lost(3, [first, taught, then], seen) == [gone]  # its classes are
    reused = version(2, "taught elk", "owl", "elk", "fox", "hen")
    assert crash._lost(3, [first, reused, later], seen) == [gone]
    assert crash._lost(1, [first], crash.StreamSample({}, {1}, [(2, ("fox", "hen"))])) == [
        "version 2 was told of, 1 came back", gone
    ]  # fmt: skip
    seen.adapted = 65  # an interval that became a version, one that did not, and a picture more
    assert crash._lost(3, [first, taught, later], seen) == [
        "more than an interval of the stream after version 2 is gone"
    ]


def test_a_mixture_would_be_noticed(tmp_path) -> None:
    from dosapp.drills.service_process import make_small_learner, pictures

    images = pictures(make_small_learner(tmp_path / "learner"))[:4]
    seen = crash.StreamSample({(1, 0): {("nobody", 0.123)}}, {1})
    mixed = crash._mixed(tmp_path / "learner", images, seen, lambda words: None)
    assert mixed == ["version 1, picture 0: nobody 0.1230"]


@pytest.mark.slow
def test_guards_hold_on_harmful_streams() -> None:
    small = {"classes": 20, "tasks": 2, "train_images": 20, "test_images": 40, "epochs": 3}
    outcomes = guards.drill([0], passes=1, changes=small)
    assert {o.stream for o in outcomes if o.guards} == {
        "normal", "one class", "noise", "shuffled pixels", "one image", "other domain"
    }  # fmt: skip
    assert all(o.change > -2 for o in outcomes if o.guards), guards.table(outcomes)
    held = {o.stream: o.held for o in outcomes if o.guards}
    assert held["one class"] > 0
    assert held["one image"] > 0
