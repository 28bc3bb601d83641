"""Propose learning rates with Optuna, from what earlier ones have reached."""

from collections.abc import Callable, Iterator

from dosapp.runtime.extras import missing_extra


def propose_rates(
    low: float, high: float, trials: int, accuracy_of: Callable[[float], float]
) -> Iterator[float]:
    """Yield learning rates by Optuna's tree-structured Parzen estimator, with a fixed seed.

    Args:
        low: The smallest rate.
        high: The largest rate.
        trials: How many to propose.
        accuracy_of: Returns the validation accuracy of a rate that was yielded and tried.

    Yields:
        A rate; its accuracy is asked for when the next one is wanted.

    Raises:
        InputError: The extra 'optuna' is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise missing_extra("a search with Optuna", "optuna", error) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=0)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for _ in range(trials):
        trial = study.ask()
        lr = trial.suggest_float("lr", low, high, log=True)
        yield lr
        study.tell(trial, accuracy_of(lr))
