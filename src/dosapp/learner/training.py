"""The labelled phase: the training loop of a session."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from dosapp.data.prefetch import prefetch
from dosapp.learner.batches import SessionBatches
from dosapp.learner.session_input import register_classes
from dosapp.learner.training_defaults import choose_training
from dosapp.methods.base import Batch
from dosapp.scenario import Session

if TYPE_CHECKING:
    from dosapp.learner.learner import Learner


@dataclass(frozen=True)
class TrainingStep:
    """One labelled step, as `Learner.training_steps` reports it."""

    number: int  # from 1
    total: int  # steps of the session
    loss: float


def train_session(
    learner: "Learner",
    session: Session,
    start: int,
    lr: float | None,
    epochs: int | None,
    on_trial: Callable[[float], None] | None,
) -> Iterator[TrainingStep]:
    """Train a session step by step; see `Learner.training_steps`."""
    student, negatives = learner.student, learner.settings.all_class_negatives
    # A class alone has no negatives in its batches, so the captions of all other classes join it.
    student.all_class_negatives = negatives or len(session.classes) == 1
    try:
        yield from _take_steps(learner, session, start, lr, epochs, on_trial)
    finally:  # also if training ends early
        student.all_class_negatives = negatives


def _take_steps(
    learner: "Learner",
    session: Session,
    start: int,
    lr: float | None,
    epochs: int | None,
    on_trial: Callable[[float], None] | None,
) -> Iterator[TrainingStep]:
    student, method = learner.student, learner.method
    if start == 0:
        method.check_session(student, session)
        learner.class_head.check_session(session)
    # New classes are added, known ones stay; labels [N] are indices of the student's classes.
    labels = register_classes(session, student.text_head, learner.preprocess.image_size)
    if learner.training.lr is None and method.phase != "none":
        # By training copies of this learner on a part of the session's images.
        learner.change_training(**asdict(choose_training(learner, session, on_trial)))
    batches = SessionBatches(
        session.train,
        labels,
        learner.training.batch_size_for(len(session.train)),
        learner.settings.seed,
        learner.sessions,
        learner.replay_buffer,
        learner.device,
    )
    if start == 0:
        _begin_session(learner, session, batches)
    lr_scale = (lr or student.lr) / student.lr
    epochs = epochs or learner.training.epochs_for(len(session.train))
    if not student.session_selection.names:  # nothing trains
        epochs = 0
    epoch_steps = batches.steps_per_epoch * epochs
    # Training after the epochs, such as SLCA's classifier alignment.
    stages = method.extra_stages(student, batches.steps_per_epoch)
    total = epoch_steps + sum(stage.steps for stage in stages)

    def take_step(step: int, loss: Tensor) -> TrainingStep:
        if student.step(loss, lr_scale):
            method.after_step(student)  # a teacher follows the student
        return TrainingStep(step + 1, total, loss.item())

    def read_batch(step: int) -> Batch:  # called by a stage only if it needs images
        return batches.with_replay(batches.read(step), step)

    for step, batch in prefetch(range(start, epoch_steps), batches.read):
        epoch, number = divmod(step, batches.steps_per_epoch)
        if number == 0:
            method.begin_epoch(student, epoch, batches.iter_epoch(epoch))
        yield take_step(step, method.loss(student, batches.with_replay(batch, step)))
    if start <= epoch_steps:  # not if training resumes inside a later stage
        method.end_training(student, session)  # ZSCL sets its averaged weights here
    first = epoch_steps
    for stage in stages:
        for step in range(max(start, first), first + stage.steps):
            if step == first:
                student.set_trainable(stage.selection)
            yield take_step(step, stage.loss(student, partial(read_batch, step), step - first))
        first += stage.steps
    _end_session(learner, session, labels)


def _begin_session(learner: "Learner", session: Session, batches: SessionBatches) -> None:
    """Select the weights that train; no weight changes yet."""
    student, method = learner.student, learner.method
    for message in learner.session_warnings(session):
        warnings.warn(message, stacklevel=5)  # at the caller of learn
    student.stream_skew = 0.0
    learner.class_head.begin_session(student, learner.method_expert)
    # `iter_epoch` reads the session's own images as it is advanced, without replay.
    student.select_for_session(method.select_parameters(student, batches.iter_epoch(0)))
    # Mask reactivation may train these entries again in a later stream.
    learner.mitigations.record_selection(student.session_selection, learner.sessions)
    method.begin_session(student, session)
    student.drop_gradient_scores()  # only what precedes needed them


def _end_session(learner: "Learner", session: Session, labels: Tensor) -> None:
    """Add the session to everything that remembers it, and get ready for the stream."""
    student, method = learner.student, learner.method
    method.end_session(student, session)  # all stages are over
    learner.class_head.end_session(student, learner.method_expert, session)
    learner.replay_buffer.add_session(session.train, labels)
    learner.sessions += 1
    method.begin_stream(student)
    # begin_stream has read the session's selection; from here on there is one selection.
    student.session_selection = student.selection
    learner.mitigations.begin_stream(student)
    learner.canary.set_baseline(learner)  # what a service compares later versions with
