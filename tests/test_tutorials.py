"""The tutorials, done as they are written, command by command."""

import contextlib
import shlex
from pathlib import Path

import pytest
from PIL import Image

from dosapp import Learner
from support.cli import dosapp
from support.documents import all_blocks, serving
from support.images import write_images, write_shape_folders

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


@pytest.mark.slow
def test_your_own_photos(tmp_path, monkeypatch, capsys) -> None:
    """Generated photos, the embedded backbone, and a real server."""
    monkeypatch.chdir(tmp_path)
    write_shape_folders(tmp_path / "photos", train=12, test=0)
    write_images(tmp_path / "more-photos" / "zorp", 6)
    write_images(tmp_path / "more-photos" / "kib", 6)
    (tmp_path / "new-images").mkdir()
    with Image.open(tmp_path / "photos" / "wug" / "0.png") as image:
        image.save(tmp_path / "new-images" / "1.jpg")
    printed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for language, code in all_blocks((TUTORIALS / "your-own-photos.md").read_text()):
            if language == "python":
                exec(code, {})
            lines = code.splitlines() if language == "sh" else []
            for _, *words in (shlex.split(line, comments=True) for line in lines):
                if words[0] == "serve":
                    url = stack.enter_context(serving(words[1:], tmp_path))
                    monkeypatch.setenv("DOSAPP_URL", url)
                    continue
                output = dosapp(*words).stdout
                printed[" ".join(words[:2])] = output
                if words[0] == "token":
                    monkeypatch.setenv("DOSAPP_TOKEN", output.strip())
    learned, prediction = capsys.readouterr().out.splitlines()
    # Of 12 images of each class 3 are in the canary.
    assert learned.startswith("8 classes, 72 images, 120 steps (learning rate 0.0003, 30 epochs")
    assert prediction.startswith("wug ")
    assert Path("sheet.png").exists()
    assert "zero-shot" in printed["run --data"]
    assert "new-images/1.jpg: wug" in printed["client predict"]
    assert "learned" in printed["client versions"]
    assert "is a copy of version 1" in printed["client rollback"]
    versions = Learner.open_history("my-learner").versions()
    assert any("zorp" in version.facts["classes"] for version in versions)
    assert "zorp" not in versions[-1].facts["classes"]
