"""Results that were never computed, for tables and ledgers."""

from dosapp.experiments.result import Result


def make_result(
    label: str, seed: int, accuracy: float, forgetting: float | None, **settings: object
) -> Result:
    """A result with these metrics."""
    metrics = dict.fromkeys(("first_task_accuracy", "current_task_accuracy"), 50.0)
    empty = {"lessons": [], "stream": [0.5]}
    return Result(
        key=f"{label}{seed}{settings}",
        settings={"seed": seed, "method": label, "lr": 0.1, "options": {}, **settings},
        label=label,
        evaluated="student",
        metrics=metrics | {"accuracy": accuracy, "forgetting": forgetting, "control_kept": 1.0},
        definitions={},
        R=[[accuracy]],
        matrices={},
        forgetting_matrix=[[None]],
        previous_tasks={"before": [1.0], "after": [1.0]},
        per_class={},
        tasks=[],
        stream={"name": "pets", "boundaries": []},
        pseudo_labels=[80.0, None],
        disagreement=[2.0, None],
        distance=empty,
        steps={},
        seconds={},
        backbone={},
        weights="",
        libraries={},
        machine="",
        finished="",
    )
