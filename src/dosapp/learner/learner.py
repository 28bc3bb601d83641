"""The learner: learn, adapt, predict, save and load, for experiments, command line and service."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.backbones.data_parallel import DataParallelBackbone
from dosapp.backbones.pretrained import PretrainedBackbone
from dosapp.backbones.registry import load_backbone, stored_lr
from dosapp.data.base import Prompts, check_class_names
from dosapp.data.convert import as_dataset
from dosapp.data.images import UnlabelledImages
from dosapp.data.inputs import Images, list_images, read_pixels
from dosapp.errors import InputError, unknown_name
from dosapp.heads.base import HeadExpert, score_with_expert
from dosapp.history.history import History
from dosapp.history.record import State, compute_checksum
from dosapp.learner.canary import Canary
from dosapp.learner.class_head import ClassHead
from dosapp.learner.evaluation import (
    Evaluation,
    SessionResult,
    check_known,
    choose_split,
    evaluate,
)
from dosapp.learner.learner_folder import (
    LearnerDescription,
    append_rollback,
    load_latest,
    save_learner,
)
from dosapp.learner.mitigations import Mitigations
from dosapp.learner.progress import progress_bar
from dosapp.learner.replay import ReplayBuffer
from dosapp.learner.session_input import (
    build_session,
    list_session_warnings,
    list_similar_names,
)
from dosapp.learner.state import capture_state, capture_working_state, restore_state
from dosapp.learner.stream_step import adapt_batch
from dosapp.learner.training import TrainingStep, train_session
from dosapp.learner.training_defaults import RATES, Training, choose_batch_size
from dosapp.methods.base import AdaptResult, Method
from dosapp.methods.registry import build_method
from dosapp.runtime import distributed
from dosapp.runtime.devices import to_device
from dosapp.scenario import Session
from dosapp.settings import PAPER_LR, LearnerSettings
from dosapp.student.student import Student


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image."""

    label: str
    score: float  # softmax over the known classes
    top: tuple[tuple[str, float], ...]  # the best classes with their scores


class Learner:
    """A CLIP classifier that learns new classes over time.

    Args:
        settings: How it trains; the defaults if not given.
        backbone: The model to train, instead of loading the one that the settings name. If its
            weights are not those of that name, give `pretrained`, too.
        pretrained: The pretrained backbone, if the given one is a copy of it.

    Example:
        >>> import torch
        >>> from dosapp import Learner, LearnerSettings
        >>> learner = Learner(LearnerSettings(epochs=1, batch_size=4))
        >>> red, blue = (torch.zeros(4, 3, 32, 32, dtype=torch.uint8) for _ in range(2))
        >>> red[:, 0], blue[:, 2] = 220, 220
        >>> result = learner.learn({"red square": red, "blue square": blue})
        >>> _ = learner.adapt(torch.cat([red, blue]))
        >>> learner.predict(red[:1])[0].label
        'red square'
    """

    def __init__(
        self,
        settings: LearnerSettings | None = None,
        backbone: Backbone | None = None,
        pretrained: PretrainedBackbone | None = None,
    ) -> None:
        if settings is not None and not isinstance(settings, LearnerSettings):
            raise InputError(
                f"a learner got {settings!r}; give LearnerSettings(backbone=…, method=…), or "
                "Learner.load(folder) for a saved one"
            )
        s = self.settings = settings or LearnerSettings()
        self.training = self.initial_training  # learning rate, epochs, batch size of sessions
        backbone = backbone or load_backbone(s.backbone)
        # If no copy is given, it is loaded by name again when it is first needed, and its
        # fingerprint is checked.
        self._pretrained = pretrained or PretrainedBackbone(s.backbone, backbone.fingerprint())
        backbone.configure(s)  # device, precision, compilation
        self.device = backbone.logit_scale.device
        self.preprocess = backbone.preprocess
        if distributed.world_size() > 1:
            # Weights are replicated, batches are sharded: each process encodes a part of the rows
            # and then has the features of all, so the loss is the same in each.
            backbone = DataParallelBackbone(backbone)
        # One method, or two: `adapt` names another one for the stream. `stages` names what follows
        # the epochs of the labelled one: merging of weights, alignment by more steps.
        self.method: Method = build_method(s.method, s.adapt, s.options, s.stages)
        self.student = Student(
            self.method.wrap_backbone(backbone, s.seed),  # adds prompts or adapters, if any
            lr=self.training.lr or PAPER_LR,  # None: the first session chooses it
            weight_decay=s.weight_decay,
            seed=s.seed,
            loss_scaling=s.precision == "float16",
            all_class_negatives=s.all_class_negatives,
        )
        self.replay_buffer = ReplayBuffer(s.buffer_size, s.seed)
        # Optional safeguards of each stream step, all off by default (docs/methods.md).
        self.mitigations = Mitigations(
            s.confidence_gate,
            s.entropy_lr_scaling,
            s.skew_aware_ema,
            s.mask_reactivation,
            s.reactivation_interval,
        )
        # Class statistics that predict; `kind` is None if captions predict. A method may bring its
        # own. The weight is the factor of the captions' logits beside the head's.
        text_weight = s.head_text_weight if s.head else self.method.head_text_weight
        self.class_head = ClassHead(
            s.head or self.method.head,
            text_weight,
            width=s.head_width,  # random features, of RanPAC only, drawn with the seed
            seed=s.seed,
            # Whether images of a new session move the means of earlier classes, too; None: if the
            # stream moves them.
            session_drift=s.head_session_drift,
            # Whether Gaussians of the pretrained backbone's features predict, too.
            with_pretrained=s.head_ensemble or (s.head is None and self.method.head_ensemble),
        )
        # Labelled images kept from training; a service measures each new version on them before it
        # is published.
        self.canary = Canary()
        self.sessions = 0  # finished ones
        self.method.setup(self.student)
        # Checks that the head fits the method; copies the weights that it compares features of.
        self.class_head.setup(self.student, self.method_expert)

    def __repr__(self) -> str:
        s = self.settings
        method = f"{s.method}+{s.adapt}" if s.adapt else s.method
        return (
            f"Learner(backbone={s.backbone!r}, method={method!r}, classes={len(self.classes)}, "
            f"sessions={self.sessions})"
        )

    @property
    def pretrained(self) -> Backbone:
        """The pretrained backbone, unchanged by training."""
        return self._pretrained.backbone

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the pretrained backbone."""
        return self._pretrained.fingerprint

    @property
    def stores_images(self) -> bool:
        """Whether versions or checkpoints of this learner hold images."""
        stores_data = self.settings.buffer_size > 0 or self.method.stores_data
        return stores_data or self.canary.stores_images

    # Classes

    @property
    def classes(self) -> list[str]:
        """The names of the classes it knows."""
        return list(self.student.classes)

    def rename(self, old: str, new: str) -> None:
        """Rename a class; its captions change with it.

        Args:
            old: A known class.
            new: Its new name, which no other class has.
        """
        self._check_class(old)
        check_class_names([new], "the new name")
        if new in self.classes:
            raise InputError(f"the class '{new}' exists already; give another name")
        # What the new name itself does to the canary's scores is added to their baseline (those
        # after the last session), so that it does not count as harm by the stream.
        with self.canary.carry_baseline(self):
            self.student.text_head.rename_class(old, new)
            self.canary.rename_class(old, new)

    def remove(self, name: str) -> None:
        """Stop predicting a class. What it changed in the weights stays."""
        self._check_class(name)
        index = self.classes.index(name)
        with self.canary.carry_baseline(self):
            self.student.text_head.remove_class(name)
            self.method.remove_class(index)
            self.replay_buffer.remove_class(index)
            self.mitigations.remove_class(index)
            self.class_head.remove_class(index)
            self.canary.remove_class(name)

    def _check_class(self, name: str) -> None:
        if name not in self.classes:
            raise unknown_name("class", name, self.classes)

    # Labelled phase

    @property
    def initial_training(self) -> Training:
        """How the settings say that it trains; without a rate the first session chooses one."""
        s = self.settings
        # `tiny` has tuned rates; for other backbones this is None.
        lr = None if s.auto_lr else s.lr or stored_lr(s.backbone, s.method)
        return Training(lr, s.epochs, s.batch_size)

    def change_training(
        self, *, lr: float | None = None, epochs: int | None = None, batch_size: int | None = None
    ) -> None:
        """Train later sessions with other values; None leaves one as it is.

        The learning rate is also that of later streams, unless `stream_lr` is set.

        Args:
            lr: Learning rate.
            epochs: Passes over the images of a session.
            batch_size: Images of a batch.

        Example:
            >>> learner = Learner()
            >>> learner.change_training(lr=1e-4, epochs=30)
            >>> learner.training
            Training(lr=0.0001, epochs=30, batch_size=None)
        """
        values: dict[str, Any] = {"lr": lr, "epochs": epochs, "batch_size": batch_size}
        given = {name: value for name, value in values.items() if value is not None}
        LearnerSettings.parse(given)  # raises if a value is not allowed
        self.training = replace(self.training, **given)
        if lr is not None:
            self.student.change_lr(lr)

    def learn(
        self,
        session: Session | Mapping[str, Images] | Any,
        test: Any = None,
        *,
        canary_share: float = 0.0,
        progress: bool | None = None,
    ) -> SessionResult:
        """Train one labelled session: new classes, or more images of known ones.

        Args:
            session: Images by class name (Pillow images, paths, arrays, or `uint8 [n, 3, H, W]` at
                the backbone's size), a session of a scenario, or whatever `as_dataset` takes: the
                path of class folders, a torch `Dataset`, a pair (images, labels), a table.
            test: Labelled images in any of these forms but a session, on which it is then
                evaluated; their test split, if they have one.
            canary_share: Share of each class's images, at most 10, that is kept in the canary, by
                which a service guards its adaptation. They are stored with the learner and not
                trained, unless the class has fewer than 4 images.
            progress: Whether to show a progress bar on stderr; if None, only on a terminal.

        Returns:
            What was done, with the accuracy on the test images.

        Raises:
            InputError: The images cannot be used.
            DivergedError: The learning rate is too large.
        """
        if not isinstance(canary_share, int | float) or not 0 <= canary_share < 1:
            raise InputError(f"canary_share is {canary_share!r}; give a share from 0 to below 1")
        if not isinstance(session, Session):
            session = self.make_session(session)
        # Read before training: if it cannot be read, no training is lost.
        if test is not None:
            test = as_dataset(test, self.preprocess, hold_out=False)
            known = [*self.classes, *session.classes]
            check_known(test.classes, choose_split(test), known)
        if canary_share:
            session = self.canary.take_share(session, canary_share)
        step = None
        with progress_bar("learn", progress) as show:

            def show_trial(lr: float) -> None:
                show(RATES.index(lr), len(RATES), f"choosing the learning rate: trying {lr:g}")

            for step in self.training_steps(session, on_trial=show_trial):
                show(step.number, step.total, f"loss {step.loss:.3f}")
        count, training = len(session.train), self.training
        result = SessionResult(
            classes=session.classes,
            images=count,
            steps=step.number if step else 0,
            loss=step.loss if step else None,
            lr=self.student.lr,
            epochs=training.epochs_for(count) if step else 0,  # some methods train nothing
            batch_size=training.batch_size_for(count),
            evaluation=None if test is None else self.evaluate(test),
        )
        if result.warning:  # no better than zero-shot
            warnings.warn(result.warning, stacklevel=2)
        return result

    def make_session(self, images: Mapping[str, Images] | Any) -> Session:
        """Make a session from labelled images of any form; known classes keep their prompts."""
        known = self.student.text_head.prompts
        return build_session(images, self.preprocess, known, self.settings.template)

    def evaluate(self, data: Any) -> Evaluation:
        """Measure the accuracy on labelled images; nothing changes.

        Args:
            data: Whatever `as_dataset` takes, as for `learn`. Of data with a test split, that split
                is evaluated.

        Returns:
            Accuracy among all known classes, beside that of the pretrained backbone.
        """
        dataset = as_dataset(data, self.preprocess, hold_out=False)
        return evaluate(self, dataset.classes, choose_split(dataset))

    def training_steps(
        self,
        session: Session,
        start: int = 0,
        lr: float | None = None,
        epochs: int | None = None,
        on_trial: Callable[[float], None] | None = None,
    ) -> Iterator[TrainingStep]:
        """Train a session step by step; the caller can save, report or stop after each.

        The loop is in learner/training.py. It chooses a learning rate if there is none, takes the
        steps, and in the end counts the session, adds it to head and replay buffer, and gets
        ready for the stream.

        Args:
            session: The session.
            start: Steps that were taken already and are part of the restored state.
            lr: Learning rate of this session, if another than the learner's.
            epochs: Passes over the images of this session, if another number than the learner's.
            on_trial: Called with each learning rate that is tried, if the session chooses one.

        Returns:
            An iterator that trains as it is advanced.
        """
        return train_session(self, session, start, lr, epochs, on_trial)

    def session_warnings(self, session: Session) -> list[str]:
        """What the user should know about a session that can be trained all the same."""
        is_only_class = self.needs_two_classes and len({*self.classes, *session.classes}) == 1
        similar = list_similar_names(session.classes, self.classes)
        return [*list_session_warnings(session, self.training.batch_size, is_only_class), *similar]

    @property
    def needs_two_classes(self) -> bool:
        """Whether one class alone teaches nothing: there is no caption to contrast with."""
        # Class statistics are collected of one class, too; zero-shot only adds its caption.
        return self.class_head.kind is None and self.settings.method != "zero-shot"

    # Unlabelled phase

    def adapt_stream(
        self,
        images: Images | UnlabelledImages,
        *,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> list[AdaptResult]:
        """Take a step on each batch of unlabelled images, in their order.

        No image is stored, unless the method keeps some (`stores_data`: NOTE).

        Args:
            images: A folder, a list of images, a tensor, or the stream of a session.
            batch_size: Images per step; if None, 64, or fewer if there are few images.
            progress: Whether to show a progress bar on stderr; if None, only on a terminal.

        Returns:
            What `adapt` returned for each batch; nothing if the learner does not adapt.

        Example:
            >>> learner = Learner(LearnerSettings(epochs=1, batch_size=4))
            >>> gray = torch.full((20, 3, 32, 32), 128, dtype=torch.uint8)
            >>> _ = learner.learn({"gray square": gray[:4], "gray circle": gray[:4]})
            >>> [len(result.labels) for result in learner.adapt_stream(gray)]
            [8, 8, 4]
        """
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; give at least 1")
        if not isinstance(images, (UnlabelledImages, Tensor)):
            images = list_images(images)  # read batch by batch
        count = len(images)
        size, results = batch_size or choose_batch_size(count), []
        batches = (
            images.batches(size)
            if isinstance(images, UnlabelledImages)
            else (images[first : first + size] for first in range(0, count, size))
        )
        with progress_bar("adapt", progress) as show:
            for number, batch in enumerate(batches if self.adapts else (), start=1):
                results.append(self.adapt(batch))
                show(number, math.ceil(count / size), "")
        return [result for result in results if result is not None]

    def adapt(self, images: Images) -> AdaptResult | None:
        """Take one step on unlabelled images; only a method with `stores_data` keeps some.

        Args:
            images: A batch of the stream; `adapt_stream` makes batches.

        Returns:
            Pseudo-labels and what was done; None if neither method nor head adapts, before the
            first session, and without images.
        """
        pixels = to_device(read_pixels(images, self.preprocess), self.device)
        if not self.sessions or not self.classes or not len(pixels):
            return None
        return adapt_batch(self, pixels)

    # Prediction

    @property
    def adapts(self) -> bool:
        """Whether the unlabelled phase does anything."""
        return self.method.adapts or self.class_head.follows_stream

    def experts(self) -> Mapping[str, Expert]:
        """All experts (models that can predict) by name; `predict` uses the first one."""
        experts = self.method.experts(self.student)
        if self.class_head.kind is None:
            return experts
        return {self.class_head.kind: self.class_head.wrap_expert(self.method_expert), **experts}

    @property
    def answering_expert(self) -> tuple[str, Expert]:
        """The name and model (`student`, `teacher`, a head, …) that predicts: the first expert."""
        return next(iter(self.experts().items()))

    @property
    def method_expert(self) -> Expert:
        """The model of the method's first expert, whose features a head scores."""
        expert = next(iter(self.method.experts(self.student).values()))
        # TDA and OGA wrap their model in a head that scores by a cache of stream features.
        return expert.encoder if isinstance(expert, HeadExpert) else expert

    @torch.inference_mode()
    def predict(self, images: Images, top: int = 5) -> list[Prediction]:
        """Classify images; nothing changes.

        Args:
            images: Pillow images, paths or arrays; one of them; a folder of images; or a tensor
                `[B, 3, H, W]`, uint8 or float in [0, 1].
            top: How many of the best classes to report, at least 1.

        Returns:
            One prediction per image.
        """
        classes = self.classes
        if not classes:
            raise InputError("the learner knows no classes yet; train a session first")
        if not isinstance(top, Integral) or isinstance(top, bool) or top < 1:
            raise InputError(f"top is {top!r}; give a whole number of classes, at least 1")
        pixels = read_pixels(images, self.preprocess)  # `encode_image` moves them to its device
        if not len(pixels):
            return []
        _, expert = self.answering_expert
        # `logit_scale` is CLIP's learned scale as a factor (about 100), not its logarithm; that of
        # a `HeadExpert` is 1.
        scores = (expert.logit_scale * self.score_images(pixels, expert)).softmax(dim=1)
        values, indices = scores.topk(min(int(top), len(classes)), dim=1)
        predictions = []
        for row_values, row_indices in zip(values.tolist(), indices.tolist(), strict=True):
            best = tuple((classes[i], v) for i, v in zip(row_indices, row_values, strict=True))
            predictions.append(Prediction(best[0][0], best[0][1], best))
        return predictions

    @torch.inference_mode()
    def score_images(
        self, pixels: Tensor, expert: Expert, prompts: Mapping[str, Prompts] | None = None
    ) -> Tensor:
        """Unscaled scores `[B, C]` of the classes in `prompts`, or of all known ones.

        They are cosines with the mean feature of each class's templates, or the logits of the
        expert's head. A head knows learned classes only; if there are others, captions decide.

        Args:
            pixels: Images `[B, 3, H, W]`, floats in [0, 1].
            expert: The model that encodes and scores them.
            prompts: Class names with their templates.

        Returns:
            The scores, before the expert's `logit_scale`.
        """
        return self.score_features(expert.encode_image(pixels), expert, prompts)

    @torch.inference_mode()
    def score_features(
        self, features: Tensor, expert: Expert, prompts: Mapping[str, Prompts] | None = None
    ) -> Tensor:
        """As `score_images`, of images that the expert has encoded already.

        Args:
            features: Features `[B, D]` of the images.
            expert: The model that encoded them.
            prompts: Class names with their templates.

        Returns:
            The scores, before the expert's `logit_scale`.
        """
        if prompts is None or not isinstance(expert, HeadExpert):
            embeddings = self.student.text_head.class_embeddings(expert, prompts)
            return score_with_expert(expert, features, embeddings)
        index = {name: n for n, name in enumerate(self.classes)}
        if any(name not in index for name in prompts):
            # With `head_ensemble` features are `[B, 2 D]`: the expert's, then the pretrained
            # model's. `score_with_expert` compares captions with the first half only.
            return self.score_features(features, expert.encoder, prompts)
        return self.score_features(features, expert)[:, [index[name] for name in prompts]]

    # State

    def state(self) -> State:
        """Named tensors and JSON metadata: what predicts, and what is known of the sessions."""
        return capture_state(self)

    def working_state(self) -> State:
        """What only later training needs, not stored in versions: optimizer, replay buffer."""
        return capture_working_state(self)

    def restore(self, state: State, working: State | None = None) -> None:
        """Set the learner to a captured state.

        Args:
            state: Of a learner with the same settings and backbone.
            working: What only training needs (optimizer, replay buffer), if it goes on from there.

        Raises:
            CorruptRecordError: The state is not one of this learner. The learner may be changed by
                then, so do not use it.
        """
        restore_state(self, state, working)

    def digest(self) -> str:
        """A checksum of the state, to compare two learners."""
        return compute_checksum(self.state())

    def at(self, state: State, working: State | None = None, trainable: bool = True) -> "Learner":
        """A copy of the learner at another state.

        A copy that only predicts shares every untrained weight with the pretrained backbone.

        Args:
            state: A captured state.
            working: What only training needs (optimizer, replay buffer), if it goes on from there.
            trainable: Whether it will train.

        Returns:
            The new learner.
        """
        weights = self.pretrained.weights()
        # A state has the weights that were ever selected, as `student/NAME`; others are pretrained.
        unshared = [n for n in weights if trainable or f"student/{n}" in state.tensors]
        backbone = self.pretrained.shared_copy(unshared=unshared)
        other = Learner(self.settings, backbone, self._pretrained)
        # Restoring replaces the stored part of the canary; images of `serve --canary` are not in a
        # state and stay.
        other.canary = replace(self.canary)
        other.restore(state, working)
        return other

    def rollback_copy(self, state: State) -> "Learner":
        """Another learner at an earlier state, with the replayed images of its classes."""
        other = self.at(state)
        other.replay_buffer.load_state_dict(self.replay_buffer.state_dict())
        other.replay_buffer.relabel(self.classes, other.classes)
        return other

    # Folders

    def save(self, folder: Path | str, reason: str = "saved") -> None:
        """Append a version to the learner's folder.

        Args:
            folder: A new folder, or one of a learner with the same settings and backbone and no
                more sessions: usually where this one was saved before.
            reason: Stored with the version.
        """
        save_learner(self, Path(folder), reason)

    @classmethod
    def load(
        cls, folder: Path | str, backbone: Backbone | str | None = None, device: str = "cpu"
    ) -> "Learner":
        """Load a saved learner: the same predictions, and the same next step from the same batch.

        Args:
            folder: Where it was saved.
            backbone: The pretrained backbone, if it is loaded already or has moved.
            device: Where it computes; it may have been trained on another.

        Returns:
            The learner.
        """
        learner = cls.open(Path(folder), backbone, device)
        learner.restore(*load_latest(learner.history(Path(folder))))
        return learner

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = True,
        include_images: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload the learner to the Hugging Face Hub, with a model card.

        Args:
            repo_id: `ORG/NAME`; it is created if it does not exist.
            private: Whether a new repository is private.
            include_images: Upload also if the learner stores images (replay buffer, canary, NOTE).
            token: Of the hub; that of `hf auth login` or HF_TOKEN if not given.

        Returns:
            The address of the commit.
        """
        from dosapp.learner.hub import push_learner

        return push_learner(
            self, repo_id, private=private, include_images=include_images, token=token
        )

    @classmethod
    def from_pretrained(
        cls,
        name: Path | str,
        *,
        backbone: Backbone | str | None = None,
        revision: str | None = None,
        token: str | None = None,
        device: str = "cpu",
    ) -> "Learner":
        """Load a learner from the Hugging Face Hub, or from a folder.

        Args:
            name: `ORG/NAME`, or a folder.
            backbone: Its pretrained backbone, if that cannot be loaded by its name.
            revision: A branch, tag or commit of the hub.
            token: Of the hub, for private repositories.
            device: Where it computes.

        Returns:
            The learner.
        """
        from dosapp.learner.hub import pull_temporarily

        if Path(name).is_dir():
            return cls.load(name, backbone, device=device)
        with pull_temporarily(str(name), revision=revision, token=token) as folder:
            return cls.load(folder, backbone, device=device)

    @classmethod
    def open(
        cls,
        folder: Path | str,
        backbone: Backbone | str | None = None,
        device: str = "cpu",
        trainable: bool = True,
    ) -> "Learner":
        """Build the untrained learner of a folder; `at` copies it at a saved state.

        Args:
            folder: Where it was saved.
            backbone: The pretrained backbone, if it is loaded already or has moved.
            device: Where it computes.
            trainable: Whether it will train; if not, its weights are those of the backbone, shared.

        Returns:
            The learner, without classes.
        """
        folder = Path(folder)
        description = LearnerDescription.read(folder)
        pretrained = description.pretrained(backbone)
        unshared = list(pretrained.backbone.weights()) if trainable else []
        settings = description.learner_settings(folder, device)
        return cls(settings, pretrained.backbone.shared_copy(unshared=unshared), pretrained)

    @classmethod
    def open_history(cls, folder: Path | str, backbone: str | None = None) -> History:
        """The versions of a learner's folder; its backbone is loaded only if it is needed.

        Args:
            folder: Where it was saved.
            backbone: The pretrained backbone, if it has moved.

        Returns:
            The history, for reading.
        """
        folder = Path(folder)
        pretrained = LearnerDescription.read(folder).pretrained(backbone)
        return History(folder, pretrained.initial_tensor)

    def history(self, folder: Path | str) -> History:
        """The versions of this learner in a folder, stored as changes of the initial tensors."""
        return History(Path(folder), self._pretrained.initial_tensor)

    @classmethod
    def rollback(
        cls, folder: Path | str, number: int, backbone: Backbone | str | None = None
    ) -> "Learner":
        """Append an old version as a new one; every version stays.

        Replayed images of classes that the old version does not know are dropped.

        Args:
            folder: The folder of a learner.
            number: The version to go back to.
            backbone: The pretrained backbone, if it is loaded already or has moved.

        Returns:
            The learner at that version, with the replayed images of its classes.
        """
        learner = cls.open(folder, backbone, trainable=False)
        return append_rollback(learner, Path(folder), number)
