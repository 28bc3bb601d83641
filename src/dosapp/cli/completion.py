"""Names that the shell completes: methods, datasets, backbones, tables (`--install-completion`)."""

from collections.abc import Callable, Iterable

Completion = Callable[[str], list[str]]


def _starting_with(list_names: Callable[[], Iterable[str]]) -> Completion:
    """The function that typer calls with what is typed so far."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in list_names() if name.startswith(incomplete)]

    return complete


def _methods() -> Iterable[str]:
    from dosapp.methods.registry import METHODS

    return METHODS


def _datasets() -> Iterable[str]:
    from dosapp.data.paper_sets.datasets import PAPER_DATASETS
    from dosapp.data.registry import SYNTHETIC

    return [*SYNTHETIC, *PAPER_DATASETS]


def _backbones() -> Iterable[str]:
    from dosapp.backbones.names import HUB_IDS

    return ["tiny", *HUB_IDS]


def _tables() -> Iterable[str]:
    from dosapp.paper.reproduce import load_tables

    return [*load_tables(), "all"]


def _trackers() -> Iterable[str]:
    from dosapp.experiments.tracking import TRACKERS

    return [*TRACKERS, "all", "none"]


complete_method, complete_table = _starting_with(_methods), _starting_with(_tables)
complete_tracker = _starting_with(_trackers)
COMPLETIONS = {  # by the name of a setting
    "method": complete_method,
    "adapt": complete_method,
    "data": _starting_with(_datasets),
    "backbone": _starting_with(_backbones),
    "device": _starting_with(lambda: ["auto", "cpu", "cuda", "mps"]),
}
