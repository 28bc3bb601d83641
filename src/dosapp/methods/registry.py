"""Every method by name. Adding one is a file and a line here, or an entry point of any package."""

import warnings
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from pydantic import ValidationError

from dosapp.errors import InputError, unknown_name
from dosapp.methods.base import Method
from dosapp.methods.cotta import CoTTA
from dosapp.methods.distilled import PRD, LwF
from dosapp.methods.dosapp import DoSAPP
from dosapp.methods.dss import DSS
from dosapp.methods.eata import EATA
from dosapp.methods.ecotta import EcoTTA
from dosapp.methods.flyp import FLYP, Joint
from dosapp.methods.mas import MAS
from dosapp.methods.note import NOTE
from dosapp.methods.prompts import L2P, DualPrompt
from dosapp.methods.psmt import PSMT
from dosapp.methods.rmt import RMT
from dosapp.methods.self_training import SelfTraining
from dosapp.methods.slca import SLCA
from dosapp.methods.sparcl import SparCL
from dosapp.methods.spu import SPU, ReleasedSPU
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
    "l2p": L2P,
    "dualprompt": DualPrompt,
    "slca": SLCA,
    "sparcl": SparCL,
    "spu": SPU,
    "spu-released": ReleasedSPU,
    "dosapp": DoSAPP,
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
}
for entry in entry_points(group="dosapp.methods"):  # of other packages; ours keep their names
    try:
        METHODS.setdefault(entry.name, entry.load())
    except Exception as error:  # theirs, whatever it is: everybody else can still be used
        warnings.warn(f"method '{entry.name}' is left out: {error}", stacklevel=2)


def get_method(name: str) -> type[Method]:
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, "dosapp methods")
    return METHODS[name]


def build_method(
    method: str, adapt: str | None = None, options: Mapping[str, Any] | None = None
) -> Method:
    """A method, or a pair, with its options by full or last name (`sparsity=0.3`).

    In a pair a name that both halves know goes to both, `labelled.pull` or `unlabelled.pull` to
    one.
    """
    kinds = {"labelled": get_method(method)} | ({"unlabelled": get_method(adapt)} if adapt else {})
    if adapt and get_method(adapt).phase not in ("unlabelled", "both"):
        usable = [n for n, kind in METHODS.items() if kind.phase in ("unlabelled", "both")]
        raise InputError(
            f"'{adapt}' cannot adapt without labels; --adapt takes {', '.join(usable)}"
        )
    if get_method(method).phase == "unlabelled":
        raise InputError(f"'{method}' needs a learner before it; try --method spu --adapt {method}")
    chosen: dict[str, dict[str, Any]] = {half: {} for half in kinds}
    for name, value in (options or {}).items():
        places = [
            (half, path)
            for half, kind in kinds.items()
            for path in kind().hyperparameters()
            if f".{half}.{path}".endswith(f".{name}")
        ]
        if not places:
            known = [
                p.rpartition(".")[2] for kind in kinds.values() for p in kind().hyperparameters()
            ]
            raise unknown_name("setting", name, known, f"dosapp methods {method}")
        for half, path in places:
            chosen[half][path] = value
    made = [_make(kind, chosen[half]) for half, kind in kinds.items()]
    return made[0].then(made[1]) if adapt else made[0]


def _make(kind: type[Method], chosen: Mapping[str, Any]) -> Method:
    """The method with these settings instead of its own; parts keep their other settings."""
    nested: dict[str, Any] = {}
    for path, value in {**kind().hyperparameters(), **chosen}.items():
        inner = nested
        *outer, last = path.split(".")
        for step in outer:
            inner = inner.setdefault(step, {})
        inner[last] = value
    try:
        return kind(**nested)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if not name:  # settings that do not go together
            raise InputError(str(first["msg"]).removeprefix("Value error, ")) from error
        raise InputError(f"{name} is {first['input']!r}: {first['msg'].lower()}") from error
