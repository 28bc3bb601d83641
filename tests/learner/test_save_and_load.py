"""Folders of learners: save, load, roll back, and what they refuse."""

import contextlib
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dosapp.errors import BusyError, CorruptRecordError, InputError, StorageError
from dosapp.experiments.plan import build_scenario
from dosapp.experiments.run import run
from dosapp.history.record import State, compute_checksum
from dosapp.history.version import UPGRADES
from dosapp.learner.learner import Learner
from dosapp.learner.learner_folder import LearnerDescription, load_latest, write_description
from dosapp.runtime.files import lock_folder, read_json, write_json
from support.pins import OLD_LEARNER


class TestSave:
    def test_nothing_executable_is_stored(self, trained, tmp_path) -> None:
        trained[0].save(tmp_path / "x")
        files = [p for p in (tmp_path / "x").rglob("*") if p.is_file()]
        assert {p.suffix or p.name for p in files} == {".json", ".safetensors", ".lock"}

    def test_a_version_stores_only_what_changed(self, trained, tmp_path) -> None:
        learner, _ = trained
        learner.save(tmp_path / "x")
        candidates = sum(w.numel() for w in learner.student.backbone.first_mlp_weights().values())
        size = (tmp_path / "x" / "versions" / "000001.safetensors").stat().st_size
        changed = 3 * 0.1 * candidates  # student, teacher, scores
        assert size < 1.1 * (4 * changed + 2 * candidates / 8) + 12_000  # header
        with safe_open(tmp_path / "x" / "versions" / "000001.safetensors", "pt") as file:
            assert not any(name.startswith("dense/") for name in file.keys())

    def test_another_learners_folder_is_not_changed(
        self, trained, learner_settings, tmp_path, tiny
    ) -> None:
        trained[0].save(tmp_path / "x")
        own = tiny.shared_copy(unshared=list(tiny.weights()))
        other = Learner(learner_settings(method="flyp"), own)
        with pytest.raises(InputError, match=r"other settings \(method\); save elsewhere"):
            other.save(tmp_path / "x")

    def test_old_and_new_names_of_hyperparameters_are_the_same_learner(
        self, learner_settings, tiny, tmp_path
    ) -> None:
        for options in ({"weights": "first_mlp"}, {"candidates": "first_mlp"}):
            learner = Learner(learner_settings(method="spu", options=options), tiny)
            learner.save(tmp_path / "x")
        assert len(learner.history(tmp_path / "x").versions()) == 2

    def test_a_folder_with_other_files_is_not_changed(self, trained, tmp_path) -> None:
        (tmp_path / "letter.txt").write_text("dear")
        with pytest.raises(InputError, match="is not empty and holds no learner"):
            trained[0].save(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]

    def test_a_folder_that_another_process_writes_is_not_changed(self, trained, tmp_path) -> None:
        trained[0].save(tmp_path / "x")
        with lock_folder(tmp_path / "x"):
            for write in (trained[0].save, partial(Learner.rollback, number=1)):
                with pytest.raises(BusyError, match="is being written by another process"):
                    write(tmp_path / "x")
        assert len(Learner.open_history(tmp_path / "x").versions()) == 1

    def test_files_of_a_killed_writer_are_removed(self, trained, tmp_path) -> None:
        folder = tmp_path / "x"
        folder.mkdir()
        token = "0123456789abcdef"
        for name in (f".learner.json.{token}", f".working.safetensors.{token}"):
            (folder / name).write_text("half")
        trained[0].save(folder)  # hidden files do not count as other files
        (folder / "versions" / f".000002.safetensors.{token}").write_text("half")
        trained[0].save(folder)
        assert not list(folder.rglob(f".*.{token}"))

    def test_a_path_that_cannot_be_written_is_a_storage_error(self, trained, tmp_path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot write"):
            trained[0].save(tmp_path / "file" / "x")

    def test_a_single_version_without_checkpoint_is_not_overwritten(
        self, trained, tmp_path
    ) -> None:
        learner, _ = trained
        learner.save(tmp_path / "y", "first")
        (tmp_path / "y" / "working.safetensors").unlink()
        learner.save(tmp_path / "y", "second")
        reasons = [v.reason for v in learner.history(tmp_path / "y").versions()]
        assert reasons == ["first", "second"]

    @pytest.mark.parametrize("umask", [0o022, 0o027, 0o002], ids=oct)
    @pytest.mark.parametrize(
        ("changes", "stores_images"),
        [({}, False), ({"buffer_size": 6}, True), ({"method": "spu", "adapt": "note"}, True)],
        ids=["none", "replay", "note"],
    )
    def test_only_a_checkpoint_with_images_is_private(
        self, umask, changes, stores_images, small, tiny, tmp_path
    ) -> None:
        learner = Learner(small(**changes, epochs=1).learner(), tiny)
        learner.learn(build_scenario(small(), tiny.preprocess).session(0))
        assert learner.stores_images == stores_images
        before = os.umask(umask)
        try:
            for _ in range(2):  # a checkpoint is also replaced
                learner.save(tmp_path / "x")
        finally:
            os.umask(before)
        modes = {
            path.relative_to(tmp_path / "x").as_posix(): path.stat().st_mode & 0o777
            for path in (tmp_path / "x").rglob("*")
            if path.is_file() and path.name != ".lock"
        }
        assert modes.pop("working.safetensors") == (0o600 if stores_images else 0o666 & ~umask)
        assert set(modes.values()) == {0o666 & ~umask}
        assert len(modes) == 3  # learner.json and two versions


class TestLoad:
    def test_another_backbone_is_refused(self, trained, tmp_path, tiny) -> None:
        learner, _ = trained
        learner.save(tmp_path / "x")
        other = tiny.shared_copy(unshared=list(tiny.weights()))
        with torch.no_grad():
            other.weights()["logit_scale"].add_(0.5)
        with pytest.raises(InputError, match="backbone with fingerprint"):
            Learner.load(tmp_path / "x", other)

    def test_a_folder_without_learner_is_an_input_error(self, tmp_path) -> None:
        with pytest.raises(InputError, match=r"no learner\.json"):
            Learner.load(tmp_path)
        (tmp_path / "learner").mkdir()
        write_json(tmp_path / "learner" / "learner.json", {})
        with pytest.raises(InputError, match=f"try '{tmp_path / 'learner'}'"):
            Learner.load(tmp_path)

    def test_a_changed_version_is_detected(self, trained, tmp_path) -> None:
        learner, _ = trained
        learner.save(tmp_path / "x")
        file = tmp_path / "x" / "versions" / "000001.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptRecordError, match="checksum does not match"):
            Learner.load(tmp_path / "x")

    @pytest.mark.parametrize("file", ["versions/000002.safetensors", "working.safetensors"])
    def test_a_truncated_record_is_skipped_and_quarantined(self, trained, tmp_path, file) -> None:
        learner, scenario = trained
        learner.save(tmp_path / "x")
        first = learner.digest()
        learner.adapt(scenario.session(0).unlabelled.read(range(6)))
        learner.save(tmp_path / "x")
        second, path = learner.digest(), tmp_path / "x" / file
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.warns(UserWarning, match="torn.*continuing from version"):
            loaded = Learner.load(tmp_path / "x")
        assert loaded.digest() == (second if file.startswith("working") else first)
        loaded.save(tmp_path / "x")
        assert Learner.load(tmp_path / "x").digest() == loaded.digest()
        damaged = [p.name for p in (tmp_path / "x" / "versions").iterdir() if "damaged" in p.name]
        assert damaged == ([] if file.startswith("working") else ["000002.safetensors.damaged"])

    def test_without_checkpoint_it_continues_from_the_last_version(self, saved) -> None:
        learner, folder = saved
        (folder / "working.safetensors").unlink()
        with pytest.warns(UserWarning, match="does not exist; continuing from version 5"):
            loaded = Learner.load(folder)
        assert loaded.digest() == learner.digest()
        loaded.save(folder)
        assert [v.number for v in loaded.history(folder).versions()] == [1, 2, 3, 4, 5, 6]

    def test_the_latest_state_of_a_history(self, saved) -> None:
        learner, folder = saved
        state, working = load_latest(learner.history(folder))
        assert compute_checksum(state) == learner.digest()
        assert set(working.tensors) == set(learner.working_state().tensors)
        (folder / "working.safetensors").unlink()
        with pytest.warns(UserWarning, match="continuing from version 5"):
            state, working = load_latest(learner.history(folder))
        assert compute_checksum(state) == learner.digest()
        assert working is None

    def test_records_of_an_older_format_are_upgraded(self, trained, tmp_path, monkeypatch) -> None:
        learner, _ = trained
        learner.save(tmp_path / "x")

        def upgrade(record: State) -> State:
            return State(record.tensors, {**record.facts, "format": 2})

        monkeypatch.setattr("dosapp.history.history.FORMAT", 2)
        monkeypatch.setattr("dosapp.history.version.FORMAT", 2)
        with pytest.raises(InputError, match="has format 1; this dosapp reads format 2"):
            Learner.load(tmp_path / "x")
        monkeypatch.setitem(UPGRADES, 1, upgrade)
        loaded = Learner.load(tmp_path / "x")
        loaded.save(tmp_path / "x")
        assert [v.number for v in loaded.history(tmp_path / "x").versions()] == [1, 2]
        assert Learner.load(tmp_path / "x").digest() == learner.digest()


class TestDescription:
    def test_versions_are_listed_without_the_backbone(self, trained, tmp_path, monkeypatch) -> None:
        """It may be large or unreachable; only the weights of a version need it."""
        folder = tmp_path / "x"
        trained[0].save(folder, "trained")

        def offline(name: str) -> None:
            raise InputError(f"backbone '{name}' could not be loaded")

        monkeypatch.setattr("dosapp.backbones.pretrained.load_backbone", offline)
        history = Learner.open_history(folder)
        assert [v.reason for v in history.versions()] == ["trained"]
        assert (history.head, history.version(1).facts["sessions"]) == (1, 1)
        with pytest.raises(InputError, match="could not be loaded"):
            history.at(1)
        write_json(folder / "learner.json", {**read_json(folder / "learner.json"), "format": 9})
        with pytest.raises(InputError, match="has format 9; this dosapp reads 1"):
            Learner.open_history(folder)
        with pytest.raises(InputError, match=r"no learner\.json"):
            Learner.open_history(tmp_path)

    def test_it_is_read_as_it_was_written(self, trained, tmp_path) -> None:
        learner, _ = trained
        write_description(learner, tmp_path / "x")
        description = LearnerDescription.read(tmp_path / "x")
        assert description.fingerprint == learner.fingerprint
        assert description.pretrained().name == "tiny"
        assert description.learner_settings(tmp_path / "x", "cpu") == learner.settings
        assert "device" not in description.settings

    def test_a_learner_of_version_0_1_loads_with_todays_names(self, tmp_path) -> None:
        folder = tmp_path / "old"
        shutil.copytree(OLD_LEARNER, folder)
        old = json.loads((folder / "learner.json").read_text())["settings"]
        assert {"memory", "batch", "caption", "rivals", "gate", "readmit_every"} <= set(old)
        learner = Learner.load(folder)
        assert learner.settings.batch_size == old["batch"] == 8
        assert learner.settings.buffer_size == old["memory"]
        assert learner.settings.reactivation_interval == old["readmit_every"]
        assert learner.method.selection.sparsity == old["options"]["sparsity"] == 0.01
        learner.adapt(torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        learner.save(folder, "by today's version")  # the settings are recognised as the same
        today = json.loads((folder / "learner.json").read_text())["settings"]
        assert "memory" not in today
        assert today["batch_size"] == 8
        assert Learner.load(folder).digest() == learner.digest()
        assert len(Learner.open_history(folder).versions()) == 3


class TestRollback:
    def test_back_and_forward_again_is_exact(self, saved) -> None:
        learner, folder = saved
        history = learner.history(folder)
        assert compute_checksum(history.at(5)) == learner.digest()
        for number in (1, 3, 5, 2, 4):
            expected = compute_checksum(history.at(number))
            rolled_back = Learner.rollback(folder, number)
            assert rolled_back.digest() == expected == Learner.load(folder).digest()
        reasons = [version.reason for version in learner.history(folder).versions()]
        assert reasons[-2:] == ["rolled back to version 2", "rolled back to version 4"]

    def test_before_all_training_the_weights_are_the_pretrained_ones(self, saved) -> None:
        learner, folder = saved
        rolled_back, new = Learner.rollback(folder, 1), Learner(learner.settings)
        for name, weight in new.student.backbone.weights().items():
            assert torch.equal(rolled_back.student.backbone.weights()[name], weight), name
        assert rolled_back.classes == []

    def test_the_checkpoint_of_a_run_is_not_changed(self, small, tmp_path) -> None:
        run(small(), tmp_path / "r")
        with pytest.raises(InputError, match="is the checkpoint of a run"):
            Learner.rollback(tmp_path / "r" / "learner", 1)

    def test_a_version_that_does_not_exist_is_an_input_error(self, saved) -> None:
        with pytest.raises(InputError, match="no version 9; it has 1 to 5"):
            Learner.rollback(saved[1], 9)

    @pytest.mark.parametrize("file", ["versions/000005.safetensors", "working.safetensors"])
    def test_a_truncated_record_leaves_the_versions_before_it(self, saved, file) -> None:
        learner, folder = saved
        expected, path = compute_checksum(learner.history(folder).at(2)), folder / file
        path.write_bytes(path.read_bytes()[:-100])
        is_version = file.startswith("versions")
        with pytest.warns(UserWarning, match="torn") if is_version else contextlib.nullcontext():
            numbers = [v.number for v in Learner.open_history(folder).versions()]
        assert numbers == ([1, 2, 3, 4] if is_version else [1, 2, 3, 4, 5])
        with pytest.warns(UserWarning, match="torn.*continuing from version"):
            rolled_back = Learner.rollback(folder, 2)
        assert rolled_back.digest() == expected == Learner.load(folder).digest()
        assert Learner.open_history(folder).versions()[-1].reason == "rolled back to version 2"
        assert path.with_name(path.name + ".damaged").exists() == is_version

    def test_a_reader_of_a_replaced_version_reads_the_new_one(self, saved) -> None:
        """Another writer quarantines a truncated head and continues with the same numbers."""
        learner, folder = saved
        reader = learner.history(folder)
        before = compute_checksum(reader.at(5))
        path: Path = folder / "versions" / "000005.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.warns(UserWarning, match="continuing from version 4"):
            Learner.rollback(folder, 2)
        assert compute_checksum(reader.at(5)) != before
        assert compute_checksum(reader.at(5)) == compute_checksum(reader.at(2))
        reader.at(5)  # read, and replaced again, before the next one
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.warns(UserWarning, match="continuing from version 4"):
            Learner.rollback(folder, 3)
        Learner.rollback(folder, 1)
        assert compute_checksum(reader.at(6)) == compute_checksum(reader.at(1))


def test_a_learner_at_a_state_predicts_the_same_and_shares_untrained_weights(trained) -> None:
    learner, scenario = trained
    pixels = scenario.session(0).unlabelled.read(range(6))
    copy = learner.at(learner.state(), trainable=False)
    assert copy.digest() == learner.digest()
    assert copy.predict(pixels) == learner.predict(pixels)
    pretrained, copied = learner.pretrained.weights(), copy.student.backbone.weights()
    own = {name for name in pretrained if pretrained[name] is not copied[name]}
    assert own == learner.student.ever_selected
    before = copy.digest()
    learner.adapt(pixels)
    assert copy.digest() == before != learner.digest()
