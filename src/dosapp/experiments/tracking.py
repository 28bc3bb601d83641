"""Where the numbers of a run go while it goes on: always to JSON lines, and to whoever asks.

A tracker is two functions. Adding one is a function that opens it and a line in `TRACKERS`.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dosapp.errors import InputError, unknown_name
from dosapp.experiments.run import RunCallback
from dosapp.settings import RunSettings


class Tracker(Protocol):
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Some numbers by name, at a step that counts on when a run is resumed."""

    def close(self) -> None: ...


class JsonLinesTracker:
    """`log.jsonl` in the run's folder; a resumed run goes on writing to it."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.jsonl"
        known = path.read_text() if path.exists() else ""
        self.last: int = max((one["step"] for one in _whole(known)), default=0)
        self.file = path.open("a")
        if known and not known.endswith("\n"):  # torn by a kill: what comes now is not part of it
            self.file.write("\n")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _whole(lines: str) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        with suppress(ValueError):
            yield json.loads(line)


class TensorBoard:
    def __init__(self, folder: Path, settings: RunSettings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, settings: RunSettings) -> None:
        import wandb

        config = settings.model_dump(mode="json")
        self.run = wandb.init(project="dosapp", dir=str(folder), config=config)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    def __init__(self, folder: Path, settings: RunSettings) -> None:
        import mlflow

        self.api = mlflow
        mlflow.set_experiment("dosapp")
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(settings.model_dump(mode="json"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.api.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self.api.end_run()


TRACKERS: Mapping[str, Callable[[Path, RunSettings], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


PACKAGES = frozenset(TRACKERS)  # each named like the package it needs, and like our extra


class TrackingCallback(RunCallback):
    """Tells somebody who looks on what it sees, and the trackers too; they open when it begins."""

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        names: Sequence[str] = (),
        other: RunCallback | None = None,
    ) -> None:
        for name in names:
            if name not in TRACKERS:
                raise unknown_name("tracker", name, TRACKERS)
            if name in PACKAGES and find_spec(name) is None:
                raise InputError(f"tracking with {name} needs it: pip install 'dosapp[{name}]'")
        self.folder, self.settings, self.names = folder, settings, names
        self.trackers: list[Tracker] = []
        self.other, self.step = other or RunCallback(), 0

    def on_begin(self, label: str, sessions: int) -> None:
        lines = JsonLinesTracker(self.folder, self.settings)
        self.step = lines.last  # a resumed run counts on; it may repeat steps since its checkpoint
        self.trackers = [lines, *(TRACKERS[n](self.folder, self.settings) for n in self.names)]
        self.other.on_begin(label, sessions)

    def _log(self, **values: float) -> None:
        for tracker in self.trackers:
            tracker.log(values, self.step)

    def on_training_step(self, session: int, step: int, of: int, loss: float) -> None:
        self.step += 1
        self._log(session=session + 1, loss=loss)
        self.other.on_training_step(session, step, of, loss)

    def on_stream_step(self, session: int, step: int, of: int) -> None:
        self.step += 1
        self._log(session=session + 1, stream_step=step)
        self.other.on_stream_step(session, step, of)

    def on_evaluation(self, session: int, row: list[float]) -> None:
        self._log(session=session + 1, accuracy=sum(row) / len(row))
        self.other.on_evaluation(session, row)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
