"""What the stream changed since the last session: where that is stored, and how far it is."""

from torch import Tensor

from dosapp.history.history import History
from dosapp.learner.learner import Learner


def find_session_version(learner: Learner, history: History, newest: int | None = None) -> int:
    """The version before the stream changed the learner, as far as the history goes back; or 0.

    Args:
        learner: At the newest version that is searched.
        history: Its versions.
        newest: The number of that version, if it is not the last one.
    """
    number, facts = 0, learner.state().facts
    for version in reversed(history.versions()):
        if newest is not None and version.number > newest:
            continue
        if any(version.facts[name] != facts[name] for name in ("sessions", "classes")):
            break
        number = version.number
    return number


def learner_after_session(learner: Learner, history: History, newest: int | None = None) -> Learner:
    """The learner as it was before the stream changed it, as far as the history goes back."""
    number = find_session_version(learner, history, newest)
    return learner.at(history.at(number), trainable=False) if number else learner


def copy_answering_weights(learner: Learner) -> dict[str, Tensor]:
    """Copy the trained weights of the expert that answers.

    An ensemble has no weights of its own; the student's are taken.
    """
    _, expert = learner.answering_expert
    weights, trained = expert.weights() or learner.student.backbone.weights(), learner.student
    return {n: w.detach().clone() for n, w in weights.items() if n in trained.ever_selected}


def measure_drift(learner: Learner, baseline: dict[str, Tensor]) -> float:
    """L2 distance of the answering weights from a copy that was made before."""
    weights = copy_answering_weights(learner)
    distances = [float((weights[n] - baseline[n]).norm()) for n in weights if n in baseline]
    return float(sum(distance**2 for distance in distances) ** 0.5)
