"""Commands on a learner's folder and on a service, each as people type it."""

import json
import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from dosapp.drills.service_process import lesson, pictures
from dosapp.learner.learner import Learner
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from support.cli import dosapp
from support.services import at_a_port, taught

ODD = "[/x] fox :cat:"  # neither markup nor an emoji, but somebody's class


@pytest.fixture(scope="module")
def made(_loaded, tmp_path_factory):
    """Two versions: taught, and with a class of an odd name."""
    folder = tmp_path_factory.mktemp("taught") / "learner"
    stream = taught(_loaded, folder)
    learner = Learner.load(folder)
    learner.rename(learner.classes[0], ODD)
    learner.save(folder, f"now there is {ODD}")
    return folder, stream


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "learner"))


class TestHistory:
    def test_list_and_show_print_names_as_they_are(self, folder) -> None:
        rows = dosapp("history", "list", folder).stdout.splitlines()
        assert rows[0].split() == ["version", "when", "why", "classes", "kB"]
        assert [row.split()[0] for row in rows[1:]] == ["1", "2"]
        assert f"now there is {ODD}" in rows[2]
        shown = dosapp("history", "show", folder, 2).stdout
        assert f"version  2, now there is {ODD}, " in shown
        assert f"classes  {ODD}, " in shown
        assert "measured  nothing" in shown
        missing = dosapp("history", "show", folder, 3, code=2).stderr
        assert "has no version 3; it has 1 to 2" in missing

    def test_for_machines(self, folder) -> None:
        found = json.loads(dosapp("history", "list", folder, "--json").stdout)
        assert [v["number"] for v in found] == [1, 2]
        assert found[1] == json.loads(dosapp("history", "show", folder, 2, "--json").stdout)
        assert found[1]["parent"] == found[0]["checksum"]
        moved = json.loads(dosapp("history", "diff", folder, 0, 1, "--json").stdout)
        assert all(one["distance"] > 0 for one in moved)

    def test_diff(self, folder) -> None:
        rows = dosapp("history", "diff", folder, 0, 1).stdout.splitlines()
        assert rows[0].split() == ["tensor", "entries", "of", "distance", "largest"]
        assert any(row.split()[0].startswith("student/") for row in rows)
        same = dosapp("history", "diff", folder, 1, 2).stdout
        assert same == "versions 1 and 2 are the same\n"

    def test_rollback_and_gc(self, folder) -> None:
        said = dosapp("history", "rollback", folder, 1).stdout
        assert said == "version 3 is what version 1 was\n"
        assert ODD not in Learner.load(folder).classes
        assert dosapp("history", "gc", folder, "--keep", 1).stdout == "2 version(s) dropped\n"
        assert [v.number for v in Learner.open_history(folder).versions()] == [3]
        assert ODD not in Learner.load(folder).classes

    def test_a_torn_version_is_named_and_the_others_listed(self, folder) -> None:
        path = folder / "versions" / "000002.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        listed = dosapp("history", "list", folder)
        assert [row.split()[0] for row in listed.stdout.splitlines()[1:]] == ["1"]
        assert "is torn" in listed.stderr
        back = dosapp("history", "rollback", folder, 1)
        assert back.stdout == "version 2 is what version 1 was\n"
        assert "going on from version 1" in back.stderr.replace("\n", " ")


def test_new_makes_a_learner_that_knows_nothing(tmp_path) -> None:
    place = tmp_path / "new"
    said = dosapp("new", place, "--method", "spu", "--rivals").stdout
    assert said.replace("\n", "") == f"wrote {place}; now: dosapp serve {place}"
    learner = Learner.load(place)
    assert (learner.classes, learner.settings.method, learner.settings.all_class_negatives) == (
        [],
        "spu",
        True,
    )
    assert "is there already" in dosapp("new", place, code=2).stderr


def test_export(folder, tmp_path) -> None:
    dosapp("export", folder, tmp_path / "plain")
    classes = json.loads((tmp_path / "plain" / "classes.json").read_text())["classes"]
    assert classes == Learner.load(folder).classes
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert "is not empty" in dosapp("export", folder, tmp_path / "plain", code=2).stderr


def test_tokens(folder) -> None:
    pytest.importorskip("fastapi")
    from dosapp.service.tokens import Tokens

    token = dosapp("token", "add", folder, "alice [/x]", "--role", "teach").stdout.strip()
    dosapp("token", "add", folder, "bob", "--role", "predict")
    assert Tokens(folder).caller(token).name == "alice [/x]"
    listed = dosapp("token", "list", folder).stdout
    assert listed.splitlines() == ["alice [/x]: teach", "bob: predict"]
    dosapp("token", "remove", folder, "alice [/x]")
    assert Tokens(folder).caller(token) is None
    assert "no token named 'eve'" in dosapp("token", "remove", folder, "eve", code=2).stderr
    assert "role is 'king'" in dosapp("token", "add", folder, "x", "--role", "king", code=2).stderr


def test_everything_a_client_can_say(folder, made, tmp_path, monkeypatch) -> None:
    """One service, asked and taught by the command line alone, from the first word to the last."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    stream = made[1]
    image = tmp_path / "[b]picture.png"
    image.write_bytes(pictures(stream)[0])
    settings: ServiceSettings = ServiceSettings.parse({"threads": 1, "batch_wait": 0.0})
    with open_service(folder, settings) as service, at_a_port(service) as url:
        monkeypatch.setenv("DOSAPP_URL", url)

        def client(*words: object, code: int = 0) -> str:
            said = dosapp("client", *words, code=code)
            return said.stderr if code else said.stdout

        def status() -> dict:
            found: dict = json.loads(client("status"))
            return found

        answer = client("predict", image, "--top", 2, "--no-learn").splitlines()
        assert answer[0].startswith(f"{image}: ")
        assert answer[1] == "version 2"
        found = json.loads(client("predict", image, "--json"))
        assert len(found["predictions"][0]["top"]) == 3
        assert "cannot be read" in client("predict", tmp_path / "nothing.png", code=2)

        place = tmp_path / "lesson"
        with zipfile.ZipFile(BytesIO(lesson(stream, 1, range(2), 8))) as archive:
            archive.extractall(place)
        assert client("learn", place).startswith("version 3: 2 class(es), 16 picture(s)")
        assert status()["classes"] == 5

        assert client("correct", image, ODD) == "1 correction(s) wait\n"
        assert client("correct", image, ODD) == "2 correction(s) wait\n"
        assert client("forget") == "2 correction(s) forgotten\n"
        assert "there is nothing to learn" in client("learn", code=2)
        client("correct", image, ODD)
        said = client("learn").replace("\n", " ")
        assert said.startswith("version 4: 1 class(es), 1 picture(s)")
        assert f"a lesson of '{ODD}' alone" in said

        listed = client("versions").splitlines()
        assert [row.split()[0] for row in listed] == ["1", "2", "3", "4"]
        assert listed[3].endswith(f"taught {ODD}")
        assert client("rollback", 2) == "version 5 is what version 2 was\n"
        assert status()["classes"] == 3
        assert "has no version 99" in client("rollback", 99, code=2)

        client("freeze")
        assert status()["frozen"] == "frozen by anybody"
        client("unfreeze")
        assert status()["frozen"] == ""
    assert "no service answers" in client("status", code=2)
