"""The chain of versions and the checkpoint at its end."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dosapp.errors import InputError, StorageError
from dosapp.history import history as history_module
from dosapp.history.history import History
from dosapp.history.record import State, compute_checksum, write_record
from dosapp.history.version import read_version_facts
from dosapp.learner.learner import Learner


class TestAppend:
    def test_versions_are_a_chain_and_each_can_be_read_again(self, trained, tmp_path) -> None:
        learner, scenario = trained
        states = []
        for pixels in scenario.session(0).unlabelled.batches(6):
            learner.adapt(pixels)
            learner.save(tmp_path / "x")
            states.append(learner.state().clone().tensors)
        history = learner.history(tmp_path / "x")
        versions = history.versions()
        assert [v.number for v in versions] == [1, 2]
        assert versions[1].parent == versions[0].checksum
        assert history.head_id == (2, versions[1].checksum)
        for number, state in enumerate(states, start=1):
            tensors = history.at(number).tensors
            assert set(tensors) == set(state)
            assert all(torch.equal(tensors[k], state[k]) for k in state)

    def test_what_was_measured_is_in_the_description(self, tmp_path) -> None:
        history = History(tmp_path, lambda key: None)
        state = State({"student/w": torch.ones(2)}, {"classes": ["fox"]})
        assert history.head_id == (0, "")
        assert history.append(state, State(), "first", {"accuracy": [50.0]}) == 1
        version = history.version(1)
        assert version.seen == {"accuracy": [50.0]}
        assert version.facts == {"classes": ["fox"]}
        assert (version.reason, version.parent) == ("first", "")

    def test_a_version_without_its_checkpoint_is_written_again(
        self, trained, tmp_path, monkeypatch
    ) -> None:
        learner, scenario = trained
        learner.save(tmp_path / "x")
        shutil.copytree(tmp_path / "x", tmp_path / "y")
        learner.adapt(scenario.session(0).unlabelled.read(range(6)))

        def interrupt(path: Path, record: State) -> str:
            if path.name == "working.safetensors":
                raise KeyboardInterrupt
            return write_record(path, record)

        monkeypatch.setattr("dosapp.history.history.write_record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            learner.save(tmp_path / "y", "killed before its checkpoint")
        monkeypatch.undo()
        assert (tmp_path / "y" / "versions" / "000002.safetensors").exists()
        assert learner.history(tmp_path / "y").head == 1
        assert Learner.load(tmp_path / "y").digest() == Learner.load(tmp_path / "x").digest()
        learner.save(tmp_path / "y", "again")
        versions = learner.history(tmp_path / "y").versions()
        assert [v.reason for v in versions] == ["saved", "again"]
        assert Learner.load(tmp_path / "y").digest() == learner.digest()

    def test_a_full_disk_acknowledges_nothing(self, tmp_path, monkeypatch) -> None:
        history = History(tmp_path, lambda key: None)
        states = [State({"student/w": torch.full((2,), float(n))}) for n in range(3)]
        history.append(states[0], State(), "first")

        def write_full(path: Path, state: State) -> str:
            if path.name == "working.safetensors":
                raise StorageError("the disk is full")
            return write_record(path, state)

        monkeypatch.setattr(history_module, "write_record", write_full)
        with pytest.raises(StorageError):
            history.append(states[1], State(), "lost")
        monkeypatch.undo()
        assert history.head == 1
        assert history.append(states[2], State(), "second") == 2
        assert [v.reason for v in history.versions()] == ["first", "second"]
        assert torch.equal(history.at(2).tensors["student/w"], states[2].tensors["student/w"])


def test_differences_between_versions(saved) -> None:
    learner, folder = saved
    history = learner.history(folder)
    assert history.diff(2, 2) == []
    forward, backward = history.diff(0, 5), history.diff(5, 0)
    assert [(d.name, d.distance) for d in forward] == [(d.name, d.distance) for d in backward]
    by_name = {diff.name: diff for diff in forward}
    name = next(iter(learner.student.backbone.first_mlp_weights()))
    after = learner.student.backbone.weights()[name].detach()
    before = learner.pretrained.weights()[name].detach()
    gap = (after - before).double()
    assert by_name[f"student/{name}"].entries == int((after != before).sum())
    assert by_name[f"student/{name}"].distance == pytest.approx(float(gap.norm()))
    assert by_name[f"student/{name}"].largest == pytest.approx(float(gap.abs().max()))


class TestPrune:
    def test_versions_that_stay_do_not_change(self, saved) -> None:
        learner, folder = saved
        history = learner.history(folder)
        expected = {n: compute_checksum(history.at(n)) for n in (4, 5)}
        assert learner.history(folder).prune(2) == 3
        pruned = learner.history(folder)
        assert [v.number for v in pruned.versions()] == [4, 5]
        assert pruned.oldest == 4
        assert {n: compute_checksum(pruned.at(n)) for n in (4, 5)} == expected
        assert Learner.load(folder).digest() == learner.digest()
        assert pruned.versions()[1].parent == pruned.versions()[0].checksum
        Learner.rollback(folder, 4)
        pruned = learner.history(folder)
        assert pruned.prune(2) == 1  # again, over a version that holds all before it
        assert compute_checksum(learner.history(folder).at(5)) == expected[5]

    def test_killed_while_deleting_it_leaves_what_is_needed(self, saved, monkeypatch) -> None:
        learner, folder = saved
        expected = compute_checksum(learner.history(folder).at(4))

        def interrupt(path: Path) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(history_module, "remove_file", interrupt)
        with pytest.raises(KeyboardInterrupt):
            learner.history(folder).prune(2)
        monkeypatch.undo()
        pruned = learner.history(folder)
        assert [v.number for v in pruned.versions()] == [4, 5]
        assert compute_checksum(pruned.at(4)) == expected
        assert Learner.load(folder).digest() == learner.digest()
        assert pruned.prune(2) == 3  # the files that were left
        assert not (folder / "versions" / "000001.safetensors").exists()

    @pytest.fixture(params=["before", "after"])
    def pruned_meanwhile(self, saved, request, monkeypatch) -> History:
        """A history whose versions 1 and 2 another process deletes once they are listed."""
        learner, folder = saved
        reads: Counter[str] = Counter()

        def read(path: Path) -> tuple[dict[str, Any], str]:
            reads[path.name] += 1  # the first read is of all versions, to list them
            is_pruned = path.name.startswith(("000001", "000002")) and reads[path.name] == 2
            if is_pruned and request.param == "before":
                path.unlink()
            result = read_version_facts(path)
            if is_pruned:
                path.unlink()
            return result

        monkeypatch.setattr(history_module, "read_version_facts", read)
        return learner.history(folder)

    def test_a_version_pruned_while_versions_are_listed_is_left_out(self, pruned_meanwhile) -> None:
        assert [v.number for v in pruned_meanwhile.versions()] == [3, 4, 5]

    def test_a_version_pruned_while_it_is_read_is_one_sentence(self, pruned_meanwhile) -> None:
        with pytest.raises(InputError, match="has no version 1; it has 3 to 5"):
            pruned_meanwhile.version(1)
