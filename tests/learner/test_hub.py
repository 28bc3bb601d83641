"""Learners on the hub, over HTTP to a server on loopback, and their model cards."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dosapp.backbones.registry import TINY
from dosapp.learner.learner import Learner
from dosapp.learner.model_card import write_model_card
from dosapp.runtime.files import lock_folder
from support.cli import dosapp
from support.fake_hub import TOKEN, FakeHub, serve_fake_hub


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_fake_hub() as hub:
        yield hub


def run_with_hub(hub: FakeHub, *arguments: object, code: int = 0, token: str = TOKEN) -> str:
    """Run Python in a process that connects to the fake hub; return what it printed."""
    changes = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": token}
    changes |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    changes["HF_HOME"] = str(Path(os.environ["DOSAPP_CACHE"]) / "hub")
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **changes},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


ROUND_TRIP = """
import sys
from dosapp import Learner
folder, target = sys.argv[1:]
learner = Learner.load(folder)
print(learner.push_to_hub("me/foxes"))
again = Learner.from_pretrained("me/foxes")
assert again.digest() == learner.digest()
assert again.classes == learner.classes
again.save(target)
"""


def test_a_learner_comes_back_the_same_and_private(hub, saved, tmp_path) -> None:
    learner, folder = saved
    printed = run_with_hub(hub, "-c", ROUND_TRIP, folder, tmp_path / "again")
    assert f"{hub.url}/me/foxes/commit/" in printed
    assert hub.private == {"me/foxes"}
    files = hub.repositories["me/foxes"]
    assert {Path(name).suffix for name in files} == {".md", ".json", ".safetensors"}
    assert Learner.load(tmp_path / "again").digest() == learner.digest()
    card = files["README.md"].decode()
    assert all(name in card for name in learner.classes)


def test_the_commands_send_only_the_learners_files(hub, saved, tmp_path) -> None:
    learner, folder = saved
    (folder / "tokens.json").write_text('{"secret": 1}')
    (folder / "audit.jsonl").write_text("{}")
    arguments = ["-m", "dosapp", "push", folder, "me/foxes", "--public"]
    assert "load it with Learner.from_pretrained('me/foxes')" in run_with_hub(hub, *arguments)
    assert hub.private == set()
    versions = {f"versions/{n:06d}.safetensors" for n in range(1, 6)}
    assert set(hub.repositories["me/foxes"]) == versions | {
        "README.md",
        "learner.json",
        "working.safetensors",
    }
    target = tmp_path / "pulled"
    pull = ["-m", "dosapp", "pull", "me/foxes", target]
    assert f"wrote {target}" in run_with_hub(hub, *pull, token="")
    assert Learner.load(target).digest() == learner.digest()
    assert len(Learner.open_history(target).versions()) == 5
    assert "already exists; choose another folder" in dosapp("pull", "me/x", target, code=2).stderr


def test_a_backbone_in_a_folder_is_not_sent_and_can_be_given(
    hub, learner_settings, tmp_path
) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "learner"
    shutil.copytree(TINY, mine)
    Learner(learner_settings(backbone=str(mine))).save(folder, "new")
    printed = run_with_hub(hub, "-m", "dosapp", "push", folder, "me/foxes")
    assert f"note: the backbone '{mine}' is a folder here and is not uploaded" in printed
    card = hub.repositories["me/foxes"]["README.md"].decode()
    assert "Learner.from_pretrained('me/foxes', backbone='FOLDER')" in card
    assert "a folder of the author's" in card
    assert "base_model" not in card
    mine.rename(tmp_path / "theirs")
    load = "from dosapp import Learner; Learner.from_pretrained('me/foxes', backbone='theirs')"
    with contextlib.chdir(tmp_path):
        run_with_hub(hub, "-c", load)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pull", "me/wolves", "new"], 2, "learner 'me/wolves' cannot be downloaded: "),
        (["pull", "a/b/c", "new"], 2, "learner 'a/b/c' cannot be downloaded: "),
    ],
)
def test_what_the_hub_does_not_know_is_one_sentence(
    hub, arguments, code, message, tmp_path
) -> None:
    *command, name = arguments
    printed = run_with_hub(hub, "-m", "dosapp", *command, tmp_path / name, code=code)
    assert printed.startswith(f"dosapp: {message}")
    assert printed.count("\n") == 1
    assert not (tmp_path / name).exists()


def test_an_unreachable_hub_is_one_sentence(saved) -> None:
    _, folder = saved
    printed = dosapp("push", folder, "me/foxes", code=1).stderr  # HF_HUB_OFFLINE is set in tests
    assert printed.startswith("dosapp: learner 'me/foxes' cannot be uploaded: ")
    assert printed.count("\n") == 1


def test_images_are_not_uploaded_unless_asked(learner_settings, tmp_path) -> None:
    Learner(learner_settings(buffer_size=4)).save(tmp_path / "x")
    printed = dosapp("push", tmp_path / "x", "me/foxes", code=2).stderr
    assert "holds images" in printed
    assert "--include-images" in printed


def test_the_card_tells_the_history(saved) -> None:
    learner, folder = saved
    card = write_model_card(folder, "me/foxes")
    _, header, text = card.split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "dosapp"
    assert "dosapp" in yaml.safe_load(header)["tags"]
    assert f"learned {len(learner.classes)} classes in 1 session" in text
    assert text.count("\n| ") == 6  # the head, and five versions
    assert '- method: "dosapp"' in text
    assert "No images are stored. 5 versions" in text
    assert "None were measured" in text
    assert "null" not in text
    assert dosapp("push", folder, "me/foxes", "--dry-run").stdout == card


def test_the_card_has_what_was_chosen_or_measured_and_names_no_caller(saved) -> None:
    learner, folder = saved
    learner.change_training(lr=0.0025, epochs=7)
    with lock_folder(folder) as lock:
        history = learner.history(folder)
        history.begin_writing(lock)
        seen = {"canary": 62.5, "who": "alice of the token list"}
        history.append(learner.state(), learner.working_state(), "a session", seen)
    card = write_model_card(folder, "me/foxes")
    assert "- lr: 0.0025\n- epochs: 7\n" in card
    assert "- canary: 62.5\n" in card
    assert "alice" not in card


def test_the_card_has_the_metrics_of_a_run(tmp_path, small) -> None:
    from dosapp.experiments.run import run

    result = run(small(method="spu"), tmp_path / "run")
    card = write_model_card(tmp_path / "run" / "learner", "me/run")
    assert f"- accuracy: {result.R[-1]}" in card
    assert "session 2: adapted" in card
