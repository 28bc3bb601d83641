"""Corrections, options of a session, and a canary that the service keeps itself."""

import base64
import json

import pytest
import torch

from dosapp.learner.canary import CanaryGaps
from dosapp.learner.learner import Learner
from dosapp.service.guards import Guard
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from dosapp.drills.service_process import encode_test_images, zip_session
from dosapp.service.http.app import build_app
from support.services import save_trained_learner

pytestmark = pytest.mark.filterwarnings("ignore:the session has")


@pytest.fixture
def scenario(loaded_tiny, tmp_path):
    return save_trained_learner(loaded_tiny, tmp_path / "learner")


@pytest.fixture
def images(scenario) -> list[str]:
    return [base64.b64encode(data).decode() for data in encode_test_images(scenario)[:3]]


def run(tmp_path, **changes: object):
    settings = ServiceSettings.parse({"threads": 1, "token": False, **changes})
    return open_service(tmp_path / "learner", settings)


def connect(service) -> TestClient:
    return TestClient(build_app(service), "http://127.0.0.1", client=("127.0.0.1", 1))


def learn(client: TestClient, service, query: str = "", archive: bytes | None = None) -> dict:
    files = {"files": {"archive": archive}} if archive else {"json": {}}
    job = client.post(f"/learn{query}", **files).json()
    service.job(job["id"]).ended.wait(60)
    return client.get(f"/jobs/{job['id']}").json()


class TestCorrections:
    def test_a_typo_makes_no_class(self, tmp_path, images) -> None:
        with run(tmp_path) as service, connect(service) as client:
            known = service.classes[0]
            body = {"image": images[0], "label": known[:-1]}
            answer = client.post("/correct", json=body)
            assert answer.status_code == 400
            assert answer.json()["error"] == (
                f"there is no class '{known[:-1]}'; did you mean '{known}'? Otherwise confirm a "
                "new class with new_class=true (on the command line --new-class)"
            )
            assert client.get("/status").json()["corrections"] == 0
            confirmed = client.post("/correct", json={**body, "new_class": True})
            assert confirmed.json() == {"waiting": 1}
            again = client.post("/correct", json={**body, "image": images[1]})
            assert again.json() == {"waiting": 2}  # confirmed already

    def test_the_last_correction_of_an_image_counts(self, tmp_path, images) -> None:
        with run(tmp_path) as service, connect(service) as client:
            first, second, _ = service.classes
            for label in (first, second):
                answer = client.post("/correct", json={"image": images[0], "label": label})
                assert answer.json() == {"waiting": 1}
            job = learn(client, service)
        assert (job["state"], job["classes"], job["images"]) == ("done", [second], 1)

    def test_a_rollback_drops_corrections_of_classes_it_does_not_know(
        self, tmp_path, scenario, images
    ) -> None:
        with run(tmp_path) as service, connect(service) as client:
            assert learn(client, service, "", zip_session(scenario, 1, [0], 8))["version"] == 2
            for image, label in zip(images, service.classes[2:4], strict=False):
                client.post("/correct", json={"image": image, "label": label})
            answer = client.post("/rollback", json={"version": 1}).json()
            assert answer == {
                "version": 3,
                "note": "corrections: 1 of classes that this version does not know were dropped, "
                "1 wait for the next session",
            }
            assert learn(client, service)["state"] == "done"
            assert len(service.classes) == 3


class TestOptions:
    def test_epochs_of_one_session(self, tmp_path, scenario) -> None:
        archive = zip_session(scenario, 1, [0, 1], 8)
        with run(tmp_path) as service, connect(service) as client:
            usual = learn(client, service, "?epochs=1", archive)["of"]
            assert learn(client, service, "?epochs=3&lr=1e-5", archive)["of"] == 3 * usual
            wrong = client.post("/learn?epochs=0", files={"archive": archive})
        assert wrong.status_code == 422

    def test_a_smaller_rate_changes_less(self, tmp_path, scenario) -> None:
        archive, changes = zip_session(scenario, 1, [0, 1], 8), []
        with run(tmp_path) as service, connect(service) as client:
            for rate in (1e-6, 1e-3):
                before = service.writer.learner.state().clone().tensors
                learn(client, service, f"?lr={rate}", archive)
                after = service.writer.learner.state().tensors
                students = [n for n in before if n.startswith("student/")]
                changes.append(max((after[n] - before[n]).abs().max() for n in students))
        assert changes[0] < changes[1] / 10


class TestCanary:
    def test_it_is_kept_from_sessions_and_needed_for_adaptation(self, tmp_path, scenario) -> None:
        """The learner was trained elsewhere, so its first classes have no images in it."""
        names = list(scenario.tasks[0].classes)
        with run(tmp_path) as service, connect(service) as client:
            status = client.get("/status").json()
            assert not status["adapts"]
            assert f"the canary has no image of '{names[0]}' and 2 more" in status["adaptation_off"]
            job = learn(client, service, "", zip_session(scenario, 0, range(3), 8))
            assert job["said"].startswith("3 classes, 24 images; 6 kept for the canary")
            status = client.get("/status").json()
            assert (status["adapts"], status["adaptation_off"]) == (True, "")
        description = json.loads((tmp_path / "learner" / "learner.json").read_text())
        assert description["stores_images"]
        learner = Learner.load(tmp_path / "learner")
        assert learner.canary.classes == set(names)
        with run(tmp_path) as service:
            assert service.status()["adapts"]  # after a restart

    def test_without_one_adaptation_is_off_unless_the_risk_is_accepted(
        self, tmp_path, scenario
    ) -> None:
        with run(tmp_path, canary_share=0.0) as service, connect(service) as client:
            learn(client, service, "", zip_session(scenario, 0, range(3), 8))
            assert not client.get("/status").json()["adapts"]
        assert not Learner.load(tmp_path / "learner").canary.images
        with run(tmp_path, canary_share=0.0, require_canary=False) as service:
            assert service.status()["adapts"]

    def test_a_refused_session_says_what_to_try(self) -> None:
        def gaps(right: int) -> CanaryGaps:
            margins = torch.tensor([1.0] * right + [-1.0] * (20 - right))
            both = torch.stack([torch.zeros(20), -margins], dim=1)
            return CanaryGaps(["fox"] * 20, torch.zeros(20, dtype=torch.int64), both, both)

        guard = Guard(ServiceSettings(session_drop=10.0))
        assert guard.check_session(gaps(18), gaps(16)) is None
        assert guard.check_session(gaps(18), gaps(15)) == (
            "on earlier classes the canary fell from 90.0 to 75.0 %; train with a smaller lr, "
            "fewer epochs or more images, or allow more (--session-drop)"
        )
