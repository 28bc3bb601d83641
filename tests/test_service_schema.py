"""Requests generated from the interface's description: whatever they are, no answer is a 5xx."""

import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

schemathesis = pytest.importorskip("schemathesis")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the generator, about the description
]


@pytest.fixture(scope="module")
def interface(tmp_path_factory):
    from dosapp.drills.served import small_learner
    from dosapp.service.app import build
    from dosapp.service.service import opened
    from dosapp.service.settings import ServiceSettings

    folder = tmp_path_factory.mktemp("schema") / "learner"
    small_learner(folder)
    limits: ServiceSettings = ServiceSettings.checked({"body": 1_000_000, "threads": 1})
    with opened(folder, limits) as service:
        yield schemathesis.openapi.from_asgi("/openapi.json", build(service))
        assert service.ready
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_answer_is_a_5xx(interface, mode) -> None:
    """Requests as described, and requests that break the description."""
    seen = []
    for found in interface.get_all_operations():
        operation = found.ok()
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

        @settings(max_examples=30, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=cases)
        def answered(case) -> None:
            answer = case.call(headers={"Host": "127.0.0.1"})
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]
            seen.append(answer.status_code)

        try:
            answered()
        except Unsatisfiable:
            assert mode == "NEGATIVE"
    assert len(seen) > 100
