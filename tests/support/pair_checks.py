"""Checks of methods that only this package's own tests need."""

from pathlib import Path

import torch

from dosapp.backbones.dual_encoder import DualEncoder
from dosapp.learner.learner import Learner
from dosapp.settings import RunSettings
from dosapp.testing.method_checks import check_same_steps, train_learner, use_unusual_batches


def check_pair(settings: RunSettings, backbone: DualEncoder, folder: Path) -> None:
    """All of `METHOD_CHECKS` with two trainings, for the many pairs of methods."""
    learner, scenario = train_learner(settings, backbone)
    other, _ = train_learner(settings, backbone)
    assert learner.digest() == other.digest(), "the same seed gave another learner"
    digest, random_state = learner.digest(), torch.get_rng_state()
    pixels = scenario.session(1).unlabelled.read(range(8))
    before = pixels.clone()
    predictions = learner.predict(pixels)
    learner.adapt(pixels[:0])
    learner.adapt([])
    assert learner.digest() == digest, "predicting or an empty stream changed the learner"
    assert torch.equal(torch.get_rng_state(), random_state), "predicting drew random numbers"
    learner.save(folder)
    loaded = Learner.load(folder)
    assert loaded.predict(pixels) == predictions, "a loaded learner predicts otherwise"
    check_same_steps(learner, loaded, pixels, scenario.session(0))
    assert torch.equal(pixels, before), "the input images were modified"
    use_unusual_batches(other, pixels[:1].repeat(5, 1, 1, 1))


def check_only_candidates_change(settings: RunSettings, backbone: DualEncoder) -> None:
    """All weights except the first MLP layers stay bit-identical in every expert."""
    before = {n: w.detach().clone() for n, w in backbone.weights().items()}
    learner, _ = train_learner(settings, backbone)
    candidates = set(backbone.first_mlp_weights())
    for expert in learner.method.experts(learner.student).values():
        for name, weight in expert.weights().items():
            if name not in candidates:
                assert torch.equal(weight, before[name]), name
