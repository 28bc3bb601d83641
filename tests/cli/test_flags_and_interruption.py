"""Of the command line: flags of open_clip and transformers, completion, Ctrl-C."""

import os
import subprocess
import sys

import pytest

from dosapp.backbones.names import HUB_IDS, join_open_clip_names
from dosapp.errors import InputError
from dosapp.experiments.run import CHECKPOINT_INTERVAL
from dosapp.experiments.tracking import TrackingCallback
from dosapp.runtime.plural import plural
from support.cli import FLAGS, dosapp


def test_flags_of_open_clip_and_transformers_give_the_same_settings(settings_of) -> None:
    ours = ["--backbone", "ViT-B-16", "--lr", "1e-4", "--epochs", "3", "--batch-size", "8"]
    ours += ["--weight-decay", "0.1"]
    open_clip = ["--model", "ViT-B-16-quickgelu", "--pretrained", "openai", "--lr", "1e-4"]
    open_clip += ["--epochs", "3", "--batch-size", "8", "--wd", "0.1"]
    transformers = ["--model", "ViT-B-16", "--learning-rate", "1e-4", "--num-train-epochs", "3"]
    transformers += ["--per-device-train-batch-size", "8", "--weight-decay", "0.1"]
    expected = settings_of("run", *ours)
    assert expected.backbone == "ViT-B-16"
    assert settings_of("run", *open_clip) == settings_of("run", *transformers) == expected


def test_open_clip_pairs_are_ids_of_the_hub(tmp_path) -> None:
    assert join_open_clip_names("ViT-L/14", "laion2b_s32b_b82k").startswith("laion/CLIP-ViT-L-14-")
    assert join_open_clip_names(f"local-dir:{tmp_path}", None) == str(tmp_path)
    assert join_open_clip_names("ViT-B-16", str(tmp_path)) == str(tmp_path)
    assert all(name.count("/") == 1 for name in HUB_IDS.values())
    with pytest.raises(InputError, match="did you mean 'laion2b_s34b_b88k'"):
        join_open_clip_names("ViT-B-16", "laion2b_s34b_b88")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pretrained laion2b", "--pretrained is 'laion2b' without --model"),
        ("--model ViT-B-16 --backbone tiny", "the backbone is given twice"),
        ("--model ViT-B-16 --pretrained x", "known: datacomp_xl_s13b_b90k"),
        ("--lr 1 --learning-rate 1", "lr is given twice"),
        ("--device cuba", "device 'cuba' is unknown"),
        ("--device mps", "device 'mps' is not available here"),
        ("--out full", "'full' is not empty and holds no run"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_loaded(
    flags, message, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("dosapp.experiments.plan.plan", lambda _: pytest.fail("loads"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    done = dosapp("run", *flags.split(), cwd=tmp_path, code=2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]


def test_a_grid_with_a_wrong_device_computes_nothing(tmp_path) -> None:
    (tmp_path / "g.yaml").write_text("{method: zero-shot, device: cuba}")
    assert "device 'cuba' is unknown" in dosapp("grid", "g.yaml", cwd=tmp_path, code=2).stderr
    assert not (tmp_path / "runs").exists()


class TestInterruption:
    @pytest.fixture
    def interrupted(self, tmp_path, monkeypatch) -> str:
        """A run that got Ctrl-C two steps after its first checkpoint; what was printed."""

        def interrupt(self, session, step, total, loss) -> None:
            original(self, session, step, total, loss)
            if step == CHECKPOINT_INTERVAL + 2:
                raise KeyboardInterrupt

        original = TrackingCallback.on_training_step
        with monkeypatch.context() as patch:
            patch.setattr(TrackingCallback, "on_training_step", interrupt)
            return dosapp(*self.command, cwd=tmp_path, code=130).stderr

    flags = ("--epochs", "20", "--batch-size", "4", "--method", "flyp")
    command = ("run", *FLAGS, *flags, "--out", "x")

    def test_it_says_where_it_stopped_and_how_to_continue(self, interrupted) -> None:
        assert f"at session 1 of 2, labelled phase, after step {CHECKPOINT_INTERVAL + 2} of" in (
            interrupted
        )
        assert "stopped; the same command continues it" in interrupted

    @pytest.mark.parametrize("resume", [["--resume", "latest"], ["--resume"], ["--resume=latest"]])
    def test_it_says_where_it_continues(self, interrupted, resume, tmp_path, monkeypatch) -> None:
        def stop(self, session, step, total, loss) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(TrackingCallback, "on_training_step", stop)
        printed = dosapp(*self.command, *resume, cwd=tmp_path, code=130).stderr
        where = f"session 1 of 2, labelled phase, after step {CHECKPOINT_INTERVAL}"
        assert f"continues at {where}\n" in printed


def complete(*words: str) -> list[str]:
    """What bash would offer for a command line."""
    environment = {
        "_DOSAPP_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["dosapp", *words]),
        "COMP_CWORD": str(len(words)),
    }
    script = "import sys; sys.argv[0] = 'dosapp'; from dosapp.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.stdout.split()


def test_the_shell_completes_commands_flags_and_names() -> None:
    assert complete("repr") == ["reproduce"]
    assert complete("run", "--stream-d") == ["--stream-dirichlet"]
    assert complete("run", "--method", "dos") == ["dosapp"]
    assert "shapes" in complete("run", "--data", "sha")
    assert complete("new", "--backbone", "ViT-L")[0] == "ViT-L-14"
    assert complete("run", "--head", "gda-") == ["gda-moved"]


def test_counts_have_the_right_number() -> None:
    assert [plural(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
