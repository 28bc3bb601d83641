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
        """The run starts or continues.

        Args:
            label: How tables call the run.
            sessions: How many it has.
        """

    def on_resume(self, session: int, phase: Phase, step: int) -> None:
        """A stored run continues.

        Args:
            session: The session, from 0.
            phase: Its phase, `learn` or `adapt`.
            step: Steps of the phase that were taken before.
        """

    def on_training_step(self, session: int, step: int, total: int, loss: float) -> None:
        """A labelled step was taken.

        Args:
            session: The session, from 0.
            step: The step, from 1.
            total: Steps of the session.
            loss: Of the step.
        """

    def on_stream_step(self, session: int, step: int, total: int) -> None:
        """A batch of the stream was processed.

        Args:
            session: The session, from 0.
            step: The batch, from 1.
            total: Batches of the session's stream.
        """

    def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        """A session is over.

        Args:
            session: The session.
            accuracies: In per cent, on each task seen so far.
        """

    def on_metrics(self, session: int, metrics: Mapping[str, float]) -> None:
        """The same as metrics by name.

        Args:
            session: The session, from 0.
            metrics: `accuracy`, `task_accuracy/01`, …, `forgetting`.
        """
