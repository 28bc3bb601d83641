"""The temperature of a head's logits."""

import numpy as np
import pytest
import torch

from dosapp.heads.temperature import TEMPERATURES, Temperature, deal_folds

torch.manual_seed(0)
LOGITS = 10 * torch.randn(60, 4)
LABELS = torch.where(torch.rand(60) < 0.7, LOGITS.argmax(dim=1), torch.arange(60) % 4)


def test_it_minimises_the_held_out_cross_entropy() -> None:
    temperature = Temperature()
    temperature.add(LOGITS, LABELS)
    losses = []
    for t in TEMPERATURES.tolist():
        scaled = LOGITS.double().numpy() / t
        partition = np.log(np.exp(scaled).sum(axis=1))
        losses.append((partition - scaled[np.arange(60), LABELS.numpy()]).sum())
    assert np.allclose(temperature.losses, losses)
    assert temperature.value == TEMPERATURES[np.argmin(losses)].item()
    assert temperature.value > 5  # these logits are right seven times of ten, and sure


def test_sessions_can_come_in_any_order() -> None:
    parts = [(LOGITS[:20], LABELS[:20]), (LOGITS[20:], LABELS[20:])]
    one, two = Temperature(), Temperature()
    for part in parts:
        one.add(*part)
    for part in reversed(parts):
        two.add(*part)
    assert torch.allclose(one.losses, two.losses)


def test_images_that_are_all_right_do_not_make_it_certain() -> None:
    """Of 58 images and two more, one right and one wrong, 59 of 60 would be right."""
    right = LOGITS[:58].argmax(dim=1)
    temperature = Temperature()
    temperature.add(100 * LOGITS[:58], right)
    confidence = (100 * LOGITS[:58] / temperature.value).softmax(dim=1).amax(dim=1).mean().item()
    assert 0.97 < confidence <= 59 / 60
    restored = Temperature()
    restored.load_state_dict(temperature.state_dict())
    assert restored.value == temperature.value > 20
    restored.load_state_dict({"losses": temperature.losses})  # of an earlier version
    assert restored.value == 1.0


@pytest.mark.parametrize("folds", [2, 5])
def test_no_fold_holds_out_a_whole_class(folds) -> None:
    labels = torch.tensor([0] * 7 + [1] * 2 + [2])
    dealt = deal_folds(labels, folds)
    assert dealt[-1] == -1
    for fold in range(folds):
        assert set(labels[dealt != fold].tolist()) == {0, 1, 2}
