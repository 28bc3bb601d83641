"""Stream-GDA: class statistics give the predictions and the pseudo-labels."""

import pytest
import torch

from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from support.images import PREPROCESS


@pytest.fixture
def learned(small, tiny):
    """A learner after its first session, and images of the stream."""

    def learn(**settings):
        run = small(**{"method": "stream-gda", **settings})
        scenario = build_scenario(run, PREPROCESS)
        learner = Learner(run.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        learner.learn(scenario.session(0))
        return learner, next(iter(scenario.session(0).unlabelled.batches(8)))

    return learn


def test_it_brings_its_own_head_unless_another_is_chosen(learned) -> None:
    assert next(iter(learned()[0].experts())) == "gda-moved"
    assert next(iter(learned(head="ncm")[0].experts())) == "ncm"
    assert next(iter(learned(method="spu", adapt="stream-gda")[0].experts())) == "gda-moved"


def test_pseudo_labels_are_gaussian_log_likelihoods_beside_the_captions(learned) -> None:
    learner, pixels = learned()
    statistics, teacher = learner.class_head.statistics, learner.method.teacher
    means, precision = statistics.stack_means(len(learner.classes)), statistics.precision()
    with torch.no_grad():
        features, texts = teacher.encode_image(pixels), learner.student.encode_captions(teacher)
        scale = teacher.logit_scale.item()
    expected = []
    for f in features.double():
        logits = [
            f @ precision @ mean - mean @ precision @ mean / 2 + scale * f @ text.double()
            for mean, text in zip(means, texts, strict=True)
        ]
        expected.append(int(torch.stack(logits).argmax()))
    assert learner.adapt(pixels).labels.tolist() == expected


def test_pseudo_labels_follow_the_statistics_and_not_only_the_captions(learned) -> None:
    learner, pixels = learned()
    statistics = learner.class_head.statistics
    # Every mean but the first is moved far away, so every image is of the first class.
    statistics.means = {c: mean if c == 0 else mean - 50 for c, mean in statistics.means.items()}
    statistics.revision += 1
    assert set(learner.adapt(pixels).labels.tolist()) == {0}


def test_the_same_labels_come_from_the_answering_expert(learned) -> None:
    learner, pixels = learned(method="flyp", adapt="stream-gda")
    expected = learner.score_images(pixels, learner.answering_expert[1]).argmax(dim=1)
    assert learner.adapt(pixels).labels.tolist() == expected.tolist()


def test_a_step_encodes_the_batch_four_times(learned, monkeypatch) -> None:
    """For the loss by student and teacher, after the step, and by the expert before the session."""
    learner, pixels = learned()
    calls, encode = [], type(learner.student.backbone).encode_image
    monkeypatch.setattr(
        type(learner.student.backbone),
        "encode_image",
        lambda self, images: calls.append(len(images)) or encode(self, images),
    )
    learner.class_head.drift = {0: torch.zeros_like(learner.class_head.statistics.means[0])}
    learner.class_head.seen_weight = {0: learner.class_head.statistics.means[0].new_zeros(())}
    learner.adapt(pixels)
    assert calls == [len(pixels)] * 4
