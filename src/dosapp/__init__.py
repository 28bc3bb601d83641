"""Dual-phase continual learning for vision-language models.

The public names are listed in `PUBLIC`; they are imported when they are first used, so that
`dosapp --help` does not import torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dosapp.backbones.base import Backbone, Expert
    from dosapp.backbones.registry import load_backbone
    from dosapp.backbones.wrappers import BackboneWrapper
    from dosapp.data.base import Dataset, Prompts, Split
    from dosapp.data.preprocess import Preprocess
    from dosapp.data.registry import load_dataset
    from dosapp.errors import (
        BusyError,
        CorruptRecordError,
        DivergedError,
        DosappError,
        InputError,
        ReadOnlyError,
        StorageError,
    )
    from dosapp.experiments.evaluator import Evaluator
    from dosapp.experiments.plan import plan
    from dosapp.experiments.result import Result
    from dosapp.experiments.run import RunCallback, run
    from dosapp.learner.learner import Learner, Prediction
    from dosapp.methods.base import (
        AdaptResult,
        Batch,
        Batches,
        Method,
        TrainingStage,
        method_dataclass,
    )
    from dosapp.methods.registry import METHODS, build_method
    from dosapp.scenario import Scenario, Session, Task, concat_scenarios, split_dataset
    from dosapp.service.client import Client
    from dosapp.settings import LearnerSettings, RunSettings
    from dosapp.student.selection import Selection
    from dosapp.student.student import Student

# Public name → the module that defines it.
PUBLIC = {
    # learn, adapt, predict
    "Learner": "dosapp.learner.learner",
    "Prediction": "dosapp.learner.learner",
    "LearnerSettings": "dosapp.settings",
    "Client": "dosapp.service.client",
    # experiments
    "RunSettings": "dosapp.settings",
    "plan": "dosapp.experiments.plan",
    "run": "dosapp.experiments.run",
    "RunCallback": "dosapp.experiments.run",
    "Result": "dosapp.experiments.result",
    "Evaluator": "dosapp.experiments.evaluator",
    # data and scenarios
    "load_dataset": "dosapp.data.registry",
    "Dataset": "dosapp.data.base",
    "Split": "dosapp.data.base",
    "Prompts": "dosapp.data.base",
    "Preprocess": "dosapp.data.preprocess",
    "Scenario": "dosapp.scenario",
    "Task": "dosapp.scenario",
    "Session": "dosapp.scenario",
    "split_dataset": "dosapp.scenario",
    "concat_scenarios": "dosapp.scenario",
    # methods
    "METHODS": "dosapp.methods.registry",
    "build_method": "dosapp.methods.registry",
    "Method": "dosapp.methods.base",
    "method_dataclass": "dosapp.methods.base",
    "Batch": "dosapp.methods.base",
    "Batches": "dosapp.methods.base",
    "AdaptResult": "dosapp.methods.base",
    "TrainingStage": "dosapp.methods.base",
    "Student": "dosapp.student.student",
    "Selection": "dosapp.student.selection",
    # backbones
    "load_backbone": "dosapp.backbones.registry",
    "Backbone": "dosapp.backbones.base",
    "Expert": "dosapp.backbones.base",
    "BackboneWrapper": "dosapp.backbones.wrappers",
    # errors
    "DosappError": "dosapp.errors",
    "InputError": "dosapp.errors",
    "CorruptRecordError": "dosapp.errors",
    "StorageError": "dosapp.errors",
    "DivergedError": "dosapp.errors",
    "BusyError": "dosapp.errors",
    "ReadOnlyError": "dosapp.errors",
}

__version__ = version("dosapp")
__all__ = ["__version__", *PUBLIC]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'dosapp' has no attribute '{name}'")
    return getattr(import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
