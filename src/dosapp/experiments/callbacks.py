"""What a run calls while it is computed."""

from collections.abc import Mapping
from typing import Literal

Phase = Literal["learn", "adapt"]  # the labelled and the unlabelled phase of a session


class RunCallback:
    """Called while a run goes on; every default does nothing.

    Sessions count from 0, steps from 1; `total` is the number of steps of a session's phase.

    Example:
        >>> class PrintAccuracies(RunCallback):
        ...     def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        ...         print(f"session {session}: {accuracies}")
        >>> PrintAccuracies().on_evaluation(0, [97.5])
        session 0: [97.5]
    """

    def on_begin(self, label: str, sessions: int) -> None:
        """The run starts or continues."""

    def on_resume(self, session: int, phase: Phase, step: int) -> None:
        """A stored run continues after this step of a session's phase."""

    def on_training_step(self, session: int, step: int, total: int, loss: float) -> None:
        """A labelled step was taken."""

    def on_stream_step(self, session: int, step: int, total: int) -> None:
        """A batch of the stream was processed."""

    def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        """A session is over.

        Args:
            session: The session.
            accuracies: In per cent, on each task seen so far.
        """

    def on_metrics(self, session: int, metrics: Mapping[str, float]) -> None:
        """The same as metrics by name: `accuracy`, `task_accuracy/01`, …, `forgetting`."""
