"""Learn, adapt, predict, save, load: the same object for experiments, command line and service."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.backbones.pretrained import PretrainedBackbone
from dosapp.backbones.registry import load_backbone, resolve_lr
from dosapp.backbones.sharded import ShardedBackbone
from dosapp.data.base import Prompts, check_class_names
from dosapp.data.prefetch import prefetch
from dosapp.errors import CorruptRecordError, InputError, unknown_name
from dosapp.functional.named_tensors import select_prefix
from dosapp.history.history import History
from dosapp.history.record import State, checksum
from dosapp.learner.batches import SessionBatches
from dosapp.learner.mitigations import Mitigations
from dosapp.learner.replay import ReplayBuffer
from dosapp.methods.base import AdaptResult, Batch, Method
from dosapp.methods.registry import build_method
from dosapp.runtime import distributed
from dosapp.runtime.devices import to_device
from dosapp.runtime.files import ensure_dir, lock_folder, read_json, write_json
from dosapp.scenario import Session
from dosapp.settings import PAPER_LR, LearnerSettings
from dosapp.student.selection import Selection
from dosapp.student.student import Student

FORMAT = 1  # of learner.json


@dataclass(frozen=True)
class Prediction:
    label: str
    score: float  # softmax over the classes met
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Step:
    """One labelled step, reported."""

    number: int  # from 1
    of: int
    loss: float


class Learner:
    def __init__(
        self,
        settings: LearnerSettings | None = None,
        net: Backbone | None = None,
        origin: PretrainedBackbone | None = None,
    ) -> None:
        self.settings = resolve_lr(settings or LearnerSettings())
        s = self.settings
        net = net or load_backbone(s.backbone)
        self._origin = origin or PretrainedBackbone(s.backbone, net.fingerprint())
        net.configure(s)
        self.device = net.logit_scale.device
        self.method: Method = build_method(s.method, s.adapt, s.options)
        net = self.method.wrap_backbone(
            ShardedBackbone(net) if distributed.world_size() > 1 else net, s.seed
        )
        half = s.precision == "float16"
        self.student = Student(
            net, lr=s.lr or PAPER_LR, weight_decay=s.weight_decay, seed=s.seed, half=half
        )
        self.student.all_class_negatives = s.all_class_negatives
        self.replay_buffer = ReplayBuffer(s.buffer_size, s.seed)
        self.mitigations = Mitigations(
            s.confidence_gate,
            s.entropy_lr_scaling,
            s.skew_aware_ema,
            s.mask_reactivation,
            s.reactivation_interval,
        )
        self.sessions = 0  # finished ones
        self.method.setup(self.student)

    @property
    def origin(self) -> Backbone:
        """The backbone before any learning."""
        return self._origin.net

    @property
    def fingerprint(self) -> str:
        """Of the origin."""
        return self._origin.fingerprint

    @property
    def classes(self) -> list[str]:
        return list(self.student.classes)

    def rename(self, old: str, new: str) -> None:
        """The same class under another name; its captions are other words from now on."""
        self._check_known(old)
        check_class_names([new], "the new name")
        if new in self.classes:
            raise InputError(f"the class '{new}' is there already; give another name")
        student = self.student
        student.classes[student.classes.index(old)] = new
        student.prompts[new] = student.prompts.pop(old)

    def remove(self, name: str) -> None:
        """Answer with a class no more. What its lessons did to the weights stays."""
        self._check_known(name)
        place = self.classes.index(name)
        self.student.classes.remove(name)
        del self.student.prompts[name]
        self.method.remove_class(place)
        self.replay_buffer.remove_class(place)
        self.mitigations.remove_class(place)

    def _check_known(self, name: str) -> None:
        if name not in self.classes:
            raise unknown_name("class", name, self.classes)

    # Learning with labels

    def learn(self, session: "Session | Mapping[str, Images]") -> None:
        """One labelled session: new classes, or more pictures of known ones, by class name."""
        for _ in self.training_steps(
            session if isinstance(session, Session) else self.session(session)
        ):
            pass

    def session(self, images: "Mapping[str, Images]") -> Session:
        """Pictures by class name as a session; classes that are known keep their captions."""
        pictures = {name: self.pictures(found) for name, found in images.items()}
        made = Session.from_images(pictures, Prompts.from_template(self.settings.template))
        return replace(made, prompts={**made.prompts, **self._prompts(made.classes)})

    def _prompts(self, names: Sequence[str]) -> dict[str, Prompts]:
        known = self.student.prompts
        return {name: known[name] for name in names if name in known}

    def training_steps(self, session: Session, done: int = 0) -> Iterator[Step]:
        """The same, step by step; `done` steps of it are behind us (and in the loaded state)."""
        student, method = self.student, self.method
        if done == 0:
            method.check_session(student, session)
        labels = self._register_classes(session)
        place = (self.settings, self.sessions, self.replay_buffer, self.device)
        table = SessionBatches(session.train, labels, *place)
        if done == 0:
            for remark in self.session_warnings(session):
                warnings.warn(remark, stacklevel=3)  # at whoever called learn
            student.stream_skew = 0.0
            student.select(method.select_parameters(student, table.epoch(0)))
            self.mitigations.remember(student.session_selection, self.sessions)
            method.begin_session(student, session)
            student.drop_scores()
        taught = table.per_epoch * self.settings.epochs if student.session_selection.names else 0
        reviews = method.extra_stages(student, table.per_epoch)
        total = taught + sum(review.steps for review in reviews)

        def taken(step: int, loss: Tensor) -> Step:
            if student.step(loss):
                method.after_step(student)
            return Step(step + 1, total, loss.item())

        def whole(step: int) -> Batch:
            return table.complete(table.read(step), step)

        for step, batch in prefetch(range(done, taught), table.read):
            epoch, n = divmod(step, table.per_epoch)
            if n == 0:
                method.begin_epoch(student, epoch, table.epoch(epoch))
            yield taken(step, method.loss(student, table.complete(batch, step)))
        if done <= taught:
            method.end_training(student, session)
        first = taught
        for review in reviews:
            for step in range(max(done, first), first + review.steps):
                if step == first:
                    student.set_trainable(review.selection)
                yield taken(step, review.loss(student, partial(whole, step), step - first))
            first += review.steps
        method.end_session(student, session)
        self.replay_buffer.keep(session.train, labels)
        self.sessions += 1
        method.begin_stream(student)
        student.session_selection = student.selection  # whoever wanted to inherit has done so
        self.mitigations.begin_stream(student)

    def session_warnings(self, session: Session) -> list[str]:
        """What a teacher should know about a session, though it can be taught."""
        found, size, rivals = [], len(session.train), self.settings.all_class_negatives
        if len(session.classes) == 1 and not rivals:
            found.append(
                f"a lesson of '{session.classes[0]}' alone has nothing to tell it from: teach "
                "several classes together, or use a learner with rivals"
            )
        if size < self.settings.batch_size:
            found.append(
                f"the session has {size} training images, fewer than a batch of "
                f"{self.settings.batch_size}; they are taught as one smaller batch"
            )
        return found

    def _register_classes(self, session: Session) -> Tensor:
        """The session's labels as positions in the classes met so far, its own included."""
        if not len(session.train):
            raise InputError("the session has no training images; give at least one per class")
        shape, size = tuple(session.train.read([0]).shape[1:]), self.student.backbone.image_size
        if shape != (3, size, size):
            raise InputError(f"lesson images have shape {list(shape)}; give [3, {size}, {size}]")
        for name in session.classes:
            self.student.add_classes([name], session.prompts[name])
        place = {name: n for n, name in enumerate(self.student.classes)}
        here = np.array([place[name] for name in session.classes], dtype=np.int64)
        return torch.from_numpy(here[session.train.labels])

    # Learning without labels

    def adapt(self, images: "Images") -> AdaptResult | None:
        """One online step on images that are then forgotten; None if the method does not adapt."""
        pixels = to_device(self.pixels(images), self.device)
        if not self.sessions or not self.classes or not len(pixels):
            return None
        view = self.mitigations.look(self.student, self.method, pixels)
        trusted = pixels[view.trusted]
        guess = self.method.stream_loss(self.student, trusted) if len(trusted) else None
        if guess and guess.loss is not None:
            rate = view.rate * (self.settings.stream_lr or self.student.lr) / self.student.lr
            if self.student.step(guess.loss, rate):
                self.method.after_stream_step(self.student)
                self.mitigations.after_step(self.student)
        if guess and guess.loss is not None:  # whoever keeps it keeps no graph
            guess = replace(guess, loss=guess.loss.detach())
        return view.completed(guess) if self.method.adapts else None

    # Answering

    @torch.inference_mode()
    def predict(self, images: "Images", top: int = 5) -> list[Prediction]:
        """Labels and scores; changes nothing."""
        known = self.classes
        if not known:
            raise InputError("the learner knows no classes yet; teach it a session first")
        pixels = self.pixels(images)
        if not len(pixels):
            return []
        expert = next(iter(self.method.experts(self.student).values()))
        scores = (expert.logit_scale * self.logits(pixels, expert)).softmax(dim=1)
        values, places = scores.topk(min(top, len(known)), dim=1)
        answers = []
        for row, place in zip(values.tolist(), places.tolist(), strict=True):
            names = tuple((known[p], v) for p, v in zip(place, row, strict=True))
            answers.append(Prediction(names[0][0], names[0][1], names))
        return answers

    @torch.inference_mode()
    def logits(
        self, pixels: Tensor, expert: Expert, names: Mapping[str, Prompts] | None = None
    ) -> Tensor:
        """Cosines `[B, C]` with the evaluation prompts of the classes met, or of other names."""
        names = names or {name: self.student.prompts[name] for name in self.student.classes}
        return expert.encode_image(pixels) @ self.student.class_embeddings(expert, names).T

    def pixels(self, images: "Images") -> Tensor:
        """Whatever a caller has, as `float32 [B, 3, H, W]` in [0, 1]."""
        size = self.student.backbone.image_size
        if not isinstance(images, Tensor):
            return self.pictures(images).float() / 255
        pixels = images if images.is_floating_point() else images.float() / 255
        if pixels.ndim != 4 or pixels.shape[1:] != (3, size, size):
            raise InputError(f"images have shape {list(images.shape)}; give [B, 3, {size}, {size}]")
        if len(pixels) and not (pixels.min() >= 0 and pixels.max() <= 1):  # NaN fails both
            raise InputError("images have values outside 0 to 1; give floats in [0, 1] or uint8")
        return pixels

    def pictures(self, images: "Images") -> Tensor:
        """Pillow images at the backbone's size, `uint8 [n, 3, H, W]`; tensors stay as they are."""
        if isinstance(images, Tensor):
            return images
        if isinstance(images, str) or not isinstance(images, Sequence):
            kind = type(images).__name__
            raise InputError(f"images are a {kind}; give a list of Pillow images, or a tensor")
        strange = next((i for i in images if not isinstance(i, Image.Image)), None)
        if strange is not None:
            kind = type(strange).__name__
            raise InputError(f"a list of images holds a {kind}; give Pillow images, or one tensor")
        size = self.student.backbone.image_size
        empty = torch.zeros(0, 3, size, size, dtype=torch.uint8)
        return (
            torch.stack([self.student.backbone.preprocess(i) for i in images]) if images else empty
        )

    # State

    def state(self) -> State:
        """Everything that decides what the learner answers and how it goes on learning."""
        student = self.student
        weights = student.backbone.weights()
        tensors = {f"student/{n}": weights[n].detach() for n in sorted(student.trained_names)}
        for label, twin in self.method.shared_copies().items():
            theirs = twin.weights()
            tensors |= {
                f"{label}/{n}": theirs[n].detach() for n in theirs if theirs[n] is not weights[n]
            }
        tensors |= {f"method/{n}": t for n, t in self.method.state_dict().items()}
        tensors |= {f"caution/{n}": t for n, t in self.mitigations.state_dict().items()}
        chosen = student.selection
        tensors |= {f"mask/{n}": m for n, m in (chosen.mask or {}).items()}
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        facts = {
            "classes": list(student.classes),
            "prompts": {name: asdict(student.prompts[name]) for name in student.classes},
            "sessions": self.sessions,
            "steps": student.steps,
            **_described(chosen),
            "stored_images": len(self.replay_buffer),
        }
        return State(tensors, facts)

    def working_state(self) -> State:
        """What only the very next step needs: the optimizer, pictures kept, what lessons chose."""
        student = self.student
        chosen = student.session_selection
        apart = chosen is not student.selection  # in a review
        parts = {
            "optimizer": student.optimizer_state(),
            "memory": self.replay_buffer.state(),
            "method": self.method.working_state_dict(),
            "chosen": (chosen.mask or {}) if apart else {},
        }
        tensors = {f"{part}/{n}": t.cpu() for part, held in parts.items() for n, t in held.items()}
        return State(tensors, {"chosen": _described(chosen)} if apart else {})

    def restore(self, state: State, working: State | None = None) -> None:
        student, facts = self.student, state.facts
        student.classes, student.prompts = [], {}
        for name in facts["classes"]:
            words = facts["prompts"][name]
            student.add_classes([name], Prompts(words["train"], tuple(words["evaluate"])))
        self.sessions, student.steps = facts["sessions"], facts["steps"]

        scratch = self._here(working or State())
        state = self._here(state)
        moved = select_prefix("student/", state.tensors)
        student.set_trainable(Selection(tuple(moved)))  # twins stop sharing what has moved
        student.assign(moved)
        for label, twin in self.method.shared_copies().items():
            student.load_copy(twin, select_prefix(f"{label}/", state.tensors))
        self.method.load_state_dict(
            select_prefix("method/", state.tensors) | select_prefix("method/", scratch.tensors)
        )
        self.mitigations.load_state_dict(select_prefix("caution/", state.tensors))
        student.set_trainable(_selection(facts, select_prefix("mask/", state.tensors)))
        student.find_differences()
        student.session_selection = student.selection
        if "chosen" in scratch.facts:
            student.session_selection = _selection(
                scratch.facts["chosen"], select_prefix("chosen/", scratch.tensors)
            )
        if working is not None:
            student.load_optimizer_state(select_prefix("optimizer/", scratch.tensors))
            self.replay_buffer.load(select_prefix("memory/", working.tensors))
        student.weights_assigned = False  # these weights are its own, not put in place of others

    def _here(self, state: State) -> State:
        """From whatever device it was saved."""
        return State({n: t.to(self.device) for n, t in state.tensors.items()}, state.facts)

    @classmethod
    def open_history(cls, folder: Path) -> History:
        """The versions in a learner's folder; its backbone is read when one of them is."""
        known = cls._read_description(folder)
        origin = PretrainedBackbone(known["settings"]["backbone"], known["fingerprint"])
        return History(folder, origin.tensor)

    def history(self, folder: Path) -> History:
        return History(folder, self._origin.tensor)

    def at(self, state: State, working: State | None = None, learns: bool = True) -> "Learner":
        """Another learner at a state. One that only answers shares with the origin every tensor
        that never moved."""
        names = self.origin.weights()
        own = [n for n in names if learns or f"student/{n}" in state.tensors]
        other = Learner(self.settings, self.origin.shared_copy(own), self._origin)
        other.restore(state, working)
        return other

    def rolled_back(self, state: State) -> "Learner":
        """Another learner at a state, with the memory's pictures of the classes it knows there."""
        other = self.at(state)
        other.replay_buffer.load(self.replay_buffer.state())
        other.replay_buffer.follow(self.classes, other.classes)
        return other

    # Folders

    def save(self, folder: Path | str, reason: str = "saved") -> None:
        """Add a version to the folder, and the working checkpoint that goes with it."""
        folder = Path(folder)
        self._check_own(folder)
        with lock_folder(ensure_dir(folder)):
            self.write_description(folder)
            self._keep(self.history(folder), reason)

    def _keep(self, history: History, reason: str) -> None:
        history.commit(self.state(), reason)
        history.checkpoint(self.state(), self.working_state())

    @classmethod
    def rollback(cls, folder: Path | str, number: int, net: Backbone | None = None) -> "Learner":
        """What a version was, as a new version: nothing is taken out of the history, so the way
        forward again is another rollback. A memory keeps the pictures whose classes are known."""
        folder = Path(folder)
        learner = cls.open(folder, net, learns=False)
        with lock_folder(folder):
            history = learner.history(folder)
            state, working = load_latest(history)
            if working is not None and "progress" in working.facts:
                raise InputError(
                    f"'{folder}' is the checkpoint of a run; copy it and roll back the copy"
                )
            learner = learner.at(state, working, learns=False).rolled_back(history.at(number))
            learner._keep(history, f"rolled back to version {number}")
        return learner

    def write_description(self, folder: Path) -> None:
        """`learner.json`: what must be known before any tensor is read."""
        self._check_own(folder)
        facts = {
            "format": FORMAT,
            "settings": self.settings.model_dump(mode="json", exclude={"device"}),
            "fingerprint": self.fingerprint,
            "stores_images": self.settings.buffer_size > 0 or self.method.stores_data,
        }
        write_json(folder / "learner.json", facts)

    def _check_own(self, folder: Path) -> None:
        path = folder / "learner.json"
        if path.exists():
            known, began = (
                self._settings(folder, self.settings.device),
                self._read_description(folder),
            )
            if known != self.settings or began["fingerprint"] != self.fingerprint:
                raise InputError(f"'{folder}' holds a learner with other settings; save elsewhere")
        elif folder.exists() and any(p.name[0] != "." for p in folder.iterdir()):
            raise InputError(f"'{folder}' is not empty and holds no learner; save elsewhere")

    @classmethod
    def load(
        cls, folder: Path | str, net: Backbone | None = None, device: str = "cpu"
    ) -> "Learner":
        """The learner as it was saved: same answers, and from the same batch the same next step.
        It may have lived on another device."""
        learner = cls.open(Path(folder), net, device)
        learner.restore(*load_latest(learner.history(Path(folder))))
        return learner

    @classmethod
    def open(
        cls, folder: Path, net: Backbone | None = None, device: str = "cpu", learns: bool = True
    ) -> "Learner":
        """The learner of a folder as it was before anything was learned. One that does not learn
        itself, but is put `at` states, shares every tensor with the origin."""
        known = cls._read_description(folder)
        origin = PretrainedBackbone(known["settings"]["backbone"], known["fingerprint"], net)
        own = list(origin.net.weights()) if learns else []
        return cls(cls._settings(folder, device), origin.net.shared_copy(own), origin)

    @staticmethod
    def _read_description(folder: Path) -> dict[str, Any]:
        """What `learner.json` says."""
        if not (folder / "learner.json").exists():
            inside = folder / "learner"
            hint = f"; try '{inside}'" if (inside / "learner.json").exists() else ""
            raise InputError(f"'{folder}' holds no learner: there is no learner.json in it{hint}")
        known: dict[str, Any] = read_json(folder / "learner.json")
        if known.get("format") != FORMAT:
            raise InputError(
                f"'{folder}' has format {known.get('format')}; this dosapp reads {FORMAT}"
            )
        return known

    @classmethod
    def _settings(cls, folder: Path, device: str) -> LearnerSettings:
        """Of the learner in a folder; settings that came later have their defaults."""
        known = {**cls._read_description(folder)["settings"], "device": device}
        found: LearnerSettings = LearnerSettings.parse(known, str(folder))
        return found

    def digest(self) -> str:
        """A checksum of all that was learned, to compare two learners."""
        return checksum(self.state())


Images = Tensor | Sequence[Image.Image]


def load_latest(history: History) -> tuple[State, State | None]:
    """Where a learner was, or the last version that can be read, and one sentence about it."""
    try:
        return history.resume()
    except CorruptRecordError as error:
        found = history.recover()
        if found is None:
            raise
        number, state = found
        warnings.warn(f"{error}; going on from version {number}, the last whole one", stacklevel=2)
        return state, None


def _described(selection: Selection) -> dict[str, Any]:
    """A selection without its mask, as JSON."""
    names, rates = list(selection.names), dict(selection.lr_scales)
    return {"selection": {"names": names, "rates": rates}, "masked": selection.mask is not None}


def _selection(facts: Mapping[str, Any], mask: dict[str, Tensor]) -> Selection:
    found = facts["selection"]
    return Selection(
        tuple(found["names"]), mask if facts["masked"] else None, lr_scales=found["rates"]
    )
