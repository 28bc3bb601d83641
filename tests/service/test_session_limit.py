"""How large a session may be, stated and checked before anything starts."""

import pytest
import torch

from dosapp.errors import TooLargeError
from dosapp.service.service import open_service
from dosapp.service.settings import ServiceSettings


def test_two_thousand_classes_are_refused_in_one_sentence(folder) -> None:
    image = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    settings: ServiceSettings = ServiceSettings.parse({"threads": 1})
    with open_service(folder, settings) as service:
        session = {f"class {n}": image for n in range(2000)}
        with pytest.raises(TooLargeError, match=r"2000 classes; at most 1000.*several sessions"):
            service.learn(session, "alice")
        assert (service.jobs(), service.version) == ([], 1)


@pytest.mark.slow
def test_the_largest_session_that_is_accepted_is_trained(folder) -> None:
    """It needs minutes at most on the embedded backbone."""
    settings: ServiceSettings = ServiceSettings.parse(
        {"threads": 1, "adapt": False, "session_drop": 100}
    )
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1000, 3, 32, 32), dtype=torch.uint8, generator=generator)
    with open_service(folder, settings) as service:
        job = service.learn({f"class {n}": images[n : n + 1] for n in range(1000)}, "alice")
        assert job.ended.wait(600)
        assert (job.state, job.version) == ("done", 2)
        assert len(service.classes) == 1003
