"""Methods by name. To add one: a file and a line here, an entry point of another package, or
`module:Class` on the command line."""

import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from dosapp.errors import InputError, unknown_name
from dosapp.methods.alignment import ClassifierAlignment
from dosapp.methods.base import Method, check_declaration
from dosapp.methods.cofima import CoFiMA
from dosapp.methods.cotta import CoTTA
from dosapp.methods.dosapp import DoSAPP
from dosapp.methods.dss import DSS
from dosapp.methods.dualprompt import DualPrompt
from dosapp.methods.eata import EATA
from dosapp.methods.ecotta import EcoTTA
from dosapp.methods.flyp import FLYP, Joint
from dosapp.methods.l2p import L2P
from dosapp.methods.lora import LoRA
from dosapp.methods.lwf import LwF
from dosapp.methods.magmax import MagMax
from dosapp.methods.mas import MAS
from dosapp.methods.note import NOTE
from dosapp.methods.oga import OGA
from dosapp.methods.prd import PRD
from dosapp.methods.psmt import PSMT
from dosapp.methods.rmt import RMT
from dosapp.methods.self_training import SelfTraining
from dosapp.methods.slca import SLCA
from dosapp.methods.sparcl import SparCL
from dosapp.methods.spu import SPU, ReleasedSPU
from dosapp.methods.staged import Stage
from dosapp.methods.stream_gda import StreamGDA
from dosapp.methods.stream_gda_ensemble import StreamGDAEnsemble
from dosapp.methods.tda import TDA
from dosapp.methods.tent import Tent
from dosapp.methods.zero_shot import ZeroShot
from dosapp.methods.zscl import ZSCL

METHODS: dict[str, type[Method]] = {
    "zero-shot": ZeroShot,
    "flyp": FLYP,
    "lwf": LwF,
    "prd": PRD,
    "mas": MAS,
    "zscl": ZSCL,
    "lora": LoRA,
    "l2p": L2P,
    "dualprompt": DualPrompt,
    "slca": SLCA,
    "sparcl": SparCL,
    "spu": SPU,
    "spu-released": ReleasedSPU,
    "dosapp": DoSAPP,
    "stream-gda": StreamGDA,
    "stream-gda-ensemble": StreamGDAEnsemble,
    "joint": Joint,
    "self-training": SelfTraining,
    "tent": Tent,
    "eata": EATA,
    "note": NOTE,
    "ecotta": EcoTTA,
    "cotta": CoTTA,
    "rmt": RMT,
    "psmt": PSMT,
    "dss-style": DSS,
    "tda": TDA,
    "oga": OGA,
}
STAGES: dict[str, type[Stage]] = {  # after the epochs of any labelled method, in this order
    "magmax": MagMax,
    "cofima": CoFiMA,
    "alignment": ClassifierAlignment,
}
for entry in entry_points(group="dosapp.methods"):  # methods of other packages
    try:
        METHODS.setdefault(entry.name, entry.load())
    except Exception as error:  # a broken package must not break the others
        warnings.warn(f"method '{entry.name}' is left out: {error}", stacklevel=2)


def import_methods(*names: str | None) -> None:
    """Import those names that are written `module:Class`, from the current folder too, and
    register the classes under them.

    Only settings that the user gives are imported. `get_method` imports nothing, because the names
    in a learner's folder or in a result come with the file.

    Raises:
        InputError: The module cannot be imported, or the class is missing or no method.
    """
    for name in names:
        if name is None or ":" not in name or name in METHODS:
            continue
        module_name, _, class_name = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last: a file there must not replace a package
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise InputError(
                f"the method '{name}' cannot be imported ({type(error).__name__}: {error}); give "
                "module:Class, of a module in this folder or installed"
            ) from error
        if not hasattr(module, class_name):
            own = [key for key, value in vars(module).items() if isinstance(value, type)]
            raise unknown_name("class", class_name, own)
        check_declaration(getattr(module, class_name))
        METHODS[name] = getattr(module, class_name)


def get_method(name: str) -> type[Method]:
    """Look a method up by name."""
    if name in STAGES:
        flag = "--align" if name == "alignment" else f"--merging {name}"
        raise InputError(
            f"'{name}' is a stage after a labelled method's epochs; try --method flyp {flag}"
        )
    if ":" in name and name not in METHODS:
        raise InputError(
            f"the method '{name}' is not registered, and only settings of a run import a class; "
            f"set METHODS['{name}'] in Python, or give its package an entry point"
        )
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, "dosapp methods")
    return METHODS[name]


def build_method(
    method: str,
    adapt: str | None = None,
    options: Mapping[str, Any] | None = None,
    stages: Sequence[str] = (),
) -> Method:
    """Construct a method, or a pair of methods, with its hyper-parameters.

    Args:
        method: Name of the method of the labelled phase.
        adapt: Name of the method of the unlabelled phase, if another.
        options: Hyper-parameters by their full or last name, today's or version 0.1's. In a pair a
            name that both halves know goes to both, `labelled.NAME` or `unlabelled.NAME` to one.
        stages: Names of `STAGES` that follow the labelled method's epochs.

    Returns:
        The method; a `TwoPhase` if `adapt` is given.

    Raises:
        InputError: A name is unknown, a value is not allowed, or the methods cannot be combined.

    Example:
        >>> build_method("spu", "self-training", {"sparsity": 0.3}).hyperparameters()[
        ...     "labelled.sparsity"
        ... ]
        0.3
    """
    for name in filter(None, (method, adapt)):
        get_method(name)  # raises if it is unknown
    halves = _list_parts(method, adapt, stages)
    if adapt and halves["unlabelled"].phase not in ("unlabelled", "both"):
        usable = [n for n, cls in METHODS.items() if cls.phase in ("unlabelled", "both")]
        raise InputError(
            f"'{adapt}' cannot adapt without labels; --adapt takes {', '.join(usable)}"
        )
    if halves["labelled"].phase == "unlabelled":
        raise InputError(
            f"'{method}' needs a labelled method before it; try --method spu --adapt {method}"
        )
    chosen: dict[str, dict[str, Any]] = {half: {} for half in halves}
    for name, value in (options or {}).items():
        matches = [
            (half, path)
            for half, cls in halves.items()
            for path, spellings in _spellings(cls).items()
            if any(f".{half}.{spelling}".endswith(f".{name}") for spelling in spellings)
        ]
        if not matches:
            known = [path.rpartition(".")[2] for cls in halves.values() for path in _spellings(cls)]
            raise unknown_name("setting", name, known, f"dosapp methods {method}")
        for half, path in matches:
            if path in chosen[half]:
                raise InputError(f"{path} is given twice, also under another name; give it once")
            chosen[half][path] = value
    built = {half: _construct(cls, chosen[half]) for half, cls in halves.items()}
    labelled = built["labelled"]
    for name in stages:
        stage = built[STAGES[name].role]
        assert isinstance(stage, Stage)
        labelled = labelled.with_stage(stage)
    return labelled.then(built["unlabelled"]) if adapt else labelled


def _list_parts(method: str, adapt: str | None, stages: Sequence[str]) -> dict[str, type[Method]]:
    """The classes that a method is built of, by the prefix of their hyper-parameters."""
    names = {"labelled": METHODS.get(method), "unlabelled": METHODS.get(adapt or "")}
    parts = {half: cls for half, cls in names.items() if cls is not None}
    return parts | {STAGES[name].role: STAGES[name] for name in stages}


def rename_options(
    method: str, adapt: str | None, options: Mapping[str, Any], stages: Sequence[str] = ()
) -> dict[str, Any]:
    """Replace hyper-parameter names and values of version 0.1 by today's; unknown ones stay.

    Example:
        >>> rename_options("dosapp", None, {"labels": "surer", "gamma": 0.9})
        {'pseudo_labels': 'max-logit', 'gamma': 0.9}
    """
    halves = _list_parts(method, adapt, stages)
    renamed: dict[str, Any] = {}
    for name, value in options.items():
        depth = name.count(".") + 1
        matches = {
            ".".join(f"{half}.{path}".split(".")[-depth:]): _today(
                cls, path.rpartition(".")[2], value
            )
            for half, cls in halves.items()
            for path, spellings in _spellings(cls).items()
            if any(f".{half}.{spelling}".endswith(f".{name}") for spelling in spellings)
        }
        renamed |= matches or {name: value}
    return renamed


def drop_default_options(
    method: str, adapt: str | None, options: Mapping[str, Any], stages: Sequence[str] = ()
) -> dict[str, Any]:
    """Leave out the options that equal their defaults; those of unknown methods stay.

    Example:
        >>> drop_default_options("spu", None, {"sparsity": 0.1, "scope": "global"})
        {'scope': 'global'}
    """
    if method not in METHODS or (adapt and adapt not in METHODS):
        return dict(options)
    defaults = build_method(method, adapt, stages=stages).hyperparameters()
    return {
        name: value
        for name, value in options.items()
        if not all(v == value for path, v in defaults.items() if f".{path}".endswith(f".{name}"))
    }


def _spellings(cls: type[Method]) -> dict[str, tuple[str, str]]:
    """Each hyper-parameter's path → the same, and its path in version 0.1."""
    default = cls()
    paths = zip(default.hyperparameters(), default.key_hyperparameters(), strict=True)
    return {path: (path, old) for path, old in paths}


def _construct(cls: type[Method], chosen: Mapping[str, Any]) -> Method:
    """The method with the chosen hyper-parameters and defaults for the others."""
    nested: dict[str, Any] = {}
    for path, value in {**cls().hyperparameters(), **chosen}.items():
        *outer, last = path.split(".")
        inner = nested
        for name in outer:
            inner = inner.setdefault(name, {})
        inner[last] = _today(cls, last, value)
    try:
        return cls(**nested)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if not name:  # values that do not go together
            raise InputError(str(first["msg"]).removeprefix("Value error, ")) from error
        # As the user writes it: `--set sparsity=3`, not `selection.sparsity`
        name = name.rpartition(".")[2]
        raise InputError(f"{name} is {first['input']!r}: {first['msg'].lower()}") from error


def _today(cls: type[Method], name: str, value: Any) -> Any:
    """A value that version 0.1 spelled otherwise, as it is spelled today."""
    spelled = {old: new for new, old in cls.old_values.get(name, {}).items()}
    return spelled.get(value, value) if isinstance(value, str) else value
