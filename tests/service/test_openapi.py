"""Requests generated from the interface's description: whatever they are, no answer is a 5xx."""

import shutil
from collections import Counter

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
    from dosapp.drills.service_process import make_small_learner
    from dosapp.service.http.app import build_app
    from dosapp.service.service import open_service
    from dosapp.service.settings import ServiceSettings
    from dosapp.service.tokens import Tokens

    folder = tmp_path_factory.mktemp("schema") / "learner"
    make_small_learner(folder)
    token = Tokens(folder).add("me", "teach")  # the generator cannot pose as this machine
    limits: ServiceSettings = ServiceSettings.parse({"body": 1_000_000, "threads": 1})
    with open_service(folder, limits) as service:
        yield schemathesis.openapi.from_asgi("/openapi.json", build_app(service)), token
        assert service.ready
    shutil.rmtree(folder)


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
def test_no_answer_is_a_5xx(interface, mode) -> None:
    """Requests as described, and requests that break the description. Nobody is turned away at the
    door, and what is described is also done: else nothing behind the door would have been tried."""
    described, token = interface
    seen: Counter[int] = Counter()
    for found in described.get_all_operations():
        operation = found.ok()
        cases = operation.as_strategy(generation_mode=schemathesis.GenerationMode[mode])

        @settings(max_examples=30, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(case=cases)
        def answered(case) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.json()["error"]
            seen[answer.status_code] += 1

        try:
            answered()
        except Unsatisfiable:
            assert mode == "NEGATIVE"
    assert seen.total() > 100
    assert not {401, 403} & set(seen), seen
    assert seen[200] > 20 or mode == "NEGATIVE", seen
    assert seen[400] + seen[422] > 20, seen
