"""The public names of dosapp: this file is their one list, for type checkers and at run time."""

# isort: skip_file

# Learn, adapt, predict
from dosapp.learner.learner import Learner as Learner
from dosapp.learner.learner import Prediction as Prediction
from dosapp.learner.evaluation import Evaluation as Evaluation
from dosapp.learner.evaluation import SessionResult as SessionResult
from dosapp.settings import LearnerSettings as LearnerSettings
from dosapp.service.client import Client as Client

# Experiments
from dosapp.settings import RunSettings as RunSettings
from dosapp.experiments.plan import plan as plan
from dosapp.experiments.run import run as run
from dosapp.experiments.callbacks import RunCallback as RunCallback
from dosapp.experiments.result import Result as Result
from dosapp.experiments.evaluator import Evaluator as Evaluator

# Data and scenarios
from dosapp.data.registry import load_dataset as load_dataset
from dosapp.data.convert import as_dataset as as_dataset
from dosapp.data.base import Dataset as Dataset
from dosapp.data.base import Split as Split
from dosapp.data.base import Prompts as Prompts
from dosapp.data.preprocess import Preprocess as Preprocess
from dosapp.scenario import Scenario as Scenario
from dosapp.scenario import Task as Task
from dosapp.scenario import Session as Session
from dosapp.scenario import split_dataset as split_dataset
from dosapp.scenario import concat_scenarios as concat_scenarios

# Methods
from dosapp.methods.registry import METHODS as METHODS
from dosapp.methods.registry import build_method as build_method
from dosapp.methods.base import Method as Method
from dosapp.methods.base import method_dataclass as method_dataclass
from dosapp.methods.base import Batch as Batch
from dosapp.methods.base import Batches as Batches
from dosapp.methods.base import AdaptResult as AdaptResult
from dosapp.methods.base import TrainingStage as TrainingStage
from dosapp.methods.staged import Stage as Stage
from dosapp.student.student import Student as Student
from dosapp.student.trainable_weights import Selection as Selection

# Backbones
from dosapp.backbones.registry import load_backbone as load_backbone
from dosapp.backbones.base import Backbone as Backbone
from dosapp.backbones.base import Expert as Expert
from dosapp.backbones.wrappers import BackboneWrapper as BackboneWrapper

# Errors
from dosapp.errors import DosappError as DosappError
from dosapp.errors import InputError as InputError
from dosapp.errors import CorruptRecordError as CorruptRecordError
from dosapp.errors import StorageError as StorageError
from dosapp.errors import DivergedError as DivergedError
from dosapp.errors import BusyError as BusyError
from dosapp.errors import ReadOnlyError as ReadOnlyError

__version__: str
PUBLIC: dict[str, str]
