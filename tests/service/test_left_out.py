"""A caller whose images alone are refused is left out of the stream; the others go on."""

import time

import pytest
import torch

from dosapp.data.preprocess import to_bytes
from dosapp.drills.guards import GUARDS_OFF
from dosapp.errors import StorageError
from dosapp.history.record import compute_checksum
from dosapp.learner.canary import Canary
from dosapp.service.guards import Guard
from dosapp.service.service import LearningService
from dosapp.service.settings import ServiceSettings
from dosapp.service.stream import StreamSample
from support.services import save_trained_learner

SETTINGS = {
    "adapt_batch_size": 8, "interval": 6, "max_refusals": 2, "max_disagreement": 0.02,
    "max_skew": 1.0, "require_canary": False, "canary_share": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def saved_learner(loaded_tiny, tmp_path_factory):
    """A learner that adapts to its stream, and its scenario."""
    folder = tmp_path_factory.mktemp("trained") / "learner"
    return folder, save_trained_learner(loaded_tiny, folder, test_images=16, method="dosapp")


@pytest.fixture
def honest(scenario) -> torch.Tensor:
    """Images of the classes that were learned, in a mixed order."""
    test = scenario.tasks[0].test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    return to_bytes(test.read(order.tolist()))


@pytest.fixture
def shuffled(honest) -> torch.Tensor:
    """Their pixels in another order: the experts disagree on many of them."""
    order = torch.randperm(honest[0, 0].numel(), generator=torch.Generator().manual_seed(1))
    return honest.flatten(2)[:, :, order].reshape(honest.shape)


def start(folder, canary: Canary | None = None, **settings: float) -> LearningService:
    """A service whose threads are not started: `send` does their work."""
    return LearningService(folder, ServiceSettings.parse({**SETTINGS, **settings}), canary)


def send(service: LearningService, times: int, **images: torch.Tensor) -> None:
    """Let callers send images at the same time, and the service learn from them."""
    for _ in range(times):
        for caller, sent in images.items():
            learner = service.reader.published.learner
            service.offer(sent, learner.predict(sent, 1), caller)
        service.writer.run_waiting()


def adapt_to_both(service: LearningService, steps: int, honest, shuffled) -> None:
    """Let the writer take steps on honest images and those of a flood."""
    now = time.monotonic()
    for step in range(steps):
        rows = range(4 * step % len(honest), 4 * step % len(honest) + 4)
        senders = {"honest": honest[rows], "flood": shuffled[rows]}
        service.writer.adapt(
            [StreamSample(x, "fox", 0.9, now, name) for name, sent in senders.items() for x in sent]
        )


class TestService:
    def test_only_the_caller_of_refused_images_is_left_out(self, folder, honest, shuffled) -> None:
        service = start(folder)
        send(service, 6, honest=honest, flood=shuffled)
        status = service.status()
        assert (status["left_out"], status["frozen"]) == (["flood"], "")
        (entry,) = [e for e in service.audit.last() if e["what"] == "left out"]
        assert entry["caller"] == "flood"
        assert "refused 2 times more often than accepted: the experts disagree" in entry["why"]

        version, adapted = service.version, service.writer.signals.adapted
        send(service, 4, honest=honest, flood=shuffled)
        assert service.version > version
        assert service.writer.signals.adapted == adapted + 4 * len(honest)
        assert service.writer.frozen == ""

    def test_callers_give_what_they_send_until_an_interval_is_refused(
        self, folder, honest, shuffled
    ) -> None:
        """A bound from the start would leave most images of the busiest honest caller."""
        service = start(folder)
        send(service, 3, honest=honest, other=honest[:8])  # two intervals
        assert service.writer.signals.adapted == 3 * (len(honest) + 8)
        adapt_to_both(service, 6, honest, shuffled)
        assert service.writer.signals.refused == 1
        before = service.writer.signals.adapted
        send(service, 1, honest=honest, other=honest[:8])
        assert service.writer.signals.adapted == before + 16
        service.unfreeze("operator")
        send(service, 1, honest=honest)
        assert service.writer.waiting == 0

    def test_what_was_published_with_its_images_is_undone(self, folder, honest, shuffled) -> None:
        service = start(folder)
        digest = service.writer.learner.digest()
        send(service, 4, honest=honest)
        assert service.version > 1
        send(service, 6, honest=honest, flood=shuffled)
        (undone,) = [v for v in service.history.versions() if v.reason.startswith("returned")]
        assert undone.reason == "returned to version 1: 'flood' is left out"
        assert compute_checksum(service.history.at(undone.number)) == digest

    def test_a_caller_is_not_blamed_for_what_another_published(
        self, folder, scenario, honest, shuffled
    ) -> None:
        """The attacker is silent when its steps make the next honest interval one too many."""
        task = scenario.tasks[0]
        labels = [task.classes[n] for n in task.test.labels]
        canary = Canary.from_images(to_bytes(task.test.read(range(len(task.test)))), labels)
        lenient = start(folder, canary, **GUARDS_OFF)
        send(lenient, 4, flood=shuffled)
        send(lenient, 4, quiet=honest[:8])  # another who sends: there is a caller to go on with
        assert lenient.version > 1

        service = start(folder, canary, max_disagreement=1.0)
        send(service, 20, honest=honest, quiet=honest[:8])
        assert service.writer.signals.refused > 0
        assert (service.status()["left_out"], service.writer.frozen) == ([], "")
        (undone,) = [v for v in service.history.versions() if v.reason.startswith("returned")]
        assert undone.reason == "returned to version 1: no caller's images are harmful alone"
        assert service.version > undone.number  # and adaptation goes on from there

    @pytest.mark.parametrize("undone", ["by a rollback", "by the guard"])
    def test_a_given_canary_is_compared_after_a_return(
        self, folder, scenario, honest, shuffled, undone
    ) -> None:
        """The version returned to is older than the canary, so it has no baseline of it."""
        task = scenario.tasks[0]
        labels = [task.classes[n] for n in task.test.labels]
        canary = Canary.from_images(to_bytes(task.test.read(range(len(task.test)))), labels)
        service = start(folder, canary)
        send(service, 2, honest=honest)
        assert service.version > 1
        if undone == "by a rollback":
            service.writer.rollback(1, "owner")
        else:
            send(service, 6, honest=honest, flood=shuffled)
        send(service, 4, honest=honest)
        versions = service.history.versions()
        (returned,) = [v for v in versions if v.reason.startswith(("returned", "rolled back"))]
        later = versions[returned.number :]
        assert later
        assert all(version.seen["pull"] != 0 for version in later)

    def test_requests_that_wait_delay_the_search_but_do_not_prevent_it(
        self, folder, honest, shuffled, monkeypatch
    ) -> None:
        monkeypatch.setattr("dosapp.service.caller_trials.MAX_WAIT", 0.1)
        service = start(folder)
        service.writer.is_reader_behind = lambda: True
        adapt_to_both(service, 12, honest, shuffled)
        assert service.status()["left_out"] == ["flood"]

    def test_a_command_does_not_wait_for_the_search(self, folder, honest, shuffled) -> None:
        service = start(folder)
        service.writer.submit(lambda: None)
        adapt_to_both(service, 6, honest, shuffled)
        assert (service.writer.signals.refused, service.writer.guard.refusals) == (1, 1)
        assert "by" not in service.audit.last()[-1]

    def test_a_version_that_cannot_be_read_now_still_counts_as_a_refusal(
        self, folder, honest, shuffled, monkeypatch
    ) -> None:
        service = start(folder)

        def fail(number: int) -> None:
            raise StorageError(f"version {number} cannot be read now")

        monkeypatch.setattr(service.history, "at", fail)
        adapt_to_both(service, 12, honest, shuffled)
        assert (service.writer.signals.refused, service.writer.guard.refusals) == (2, 2)
        assert service.writer.frozen.startswith("refused 2 intervals in a row")

    def test_it_stays_so_after_a_restart_until_a_session(self, folder, honest, shuffled) -> None:
        first = start(folder)
        send(first, 6, honest=honest, flood=shuffled)
        service = start(folder)
        assert service.status()["left_out"] == ["flood"]
        service.learn({"new": honest[:4], "newer": shuffled[:4]}, "teacher")
        service.writer.run_waiting()
        assert service.status()["left_out"] == []
        assert start(folder).status()["left_out"] == []

    def test_an_operator_takes_it_back(self, folder, honest, shuffled) -> None:
        service = start(folder)
        send(service, 6, honest=honest, flood=shuffled)
        service.unfreeze("operator")
        assert service.status()["left_out"] == []
        assert service.audit.last()[-1]["what"] == "unfroze"

    def test_the_only_caller_freezes_the_service(self, folder, shuffled) -> None:
        service = start(folder)
        send(service, 6, flood=shuffled)
        status = service.status()
        assert status["left_out"] == []
        assert status["frozen"].startswith("refused 2 intervals in a row")


class TestGuard:
    def make(self, *callers: str) -> Guard:
        guard = Guard(ServiceSettings(max_refusals=2))
        pixels = torch.zeros(3, 2, 2, dtype=torch.uint8)
        guard.choose_trusted([StreamSample(pixels, "fox", 0.9, 0.0, c) for c in callers], 2)
        return guard

    def test_a_published_interval_begins_the_count_anew(self) -> None:
        guard = self.make("a", "b")
        assert guard.refuse(["a"]) == []
        guard.accept(["b"])
        assert guard.refuse(["a"]) == ["a"]
        guard = self.make("a", "b")
        guard.refuse(["a"])
        guard.accept(["a", "b"])
        assert guard.refuse(["a"]) == []

    def test_refusals_that_one_caller_caused_do_not_freeze_for_all(self) -> None:
        guard = self.make("a", "b", "c")
        assert [guard.refuse([name]) for name in ("a", "b", "a", "b")] == [[], [], ["a"], ["b"]]
        assert guard.refusals == 0
        guard.refuse(["c"])  # no other is left
        assert guard.refusals == 1

    def test_refusals_that_cannot_be_attributed_count_for_a_freeze(self) -> None:
        guard = self.make("a", "b")
        assert guard.refuse([]) == guard.refuse(["a", "b"]) == []
        assert guard.refusals == 2
