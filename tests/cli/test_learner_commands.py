"""Commands on the folder of a learner and on a service."""

import json
import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from dosapp.drills.service_process import encode_test_images, zip_session
from dosapp.learner.learner import Learner
from dosapp.runtime.files import lock_folder
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings
from dosapp.service.tokens import Tokens
from support.cli import dosapp
from support.services import save_trained_learner, serve_at_port

ODD = "[/x] fox :cat:"  # a class name that is neither markup nor an emoji


@pytest.fixture(scope="module")
def saved(loaded_tiny, tmp_path_factory):
    """A folder with two versions, the second with an odd class name; and the scenario."""
    folder = tmp_path_factory.mktemp("saved") / "learner"
    scenario = save_trained_learner(loaded_tiny, folder)
    learner = Learner.load(folder)
    learner.rename(learner.classes[0], ODD)
    learner.save(folder, f"now there is {ODD}")
    return folder, scenario


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "learner"))


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

    def test_json(self, folder) -> None:
        versions = json.loads(dosapp("history", "list", folder, "--json").stdout)
        assert [v["number"] for v in versions] == [1, 2]
        assert versions[1] == json.loads(dosapp("history", "show", folder, 2, "--json").stdout)
        assert versions[1]["parent"] == versions[0]["checksum"]
        diffs = json.loads(dosapp("history", "diff", folder, 0, 1, "--json").stdout)
        assert all(diff["distance"] > 0 for diff in diffs)

    def test_diff(self, folder) -> None:
        rows = dosapp("history", "diff", folder, 0, 1).stdout.splitlines()
        assert rows[0].split() == ["tensor", "entries", "of", "distance", "largest"]
        *weights, others = rows[1:]
        assert all(row.split()[0].startswith(("student/", "teacher/")) for row in weights)
        assert others.startswith("other tensors that differ (--json): ")
        assert "mask (" in others
        same = dosapp("history", "diff", folder, 1, 2).stdout
        assert same == "versions 1 and 2 are the same\n"

    def test_rollback_and_gc(self, folder) -> None:
        printed = dosapp("history", "rollback", folder, 1).stdout
        assert printed == "version 3 is a copy of version 1\n"
        assert ODD not in Learner.load(folder).classes
        assert dosapp("history", "gc", folder, "--keep", 1).stdout == "2 versions dropped\n"
        assert [v.number for v in Learner.open_history(folder).versions()] == [3]
        assert ODD not in Learner.load(folder).classes

    def test_rollback_of_a_served_learner_names_the_client(self, folder) -> None:
        with lock_folder(folder):
            refused = dosapp("history", "rollback", folder, 1, code=1).stderr
        assert "dosapp client rollback 1" in refused.replace("\n", " ")

    def test_a_torn_version_is_named_and_the_others_listed(self, folder) -> None:
        path = folder / "versions" / "000002.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        listed = dosapp("history", "list", folder)
        assert [row.split()[0] for row in listed.stdout.splitlines()[1:]] == ["1"]
        assert "is torn" in listed.stderr
        back = dosapp("history", "rollback", folder, 1)
        assert back.stdout == "version 2 is a copy of version 1\n"
        assert "continuing from version 1" in back.stderr.replace("\n", " ")


def test_new_creates_a_learner_without_classes(tmp_path) -> None:
    place = tmp_path / "new"
    printed = dosapp("new", place, "--method", "spu", "--all-class-negatives").stdout
    assert printed == f"wrote {place}; now: dosapp serve {place}\n"
    learner = Learner.load(place)
    assert learner.classes == []
    assert (learner.settings.method, learner.settings.all_class_negatives) == ("spu", True)
    assert "already exists" in dosapp("new", place, code=2).stderr


def test_configure_changes_how_it_trains(folder) -> None:
    printed = dosapp("configure", folder, "--epochs", 60, "--lr", 0.002).stdout
    assert printed == f"{folder} now trains with lr 0.002, epochs 60\n"
    learner = Learner.load(folder)
    assert (learner.training.epochs, learner.training.lr, learner.student.lr) == (60, 0.002, 0.002)
    count = len(Learner.open_history(str(folder)).versions())
    assert "nothing to change" in dosapp("configure", folder, code=2).stderr
    assert "epochs is 0" in dosapp("configure", folder, "--epochs", 0, code=2).stderr
    assert len(Learner.open_history(folder).versions()) == count


def test_export(folder, tmp_path) -> None:
    dosapp("export", folder, tmp_path / "plain")
    classes = json.loads((tmp_path / "plain" / "classes.json").read_text())["classes"]
    assert classes == Learner.load(folder).classes
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert "is not empty" in dosapp("export", folder, tmp_path / "plain", code=2).stderr
    (tmp_path / "plain" / "old.txt").write_text("of the first export")
    dosapp("export", folder, tmp_path / "plain", "--force")
    assert (tmp_path / "plain" / "model.safetensors").exists()
    assert not (tmp_path / "plain" / "old.txt").exists()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "fox.jpg").write_bytes(b"fox")
    refused = dosapp("export", folder, tmp_path / "photos", "--force", code=2)
    assert "holds no export, so --force does not replace it" in refused.stderr
    assert (tmp_path / "photos" / "fox.jpg").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["learner", "photos", "plain"]


def test_tokens(folder) -> None:
    pytest.importorskip("fastapi")
    token = dosapp("token", "add", folder, "alice [/x]", "--role", "teach").stdout.strip()
    dosapp("token", "add", folder, "bob", "--role", "predict")
    assert Tokens(folder).caller(token).name == "alice [/x]"
    listed = dosapp("token", "list", folder).stdout
    assert listed.splitlines() == ["alice [/x]: teach", "bob: predict"]
    removed = dosapp("token", "remove", folder, "alice [/x]").stdout
    assert removed == "removed the token of 'alice [/x]'; it works no longer\n"
    assert Tokens(folder).caller(token) is None
    assert "no token named 'eve'" in dosapp("token", "remove", folder, "eve", code=2).stderr
    assert "no request is answered now" in dosapp("token", "remove", folder, "bob").stderr
    assert "there is no token" in dosapp("token", "list", folder).stderr
    (folder / "tokens.json").write_text("{")
    assert "no token is accepted" in dosapp("token", "list", folder, code=1).stderr
    (folder / "tokens.json").unlink()
    assert "role is 'king'" in dosapp("token", "add", folder, "x", "--role", "king", code=2).stderr


def test_every_client_command(folder, saved, tmp_path, monkeypatch) -> None:
    """One service, used through the command line alone."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    scenario = saved[1]
    image = tmp_path / "[b]image.png"
    image.write_bytes(encode_test_images(scenario)[0])
    settings: ServiceSettings = ServiceSettings.parse({"threads": 1, "batch_wait": 0.0})
    with open_service(folder, settings) as service, serve_at_port(service) as url:
        monkeypatch.setenv("DOSAPP_URL", url)
        assert "the request has none" in dosapp("client", "status", code=2).stderr
        monkeypatch.setenv("DOSAPP_TOKEN", Tokens(folder).add("alice", "teach"))

        def client(*arguments: object, code: int = 0) -> str:
            output = dosapp("client", *arguments, code=code)
            return output.stderr if code else output.stdout

        def status() -> dict:
            values: dict = json.loads(client("status"))
            return values

        answer = client("predict", image, "--top", 2, "--no-learn").splitlines()
        assert answer[0].startswith(f"{image}: ")
        assert answer[1] == "version 2"
        # It was trained without a canary, so it would stay as it is.
        assert [
            "adaptation is off" in dosapp("client", "predict", image, flag).stderr
            for flag in ("--learn", "--no-learn")
        ] == [True, False]
        predicted = json.loads(client("predict", image, "--json"))
        assert len(predicted["predictions"][0]["top"]) == 3
        assert "cannot be read" in client("predict", tmp_path / "nothing.png", code=2)
        (tmp_path / "unlabelled").mkdir()
        assert "has no images in it" in client("predict", tmp_path / "unlabelled", code=2)
        shutil.copy(image, tmp_path / "unlabelled" / "1.png")
        assert "unlabelled/1.png: " in client("predict", tmp_path / "unlabelled", "--no-learn")

        session = tmp_path / "session"
        with zipfile.ZipFile(BytesIO(zip_session(scenario, 1, range(2), 8))) as archive:
            archive.extractall(session)
        assert client("learn", session).startswith("version 3: 2 classes, 16 images")
        assert status()["classes"] == 5

        assert client("correct", image, ODD, "--new-class") == "1 correction pending\n"
        assert client("correct", image, ODD) == "1 correction pending\n"  # the same image
        assert client("forget") == "1 correction discarded\n"
        assert "there is nothing to learn" in client("learn", code=2)
        client("correct", image, ODD, "--new-class")
        printed = client("learn").replace("\n", " ")
        assert printed.startswith("version 4: 1 class, 1 image")

        listed = client("versions").splitlines()
        assert [row.split()[0] for row in listed] == ["1", "2", "3", "4"]
        assert listed[3].endswith(f"learned {ODD}")
        assert client("rollback", 2) == "version 5 is a copy of version 2\n"
        assert status()["classes"] == 3
        assert "has no version 99" in client("rollback", 99, code=2)

        assert client("freeze").startswith("frozen: ")
        assert status()["frozen"] == "frozen by alice"
        assert client("unfreeze").startswith("no longer frozen")
        assert status()["frozen"] == ""
    assert "no service answers" in client("status", code=2)


def test_classes_of_a_service_are_listed_renamed_and_removed(folder, monkeypatch) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    settings: ServiceSettings = ServiceSettings.parse({"threads": 1, "token": False})
    with open_service(folder, settings) as service, serve_at_port(service) as url:
        monkeypatch.setenv("DOSAPP_URL", url)
        first, *_, last = dosapp("client", "classes").stdout.splitlines()
        renamed = dosapp("client", "rename", first, "arctic [b]fox").stdout
        assert renamed == f"version 3: '{first}' is now 'arctic [b]fox'\n"
        removed = dosapp("client", "remove", last).stdout
        assert removed == f"version 4: '{last}' is no longer predicted\n"
        assert dosapp("client", "classes").stdout.splitlines()[0] == "arctic [b]fox"
        assert len(service.classes) == 2
        assert "unknown class" in dosapp("client", "remove", last, code=2).stderr
