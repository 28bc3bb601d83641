"""What the guard refuses to publish, from the gaps of a canary."""

import pytest
import torch

from dosapp.learner.canary import CanaryGaps
from dosapp.service.guards import Guard
from dosapp.service.settings import ServiceSettings

IMAGES, CLASSES = 100, 10
BEFORE = torch.linspace(-0.5, 9.5, IMAGES)  # margins after the last session: 95 of 100 are right


def make_gaps(margins: torch.Tensor, pulled: float = 0.0) -> CanaryGaps:
    """Gaps of images with these margins; class 0 has gained on all others by `pulled`."""
    truth = torch.arange(IMAGES) % (CLASSES - 1) + 1  # no image is of class 0
    rows = torch.arange(IMAGES)

    def fill(values: torch.Tensor) -> torch.Tensor:
        gaps = torch.full((IMAGES, CLASSES), -30.0)
        gaps[rows, truth % (CLASSES - 1) + 1] = -values  # the largest other class
        gaps[rows, truth] = 0.0
        return gaps

    now = fill(margins)
    now[:, 0] += pulled
    return CanaryGaps(["x"] * IMAGES, truth, now, fill(BEFORE))


@pytest.mark.parametrize(
    ("change", "pulled", "reason"),
    [
        (0.05 * torch.ones(IMAGES), 0.0, None),
        (-0.05 * torch.ones(IMAGES), 0.0, None),  # noise
        (-0.4 * torch.ones(IMAGES), 0.0, "mean margin fell"),
        # Images that are safely right do not make up for those that are not.
        (torch.where(BEFORE > 5, 4.0, -0.4), 0.0, "mean margin fell"),
        (torch.where(BEFORE > 5, -0.9, 0.1), 0.0, None),  # those stay safely right
        (torch.zeros(IMAGES), 1.4, None),
        (torch.zeros(IMAGES), 1.6, "one class gained 1.60"),  # and the margins did not rise
        (0.4 * torch.ones(IMAGES), 2.9, None),
        (0.4 * torch.ones(IMAGES), 4.0, "one class gained 4.00"),
        (torch.where((BEFORE > 0) & (BEFORE < 0.35), -0.5, 0.1), 0.0, "fell from 95 to 92"),
    ],
)
def test_an_interval_is_published_only_if_the_canary_is_no_worse(change, pulled, reason) -> None:
    said = Guard(ServiceSettings()).check_interval(0.0, make_gaps(BEFORE + change, pulled))
    assert (said is None) if reason is None else (said is not None and reason in said), said


def test_an_interval_on_which_the_experts_disagree_is_not_published() -> None:
    guard = Guard(ServiceSettings())
    assert guard.check_interval(0.04, make_gaps(BEFORE)) is None
    assert "disagree on 6%" in str(guard.check_interval(0.06, make_gaps(BEFORE)))
