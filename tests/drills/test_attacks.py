"""Attackers find the way to another class through whatever predicts."""

import numpy as np
import pytest
import torch

from dosapp.data.preprocess import to_bytes
from dosapp.drills.attacks import Attacker
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner


@pytest.mark.parametrize("method", ["dosapp", "stream-gda-ensemble"])
def test_pgd_moves_predictions_to_the_target(small, tiny, method) -> None:
    settings = small(method=method)
    scenario = build_scenario(settings, tiny.preprocess)
    learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
    learner.learn(scenario.session(0))
    learner = learner.at(learner.state(), trainable=False)  # as a service publishes it
    test = scenario.tasks[0].test
    pool = to_bytes(test.read(range(len(test))))
    attacker = Attacker(
        pool,
        lambda images: [p.label for p in learner.predict(images, 1)],
        lambda: learner,
        np.random.default_rng(0),
    )
    attacker.observe()  # predictions, in inference mode
    target = learner.classes[0]
    before = attacker.ask(attacker.honest(32))
    images = attacker.perturbed(32, target, eps=16)
    changes = (images.int()[:, None] - pool.int()[None]).abs().amax((2, 3, 4))
    assert changes.amin(dim=1).max() <= 16  # of an image of its own
    share = np.mean([label == target for label in attacker.ask(images)])
    assert share > 0.5 > np.mean([label == target for label in before])
    assert torch.equal(pool, to_bytes(test.read(range(len(test)))))  # its own images are kept
