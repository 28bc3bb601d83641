from collections.abc import Callable

import pytest

from dosapp.settings import Settings
from support.cli import dosapp


class CapturedError(Exception):
    """The settings that a command would use."""


@pytest.fixture
def settings_of(monkeypatch) -> Callable[..., Settings]:
    """Parse a command line up to the point where its settings are used, and return them."""

    def capture(*values: object, **named: object) -> None:
        raise CapturedError(next(v for v in (*values, *named.values()) if isinstance(v, Settings)))

    monkeypatch.setattr("dosapp.experiments.plan.plan", capture)
    monkeypatch.setattr("dosapp.learner.learner.Learner", capture)
    monkeypatch.setattr("dosapp.service.server.serve", capture)

    def parse(command: str, *flags: object) -> Settings:
        with pytest.raises(CapturedError) as captured:
            dosapp(command, *flags)
        settings: Settings = captured.value.args[0]
        return settings

    return parse
