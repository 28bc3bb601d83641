"""The drills, small: they find what they look for."""

import json
from dataclasses import asdict, replace

import pytest

from dosapp.drills import availability, bad_input, crash, guards, poison
from dosapp.history.version import Version

pytest.importorskip("fastapi")


def test_bad_requests_get_the_status_of_their_kind_and_change_nothing(tmp_path) -> None:
    result = bad_input.drill(tmp_path / "learner", 145)  # five of each kind
    assert result["wrong"] == []
    assert result["weights_unchanged"]
    assert sum(result["codes"].values()) == 145
    unauthorized = {kind for kind in result["codes"] if kind.endswith(("401", "403"))}
    assert unauthorized == {"wrong token: 401", "weak token: 403"}


def test_a_service_that_refuses_every_token_does_not_pass(tmp_path, monkeypatch) -> None:
    from dosapp.service.tokens import Tokens

    monkeypatch.setattr(Tokens, "caller", lambda self, token: None)
    result = bad_input.drill(tmp_path / "learner", 29)
    assert result["wrong"][0].startswith("a valid request got 401")
    assert len(result["wrong"]) > 20


@pytest.mark.slow
def test_two_thousand_bad_requests(tmp_path) -> None:
    result = bad_input.drill(tmp_path / "learner", 2040)
    assert result["wrong"] == []
    assert result["weights_unchanged"]


@pytest.mark.slow
def test_kills_lose_nothing_that_was_reported(tmp_path) -> None:
    result = crash.drill(tmp_path / "learner", 4)
    assert result["lost"] == result["mixed"] == result["errors_while_alive"] == []
    assert result["answers"] > 0
    assert result["ended_with"] == 0
    assert result["intervals"] > 0
    assert result["images_adapted"] >= 8 * result["intervals"]
    assert result["most_images_lost_by_a_kill"] <= 32


def test_a_loss_is_found() -> None:
    def version(number: int, reason: str, *classes: str) -> Version:
        return Version(number, "", "", reason, "", 0, {"classes": list(classes)}, {})

    first = version(1, "the service began", "owl")
    session = version(2, "learned fox, hen", "owl", "fox", "hen")
    stream = version(3, "4 steps on the stream", "owl", "fox", "hen")
    without_classes = version(3, "4 steps on the stream", "owl")
    seen = crash.Observations(
        versions={1}, sessions=[(2, ("fox", "hen"))], first_version=2, adapted=64
    )
    assert crash.find_lost(3, [first, session, stream], seen) == []
    lost = "the session of version 2 is lost"
    assert crash.find_lost(3, [first, session, without_classes], seen) == [lost]
    another = version(2, "learned elk", "owl", "elk", "fox", "hen")
    assert crash.find_lost(3, [first, another, stream], seen) == [lost]
    unwritten = crash.Observations(versions={1}, sessions=[(2, ("fox", "hen"))])
    assert crash.find_lost(1, [first], unwritten) == [
        "version 2 was reported, 1 came back", lost
    ]  # fmt: skip
    seen.adapted = 65  # an interval that became a version, one that did not, and one more image
    assert crash.find_lost(3, [first, session, stream], seen) == [
        "more than an interval after version 2 is lost"
    ]
    one_step = version(4, "1 step on the stream", "owl", "fox", "hen")  # before a session
    assert crash.find_lost(4, [first, session, stream, one_step], seen) == []


def test_a_mixture_of_versions_is_found(tmp_path) -> None:
    from dosapp.drills.service_process import encode_test_images, make_small_learner

    images = encode_test_images(make_small_learner(tmp_path / "learner"))[:4]
    seen = crash.Observations({(1, 0): {("wrong", 0.123)}}, {1})
    mixed = crash.find_mixed(tmp_path / "learner", images, seen, lambda message: None)
    assert mixed == ["version 1, image 0: wrong 0.1230"]


@pytest.mark.slow
def test_a_flood_ends_and_honest_callers_are_answered(tmp_path) -> None:
    """The ratios are not asserted: they need a quiet machine."""
    names = ("silent bodies", "many images")
    result = availability.drill(tmp_path / "learner", 2.0, 1, floods=names)
    assert [row["flood"] for row in result["floods"]] == list(names)
    for row in result["floods"]:
        assert row["flooded"]["answers"] > 0
        assert row["flooded"]["error_count"] == 0, row["flooded"]["errors"]
    assert result["ended_with"] == 0
    assert availability.format_table(result).count("\n") == 4


@pytest.mark.slow
def test_guards_hold_on_harmful_streams() -> None:
    small = {"classes": 20, "tasks": 2, "train_images": 20, "test_images": 40, "epochs": 3}
    outcomes = guards.drill([0], passes=1, changes=small)
    assert {o.stream for o in outcomes if o.guards} == {
        "normal", "one class", "noise", "shuffled pixels", "one image", "other domain"
    }  # fmt: skip
    assert all(o.change > -2 for o in outcomes if o.guards), guards.format_table(outcomes)
    held = {o.stream: o.held for o in outcomes if o.guards}
    assert held["one class"] > 0
    assert held["one image"] > 0


@pytest.mark.slow
def test_an_attack_that_harms_an_unguarded_service_is_refused_by_default(tmp_path) -> None:
    drill = poison.PoisonDrill.train(tmp_path / "learner")
    attacks = {attack.name: attack for attack in poison.list_attacks(drill.other_domain)}
    blends = replace(attacks["blends, one class"], intervals=4)
    off, on = (drill.run(blends, guards) for guards in (False, True))
    assert off.worst < -4, off
    assert on.worst > -2, on
    assert on.refused > 0
    own = drill.run(replace(attacks["blends, own token"], intervals=2), True)
    assert own.held > own.adapted / 4  # the attacker's images, not the honest caller's
    assert own.worst > -2, own
    result = poison.to_json([off, on, own])
    assert result["worst_loss"] == min(on.worst, own.worst)
    assert "| blends, one class | " in poison.format_table(result)

    store = tmp_path / "store"
    short = replace(blends, intervals=1)
    first = drill.find_or_run(short, True, store)
    (file,) = store.iterdir()
    file.write_text(json.dumps(asdict(first) | {"held": 12345}))
    assert drill.find_or_run(short, True, store).held == 12345  # read, not run again
    honest = replace(attacks["honest"], intervals=1)
    assert drill.find_or_run(honest, True, store).held != 12345
    assert len(list(store.iterdir())) == 2
