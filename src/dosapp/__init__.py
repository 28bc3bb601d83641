"""Dual-phase continual learning for vision-language models: the public names.

They are imported when they are used, so that `dosapp --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dosapp.data.base import Dataset, Prompts
    from dosapp.data.registry import load_dataset
    from dosapp.errors import InputError
    from dosapp.experiments.result import Result
    from dosapp.learner.learner import Learner, Prediction
    from dosapp.methods.base import Method
    from dosapp.methods.registry import METHODS
    from dosapp.scenario import Scenario, Session, concat_scenarios, split_dataset
    from dosapp.service.client import Client
    from dosapp.settings import LearnerSettings, RunSettings
    from dosapp.student.selection import Selection
    from dosapp.student.student import Student

from dosapp.errors import InputError

_HOMES = {
    "dosapp.data.registry": ("load_dataset",),
    "dosapp.data.base": ("Dataset", "Prompts"),
    "dosapp.errors": ("InputError",),
    "dosapp.learner.learner": ("Learner", "Prediction"),
    "dosapp.methods.registry": ("METHODS",),
    "dosapp.methods.base": ("Method",),
    "dosapp.experiments.result": ("Result",),
    "dosapp.service.client": ("Client",),
    "dosapp.settings": ("LearnerSettings", "RunSettings"),
    "dosapp.scenario": ("Session", "Scenario", "concat_scenarios", "split_dataset"),
    "dosapp.student.student": ("Selection", "Student"),
}

__all__ = [
    "METHODS",
    "Client",
    "Dataset",
    "InputError",
    "Learner",
    "LearnerSettings",
    "Method",
    "Prediction",
    "Prompts",
    "Result",
    "RunSettings",
    "Scenario",
    "Selection",
    "Session",
    "Student",
    "concat_scenarios",
    "load_dataset",
    "split_dataset",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'dosapp' has no attribute '{name}'")
