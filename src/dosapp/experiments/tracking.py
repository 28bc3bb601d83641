"""Trackers: log the numbers of a run while it is computed.

Every run writes `log.jsonl`. Another tracker is a class with `log` and `close` and a line in
`TRACKERS`.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dosapp.errors import InputError, unknown_name
from dosapp.experiments.callbacks import Phase, RunCallback
from dosapp.methods.registry import build_method
from dosapp.runtime.extras import missing_extra
from dosapp.settings import RunSettings


class Tracker(Protocol):
    """Logs numbers by name."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values at a step; the count of steps continues when a run is resumed."""

    def close(self) -> None:
        """Finish: no value follows."""


class JsonLinesTracker:
    """`log.jsonl` in the run's folder; a resumed run appends to it."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.jsonl"
        lines = path.read_text() if path.exists() else ""
        self.last_step: int = max((entry["step"] for entry in _parse_lines(lines)), default=0)
        self.file = path.open("a")
        if lines and not lines.endswith("\n"):  # cut off when a process was killed
            self.file.write("\n")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a line."""
        self.file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _parse_lines(lines: str) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        with suppress(ValueError):
            yield json.loads(line)


class TensorBoard:
    """Scalars and hyper-parameters in `tensorboard/` of the run's folder."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.hyperparameters = list_hyperparameters(settings)
        self.final: dict[str, float] = {}  # the last values of the metrics

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
            if name in ("accuracy", "forgetting"):
                self.final[f"final/{name}"] = value

    def close(self) -> None:
        """Write the row of the table of hyper-parameters, and close the writer."""
        if self.final:
            self.writer.add_hparams(self.hyperparameters, self.final, run_name=".")
        self.writer.close()


class WeightsAndBiases:
    """A run in the project `dosapp` of Weights & Biases."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        import wandb

        config = list_hyperparameters(settings)
        self.run = wandb.init(project="dosapp", dir=str(folder), config=config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class MLflow:
    """A run in the experiment `dosapp` of MLflow."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        import mlflow

        self.api = mlflow
        mlflow.set_experiment("dosapp")
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(list_hyperparameters(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of a step."""
        self.api.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self.api.end_run()


TRACKERS: Mapping[str, Callable[[Path, RunSettings], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}
PACKAGES = frozenset(TRACKERS)  # each has the name of its package and of our extra


def parse_trackers(values: Iterable[str]) -> list[str]:
    """Read names of trackers as open_clip and transformers write them.

    Args:
        values: Names, or several with commas; `all` for those that are installed, `none` for none.

    Returns:
        Each tracker once.

    Raises:
        InputError: A tracker is unknown or its package is not installed.

    Example:
        >>> parse_trackers(["tensorboard,wandb", "none"])
        ['tensorboard', 'wandb']
    """
    names: list[str] = []
    for name in (part.strip() for value in values for part in value.split(",")):
        installed = [known for known in TRACKERS if find_spec(known) is not None]
        names += {"all": installed, "none": []}.get(name, [name])
    check_trackers(names)
    return list(dict.fromkeys(names))


def check_trackers(names: Iterable[str]) -> None:
    """Raise an `InputError` if a tracker is unknown or its package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise unknown_name("tracker", name, [*TRACKERS, "all", "none"])
        if name in PACKAGES and find_spec(name) is None:
            raise missing_extra(f"tracking with {name}", name)


def list_hyperparameters(settings: RunSettings) -> dict[str, str | float | bool]:
    """All settings of a run by name, with those of its method, as text, numbers or switches.

    Example:
        >>> values = list_hyperparameters(RunSettings(method="spu", options={"sparsity": 0.3}))
        >>> values["method"], values["options.sparsity"], values["adapt"]
        ('spu', 0.3, '')
    """
    values = settings.model_dump(mode="json", exclude={"options"})
    method = build_method(settings.method, settings.adapt, settings.options, settings.stages)
    values |= {f"options.{name}": value for name, value in method.hyperparameters().items()}
    return {
        name: value if isinstance(value, str | float | int) else "" if value is None else str(value)
        for name, value in values.items()
    }


class TrackingCallback(RunCallback):
    """Passes the numbers of a run to trackers and to another callback.

    Args:
        folder: The run's folder.
        settings: The run.
        names: Trackers beside `log.jsonl`; all are opened when the run begins.
        other: A callback that is called, too.

    Raises:
        InputError: A tracker is unknown, its package is not installed, or it cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        names: Sequence[str] = (),
        other: RunCallback | None = None,
    ) -> None:
        check_trackers(names)
        self.folder, self.settings, self.names = folder, settings, names
        self.trackers: list[Tracker] = []
        self.other, self.step = other or RunCallback(), 0

    def on_begin(self, label: str, sessions: int) -> None:
        """Open the trackers."""
        lines = JsonLinesTracker(self.folder, self.settings)
        self.step = lines.last_step  # a resumed run may repeat steps since its checkpoint
        self.trackers = [lines]
        for name in self.names:  # one by one: if one cannot be opened, the others are closed
            try:
                self.trackers.append(TRACKERS[name](self.folder, self.settings))
            except Exception as error:  # each package has errors of its own: no login, no server
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise InputError(
                    f"the tracker '{name}' cannot be opened ({reason}), so the run has not begun; "
                    "try again with --resume, with or without it"
                ) from error
        self.other.on_begin(label, sessions)

    def _log(self, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(values, self.step)

    def on_resume(self, session: int, phase: Phase, step: int) -> None:
        """Pass it on."""
        self.other.on_resume(session, phase, step)

    def on_training_step(self, session: int, step: int, total: int, loss: float) -> None:
        """Log the loss."""
        self.step += 1
        self._log({"session": session + 1, "loss": loss})
        self.other.on_training_step(session, step, total, loss)

    def on_stream_step(self, session: int, step: int, total: int) -> None:
        """Log the position in the stream."""
        self.step += 1
        self._log({"session": session + 1, "stream_step": step})
        self.other.on_stream_step(session, step, total)

    def on_evaluation(self, session: int, accuracies: list[float]) -> None:
        """Pass it on; `on_metrics` logs the numbers."""
        self.other.on_evaluation(session, accuracies)

    def on_metrics(self, session: int, metrics: Mapping[str, float]) -> None:
        """Log accuracy, overall and by task, and forgetting."""
        self._log({"session": session + 1, **metrics})
        self.other.on_metrics(session, metrics)

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self.trackers:
            tracker.close()
