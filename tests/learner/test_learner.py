"""Four verbs."""

import contextlib
import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from dosapp.errors import CorruptRecordError, InputError
from dosapp.experiments.plan import build_scenario
from dosapp.experiments.run import run
from dosapp.history.history import UPGRADES
from dosapp.history.record import State, compute_checksum
from dosapp.learner.learner import Learner
from dosapp.learner.replay import ReplayBuffer
from dosapp.runtime.files import lock_folder, read_json, write_json
from dosapp.scenario import Session


@pytest.fixture
def taught(small, tiny):
    settings = small()
    learner = Learner(settings.learner(), tiny)
    stream = build_scenario(settings, tiny.preprocess)
    learner.learn(stream.session(0))
    return learner, stream


def test_learning_helps(small, tiny) -> None:
    settings = small(classes=30, tasks=1, epochs=4, batch_size=32, train_images=10, test_images=10)
    stream = build_scenario(settings, tiny.preprocess)
    test = stream.tasks[0].test
    pixels, truth = test.read(range(len(test))), [stream.classes[i] for i in test.labels]

    def right(learner: Learner) -> float:
        answers = [p.label for p in learner.predict(pixels)]
        return sum(a == b for a, b in zip(answers, truth, strict=True)) / len(truth)

    before = Learner(
        small(method="zero-shot").learner(), tiny.shared_copy(own=list(tiny.weights()))
    )
    before.learn(stream.session(0))
    after = Learner(settings.learner(), tiny)
    after.learn(stream.session(0))
    assert right(after) > right(before)


def test_predictions_have_scores_and_a_top(taught) -> None:
    learner, stream = taught
    answers = learner.predict(stream.tasks[0].test.read([0, 1]), top=2)
    assert len(answers) == 2
    assert all(a.label in learner.classes and len(a.top) == 2 for a in answers)
    assert all(0 <= a.score <= 1 and a.top[0] == (a.label, a.score) for a in answers)


def test_the_classes_are_looked_up_once_however_many_answers(taught, monkeypatch) -> None:
    learner, stream = taught
    looks, classes = [], Learner.classes.fget
    monkeypatch.setattr(Learner, "classes", property(lambda it: looks.append(1) or classes(it)))
    learner.predict(stream.session(0).unlabelled.read(range(6)))
    assert len(looks) == 1


def test_takes_pictures_tensors_and_nothing(taught) -> None:
    learner, _ = taught
    pictures = [Image.new("RGB", (50, 40), "red"), Image.new("L", (32, 32))]
    assert len(learner.predict(pictures)) == 2
    assert len(learner.predict(torch.zeros(3, 3, 32, 32, dtype=torch.uint8))) == 3
    assert learner.predict([]) == []
    with pytest.raises(InputError, match=r"shape \[3, 3, 8, 8\]; give \[B, 3, 32, 32\]"):
        learner.predict(torch.zeros(3, 3, 8, 8))


def test_what_is_not_pictures_is_a_sentence(taught) -> None:
    learner, _ = taught
    for wrong in (None, "x", torch.zeros(1, 3, 32, 32).numpy(), [torch.zeros(3, 32, 32)]):
        with pytest.raises(InputError, match=r"give (a list of )?Pillow images"):
            learner.predict(wrong)
    for wrong in (200.0, -1.0, float("nan")):
        with pytest.raises(InputError, match="outside 0 to 1"):
            learner.adapt(torch.full((2, 3, 32, 32), wrong))


def test_learns_from_pictures_by_class_name(pupil, tiny) -> None:
    learner = Learner(pupil(batch_size=4), tiny)
    red, blue = ([Image.new("RGB", (40, 30 + n), c) for n in range(4)] for c in ("red", "blue"))
    learner.learn({"red sheet": red, "blue sheet": blue})
    assert learner.classes == ["red sheet", "blue sheet"]


def test_a_stranger_learner_says_so(pupil, tiny) -> None:
    with pytest.raises(InputError, match="knows no classes yet"):
        Learner(pupil(), tiny).predict(torch.zeros(1, 3, 32, 32))


def test_lessons_of_another_size_are_refused_before_anything_is_met(pupil, tiny) -> None:
    learner = Learner(pupil(), tiny)
    with pytest.raises(InputError, match=r"shape \[3, 8, 8\]; give \[3, 32, 32\]"):
        learner.learn(Session.from_images({"cat": torch.zeros(9, 3, 8, 8, dtype=torch.uint8)}))
    assert learner.classes == []


def test_adapting_before_learning_does_nothing(pupil, tiny) -> None:
    learner = Learner(pupil(), tiny)
    before = learner.digest()
    assert learner.adapt(torch.rand(4, 3, 32, 32)) is None
    assert learner.digest() == before


def test_a_batch_of_one_adapts_nothing_bit_for_bit(taught) -> None:
    learner, stream = taught
    learner.adapt(stream.session(0).unlabelled.read(range(8)))
    before = learner.digest()
    guess = learner.adapt(stream.session(0).unlabelled.read([0]))
    assert len(guess.labels) == 1
    assert learner.digest() == before


def test_new_classes_and_more_of_known_ones(taught) -> None:
    learner, stream = taught
    known = learner.classes
    pixels = (stream.tasks[0].test.read(range(6)) * 255).to(torch.uint8)
    with pytest.warns(UserWarning, match="smaller batch"):
        learner.learn(Session.from_images({known[0]: pixels[:3], "violet spiral": pixels[3:]}))
    assert learner.classes == [*known, "violet spiral"]


def test_fewer_lessons_than_a_batch_use_the_smaller_batch(pupil, tiny) -> None:
    learner = Learner(pupil(batch_size=64, epochs=3), tiny)
    lesson = Session.from_images(
        {
            "red dot": torch.zeros(2, 3, 32, 32, dtype=torch.uint8) + 9,
            "blue dot": torch.ones(3, 3, 32, 32, dtype=torch.uint8),
        }
    )
    with pytest.warns(UserWarning, match="5 training images, fewer than a batch of 64"):
        assert [one.of for one in learner.training_steps(lesson)] == [3, 3, 3]


def test_lessons_go_on_from_any_step(small, tiny) -> None:
    settings = small(epochs=3, buffer_size=6)
    stream = build_scenario(settings, tiny.preprocess)
    whole = Learner(settings.learner(), tiny.shared_copy(own=list(tiny.weights())))
    whole.learn(stream.session(0))
    part = Learner(settings.learner(), tiny.shared_copy(own=list(tiny.weights())))
    lessons = part.training_steps(stream.session(0))
    for _ in range(4):
        next(lessons)
    state, working = part.state(), part.working_state()
    state.tensors = {k: t.clone() for k, t in state.tensors.items()}
    rest = Learner(settings.learner(), tiny.shared_copy(own=list(tiny.weights())))
    rest.restore(state, working)
    for _ in rest.training_steps(stream.session(0), done=4):
        pass
    assert rest.digest() == whole.digest()


def test_going_on_after_the_last_step_keeps_the_teacher(small, tiny) -> None:
    settings = small()
    session = build_scenario(settings, tiny.preprocess).session(0)
    whole, part, rest = (
        Learner(settings.learner(), tiny.shared_copy(own=list(tiny.weights()))) for _ in range(3)
    )
    whole.learn(session)
    lessons = part.training_steps(session)
    while (lesson := next(lessons)).number < lesson.of:
        pass
    rest.restore(part.state(), part.working_state())
    assert list(rest.training_steps(session, done=lesson.of)) == []
    assert rest.digest() == whole.digest()


def test_memory_keeps_the_newest_sessions_when_there_are_more_than_pictures(tiny, small) -> None:
    memory, stream = ReplayBuffer(capacity=3), build_scenario(small(), tiny.preprocess)
    lessons = stream.session(0).train
    for t in range(5):
        memory.add_session(lessons, torch.full((len(lessons),), t))
    assert [labels.tolist() for labels in memory.labels] == [[2], [3], [4]]
    pixels, labels = memory.sample(8, 0)
    assert (len(pixels), sorted(labels.tolist())) == (3, [2, 3, 4])


@pytest.mark.parametrize("method", ["flyp", "lwf", "prd"])
def test_rivals_count_whatever_the_method(method, pupil, tiny, small) -> None:
    lesson = build_scenario(small(), tiny.preprocess).session(0)
    losses = []
    for rivals in (False, True):
        net = tiny.shared_copy(own=list(tiny.weights()))
        learner = Learner(pupil(method=method, all_class_negatives=rivals, epochs=1), net)
        learner.learn(lesson)
        one = Session.from_images({lesson.classes[0]: torch.zeros(8, 3, 32, 32, dtype=torch.uint8)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a class alone has nothing to be told from
            losses.append(next(iter(learner.training_steps(one))).loss)
    assert losses[1] > losses[0] + 0.1


def test_memory_is_balanced_over_sessions_and_said(small, tiny, tmp_path) -> None:
    settings = small(method="flyp", buffer_size=7)
    learner = Learner(settings.learner(), tiny)
    stream = build_scenario(settings, tiny.preprocess)
    for t in range(2):
        learner.learn(stream.session(t))
    assert [len(labels) for labels in learner.replay_buffer.labels] == [3, 3]
    assert learner.replay_buffer.labels[1].min() >= 3  # the second session's own classes
    learner.save(tmp_path / "x")
    assert json.loads((tmp_path / "x" / "learner.json").read_text())["stores_images"]
    assert learner.state().facts["stored_images"] == 6


def test_replay_doubles_the_batch_and_marks_it(small, tiny) -> None:
    settings = small(method="flyp", buffer_size=30)
    learner = Learner(settings.learner(), tiny)
    stream = build_scenario(settings, tiny.preprocess)
    learner.learn(stream.session(0))
    seen = []
    loss = learner.method.loss
    object.__setattr__(
        learner.method, "loss", lambda student, batch: seen.append(batch) or loss(student, batch)
    )
    learner.learn(stream.session(1))
    assert all(len(b.labels) == 16 and int(b.replayed.sum()) == 8 for b in seen)
    assert all((b.labels[b.replayed] < 3).all() for b in seen)


class TestFolders:
    def test_nothing_executable_is_stored(self, taught, tmp_path) -> None:
        taught[0].save(tmp_path / "x")
        files = [p for p in (tmp_path / "x").rglob("*") if p.is_file()]
        assert {p.suffix or p.name for p in files} == {".json", ".safetensors", ".lock"}

    def test_a_version_stores_only_what_changed(self, taught, tmp_path) -> None:
        learner, _ = taught
        learner.save(tmp_path / "x")
        candidates = sum(w.numel() for w in learner.student.backbone.first_mlp_weights().values())
        size = (tmp_path / "x" / "versions" / "000001.safetensors").stat().st_size
        changed = 3 * 0.1 * candidates  # student, teacher, scores
        assert size < 1.1 * (4 * changed + 2 * candidates / 8) + 12_000  # header
        with safe_open(tmp_path / "x" / "versions" / "000001.safetensors", "pt") as file:
            assert not any(name.startswith("dense/") for name in file.keys())

    def test_another_backbone_is_refused(self, taught, tmp_path, tiny) -> None:
        learner, _ = taught
        learner.save(tmp_path / "x")
        other = tiny.shared_copy(own=list(tiny.weights()))
        with torch.no_grad():
            other.weights()["logit_scale"].add_(0.5)
        with pytest.raises(InputError, match="backbone of fingerprint"):
            Learner.load(tmp_path / "x", other)

    def test_another_learners_folder_is_left_alone(self, taught, pupil, tmp_path, tiny) -> None:
        taught[0].save(tmp_path / "x")
        other = Learner(pupil(method="flyp"), tiny.shared_copy(own=list(tiny.weights())))
        with pytest.raises(InputError, match="other settings; save elsewhere"):
            other.save(tmp_path / "x")

    def test_a_strangers_folder_is_left_alone(self, taught, tmp_path) -> None:
        (tmp_path / "letter.txt").write_text("dear")
        with pytest.raises(InputError, match="is not empty and holds no learner"):
            taught[0].save(tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]

    def test_a_folder_somebody_else_writes_is_left_alone(self, taught, tmp_path) -> None:
        taught[0].save(tmp_path / "x")
        with lock_folder(tmp_path / "x"):
            for attempt in (taught[0].save, partial(Learner.rollback, number=1)):
                with pytest.raises(InputError, match="is being written by another process"):
                    attempt(tmp_path / "x")
        assert len(Learner.open_history(tmp_path / "x").versions()) == 1

    def test_what_a_killed_writer_left_is_swept_away(self, taught, tmp_path) -> None:
        folder = tmp_path / "x"
        for name in (".learner.json.ab", ".working.safetensors.ab", "versions/.1.safetensors.ab"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("half")
        shutil.rmtree(folder / "versions")
        taught[0].save(folder)  # not taken for a stranger's
        (folder / "versions" / ".000002.safetensors.ab").write_text("half")
        taught[0].save(folder)
        assert not list(folder.rglob(".*.safetensors.*"))

    def test_no_learner_there(self, tmp_path) -> None:
        with pytest.raises(InputError, match=r"no learner\.json"):
            Learner.load(tmp_path)

    def test_versions_are_listed_without_the_backbone(self, taught, tmp_path, monkeypatch) -> None:
        """Which may be large, or somewhere that cannot be reached; a version's weights need it."""
        folder = tmp_path / "x"
        taught[0].save(folder, "taught")

        def offline(name: str) -> None:
            raise InputError(f"backbone '{name}' could not be loaded")

        monkeypatch.setattr("dosapp.backbones.pretrained.load_backbone", offline)
        history = Learner.open_history(folder)
        assert [v.reason for v in history.versions()] == ["taught"]
        assert (history.head, history.version(1).facts["sessions"]) == (1, 1)
        with pytest.raises(InputError, match="could not be loaded"):
            history.at(1)
        write_json(folder / "learner.json", {**read_json(folder / "learner.json"), "format": 9})
        with pytest.raises(InputError, match="has format 9; this dosapp reads 1"):
            Learner.open_history(folder)
        with pytest.raises(InputError, match=r"no learner\.json"):
            Learner.open_history(tmp_path)

    def test_a_tampered_version_is_detected(self, taught, tmp_path) -> None:
        learner, _ = taught
        learner.save(tmp_path / "x")
        file = tmp_path / "x" / "versions" / "000001.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptRecordError, match="checksum does not match"):
            Learner.load(tmp_path / "x")

    @pytest.mark.parametrize("file", ["versions/000002.safetensors", "working.safetensors"])
    def test_a_torn_record_is_skipped_and_set_aside(self, taught, tmp_path, file) -> None:
        learner, stream = taught
        learner.save(tmp_path / "x")
        first = learner.digest()
        learner.adapt(stream.session(0).unlabelled.read(range(6)))
        learner.save(tmp_path / "x")
        second, path = learner.digest(), tmp_path / "x" / file
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.warns(UserWarning, match="torn.*going on from version"):
            again = Learner.load(tmp_path / "x")
        assert again.digest() == (second if file.startswith("working") else first)
        again.save(tmp_path / "x")
        assert Learner.load(tmp_path / "x").digest() == again.digest()
        aside = [p.name for p in (tmp_path / "x" / "versions").iterdir() if "damaged" in p.name]
        assert aside == ([] if file.startswith("working") else ["000002.safetensors.damaged"])

    def test_an_older_format_is_upgraded(self, taught, tmp_path, monkeypatch) -> None:
        learner, _ = taught
        learner.save(tmp_path / "x")

        def upgrade(record: State) -> State:
            return State(record.tensors, {**record.facts, "format": 2})

        monkeypatch.setattr("dosapp.history.FORMAT", 2)
        with pytest.raises(InputError, match="has format 1; this dosapp reads format 2"):
            Learner.load(tmp_path / "x")
        monkeypatch.setitem(UPGRADES, 1, upgrade)
        again = Learner.load(tmp_path / "x")
        again.save(tmp_path / "x")
        assert [v.number for v in again.history(tmp_path / "x").versions()] == [1, 2]
        assert Learner.load(tmp_path / "x").digest() == learner.digest()

    def test_a_copy_at_a_state_answers_the_same_and_shares_what_never_moved(
        self, taught, tmp_path
    ) -> None:
        learner, stream = taught
        pixels = stream.session(0).unlabelled.read(range(6))
        copy = learner.at(learner.state(), trainable=False)
        assert copy.digest() == learner.digest()
        assert copy.predict(pixels) == learner.predict(pixels)
        mine, theirs = learner.pretrained.weights(), copy.student.backbone.weights()
        assert {n for n in mine if mine[n] is not theirs[n]} == learner.student.trained_names
        before = copy.digest()
        learner.adapt(pixels)
        assert copy.digest() == before != learner.digest()


class TestClasses:
    def test_a_class_gets_another_name(self, taught, tmp_path) -> None:
        learner, stream = taught
        pixels = stream.session(0).unlabelled.read(range(6))
        old = learner.classes[1]
        learner.rename(old, "chouette hulotte 🦉")
        assert learner.classes[1] == "chouette hulotte 🦉"
        assert learner.student.caption(learner.classes[1]) == "a photo of a chouette hulotte 🦉."
        learner.save(tmp_path / "x")
        assert Learner.load(tmp_path / "x").predict(pixels) == learner.predict(pixels)
        with pytest.raises(InputError, match=f"unknown class '{old}'"):
            learner.rename(old, "owl")
        with pytest.raises(InputError, match="is there already"):
            learner.rename(learner.classes[0], learner.classes[2])
        with pytest.raises(InputError, match="empty class name"):
            learner.rename(learner.classes[0], " ")

    @pytest.mark.parametrize(
        "changes",
        [{}, {"buffer_size": 9}, {"method": "slca"}, {"method": "spu", "adapt": "rmt"},
         {"method": "spu", "adapt": "eata"}, {"method": "spu", "adapt": "note"},
         {"skew_aware_ema": True}],
    )  # fmt: skip
    def test_a_class_that_has_gone_is_gone_everywhere(self, small, tiny, changes) -> None:
        settings = small(**changes)
        learner, stream = (
            Learner(settings.learner(), tiny),
            build_scenario(settings, tiny.preprocess),
        )
        learner.learn(stream.session(0))
        pixels = stream.session(0).unlabelled.read(range(8))
        learner.adapt(pixels)
        gone, kept = learner.classes[1], [learner.classes[0], learner.classes[2]]
        learner.remove(gone)
        assert learner.classes == kept
        assert all(p.label in kept and len(p.top) == 2 for p in learner.predict(pixels))
        assert all(labels.max() < 2 for labels in learner.replay_buffer.labels)
        learner.adapt(pixels)
        learner.learn(stream.session(1))
        learner.adapt(pixels)
        assert learner.classes[:2] == kept
        with pytest.raises(InputError, match="unknown class"):
            learner.remove(gone)
        for name in list(learner.classes):
            learner.remove(name)
        assert learner.adapt(pixels) is None  # there is nothing left to tell apart


class TestChains:
    def test_versions_are_a_chain_and_any_can_be_seen_again(self, taught, tmp_path) -> None:
        learner, stream = taught
        states = []
        for pixels in stream.session(0).unlabelled.batches(6):
            learner.adapt(pixels)
            learner.save(tmp_path / "x")
            states.append({k: t.clone() for k, t in learner.state().tensors.items()})
        history = learner.history(tmp_path / "x")
        versions = history.versions()
        assert [v.number for v in versions] == [1, 2]
        assert versions[1].parent == versions[0].checksum
        for number, state in enumerate(states, start=1):
            again = history.at(number).tensors
            assert set(again) == set(state)
            assert all(torch.equal(again[k], state[k]) for k in state)

    def test_a_version_nobody_acknowledged_is_written_again(self, taught, tmp_path) -> None:
        learner, stream = taught
        learner.save(tmp_path / "x")
        shutil.copytree(tmp_path / "x", tmp_path / "y")
        learner.adapt(stream.session(0).unlabelled.read(range(6)))
        learner.history(tmp_path / "y").append(learner.state(), "killed before its checkpoint")
        assert Learner.load(tmp_path / "y").digest() == Learner.load(tmp_path / "x").digest()


class TestHistory:
    @pytest.fixture
    def kept(self, taught, tmp_path):
        """Five versions: untaught, a session, then three steps on the stream."""
        learner, stream = taught
        folder = tmp_path / "x"
        Learner(learner.settings).save(folder, "new")
        learner.save(folder, "taught")
        batches = [stream.session(0).unlabelled.read(range(n, n + 6)) for n in (0, 3, 6)]
        for pixels in batches:
            learner.adapt(pixels)
            learner.save(folder, "adapted")
        return learner, folder

    def test_back_and_forward_again_is_exact(self, kept) -> None:
        learner, folder = kept
        states = learner.history(folder)
        assert compute_checksum(states.at(5)) == learner.digest()
        for number in (1, 3, 5, 2, 4):
            wanted = compute_checksum(states.at(number))
            back = Learner.rollback(folder, number)
            assert back.digest() == wanted == Learner.load(folder).digest()
        reasons = [version.reason for version in learner.history(folder).versions()]
        assert reasons[-2:] == ["rolled back to version 2", "rolled back to version 4"]

    def test_before_all_learning_the_answers_are_the_untouched_models(self, kept) -> None:
        _, folder = kept
        back, new = Learner.rollback(folder, 1), Learner(kept[0].settings)
        for name, weight in new.student.backbone.weights().items():
            assert torch.equal(back.student.backbone.weights()[name], weight), name
        assert back.classes == []

    def test_the_checkpoint_of_a_run_is_left_alone(self, small, tmp_path) -> None:
        run(small(), tmp_path / "r")
        with pytest.raises(InputError, match="is the checkpoint of a run"):
            Learner.rollback(tmp_path / "r" / "learner", 1)

    def test_a_version_that_is_not_there(self, kept) -> None:
        with pytest.raises(InputError, match="no version 9; it has 1 to 5"):
            Learner.rollback(kept[1], 9)

    def test_without_its_checkpoint_a_history_goes_on_from_the_last_version(self, kept) -> None:
        learner, folder = kept
        (folder / "working.safetensors").unlink()
        with pytest.warns(UserWarning, match="does not exist; going on from version 5"):
            again = Learner.load(folder)
        assert again.digest() == learner.digest()
        again.save(folder)
        assert [v.number for v in again.history(folder).versions()] == [1, 2, 3, 4, 5, 6]

    def test_nor_is_a_single_version_written_over(self, taught, tmp_path) -> None:
        learner, _ = taught
        learner.save(tmp_path / "y", "taught")
        (tmp_path / "y" / "working.safetensors").unlink()
        learner.save(tmp_path / "y", "again")
        reasons = [v.reason for v in learner.history(tmp_path / "y").versions()]
        assert reasons == ["taught", "again"]

    def test_a_place_that_cannot_be_written_is_a_sentence(self, taught, tmp_path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot write"):
            taught[0].save(tmp_path / "file" / "x")

    @pytest.mark.parametrize("file", ["versions/000005.safetensors", "working.safetensors"])
    def test_a_torn_record_does_not_keep_from_the_versions_before_it(self, kept, file) -> None:
        learner, folder = kept
        wanted, path = compute_checksum(learner.history(folder).at(2)), folder / file
        path.write_bytes(path.read_bytes()[:-100])
        torn = file.startswith("versions")
        with pytest.warns(UserWarning, match="torn") if torn else contextlib.nullcontext():
            numbers = [v.number for v in Learner.open_history(folder).versions()]
        assert numbers == ([1, 2, 3, 4] if torn else [1, 2, 3, 4, 5])
        with pytest.warns(UserWarning, match="torn.*going on from version"):
            back = Learner.rollback(folder, 2)
        assert back.digest() == wanted == Learner.load(folder).digest()
        assert Learner.open_history(folder).versions()[-1].reason == "rolled back to version 2"
        assert path.with_name(path.name + ".damaged").exists() == torn

    def test_who_has_read_a_version_that_is_replaced_reads_the_new_one(self, kept) -> None:
        """Another writer sets a torn head aside and goes on with the same numbers."""
        learner, folder = kept
        reader = learner.history(folder)
        before = compute_checksum(reader.at(5))
        path = folder / "versions" / "000005.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.warns(UserWarning, match="going on from version 4"):
            Learner.rollback(folder, 2)
        assert compute_checksum(reader.at(5)) != before
        assert compute_checksum(reader.at(5)) == compute_checksum(reader.at(2))
        reader.at(5)  # read, and replaced again, before the next one
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.warns(UserWarning, match="going on from version 4"):
            Learner.rollback(folder, 3)
        Learner.rollback(folder, 1)
        assert compute_checksum(reader.at(6)) == compute_checksum(reader.at(1))

    def test_a_replayed_class_is_forgotten_with_its_pictures(self, small, tiny, tmp_path) -> None:
        stream = build_scenario(small(), tiny.preprocess)
        learner = Learner(small(buffer_size=6).learner(), tiny)
        for t in (0, 1):
            learner.learn(stream.session(t))
            learner.save(tmp_path / "x")
        for number in (1, 2, 1):
            learner = Learner.rollback(tmp_path / "x", number)
            assert len(learner.replay_buffer) == 3  # what the second session had left of the first
            assert all((labels < 3).all() for labels in learner.replay_buffer.labels)
        assert len(learner.classes) == 3
        learner.learn(stream.session(1))

    def test_what_moved(self, kept) -> None:
        learner, folder = kept
        history = learner.history(folder)
        assert history.diff(2, 2) == []
        there, back = history.diff(0, 5), history.diff(5, 0)
        assert [(m.name, m.distance) for m in there] == [(m.name, m.distance) for m in back]
        found = {one.name: one for one in there}
        name = next(iter(learner.student.backbone.first_mlp_weights()))
        now = learner.student.backbone.weights()[name].detach()
        before = learner.pretrained.weights()[name].detach()
        gap = (now - before).double()
        assert found[f"student/{name}"].entries == int((now != before).sum())
        assert found[f"student/{name}"].distance == pytest.approx(float(gap.norm()))
        assert found[f"student/{name}"].largest == pytest.approx(float(gap.abs().max()))

    def test_dropping_old_versions_changes_nothing_that_stays(self, kept) -> None:
        learner, folder = kept
        history = learner.history(folder)
        wanted = {n: compute_checksum(history.at(n)) for n in (4, 5)}
        assert learner.history(folder).forget(2) == 3
        again = learner.history(folder)
        assert [v.number for v in again.versions()] == [4, 5]
        assert {n: compute_checksum(again.at(n)) for n in (4, 5)} == wanted
        assert Learner.load(folder).digest() == learner.digest()
        assert again.versions()[1].parent == again.versions()[0].checksum
        Learner.rollback(folder, 4)
        again = learner.history(folder)
        assert again.forget(2) == 1  # and once more, over one that stands for others
        assert compute_checksum(learner.history(folder).at(5)) == wanted[5]

    def test_a_version_dropped_while_one_looks_is_left_out(self, kept, monkeypatch) -> None:
        learner, folder = kept
        history = learner.history(folder)
        found, facts = history._numbers(), history._facts

        def dropped(path: Path) -> tuple[dict[str, Any], str]:
            said = facts(path)
            if path.name.startswith(("000001", "000002")):
                path.unlink()
            return said

        monkeypatch.setattr(history, "_numbers", lambda: found)  # as they were when we looked
        monkeypatch.setattr(history, "_facts", dropped)
        assert [v.number for v in history.versions()] == [3, 4, 5]

    def test_one_version_dropped_while_one_looks_is_a_sentence(self, kept, monkeypatch) -> None:
        history = kept[0].history(kept[1])
        facts = history._facts
        monkeypatch.setattr(history, "_check_known", lambda number: None)
        monkeypatch.setattr(history, "_facts", lambda path: (facts(path), path.unlink())[0])
        with pytest.raises(InputError, match="does not exist"):
            history.version(1)

    def test_a_kill_while_dropping_leaves_what_is_needed(self, kept, monkeypatch) -> None:
        learner, folder = kept
        wanted = compute_checksum(learner.history(folder).at(4))

        def killed(path: Path) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            learner.history(folder).forget(2)
        monkeypatch.undo()
        again = learner.history(folder)
        assert [v.number for v in again.versions()] == [4, 5]
        assert compute_checksum(again.at(4)) == wanted
        assert Learner.load(folder).digest() == learner.digest()
        assert again.forget(2) == 3  # what the kill had left
        assert not (folder / "versions" / "000001.safetensors").exists()
