"""Stream-GDA: class statistics give the predictions and the pseudo-labels."""

import pytest
import torch

from dosapp.errors import InputError
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
    statistics, backbone = learner.head.statistics, learner.student.backbone
    means, precision = statistics.stack_means(len(learner.classes)), statistics.precision()
    with torch.no_grad():
        features, texts = backbone.encode_image(pixels), learner.student.encode_captions()
        scale = backbone.logit_scale.item()
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
    statistics = learner.head.statistics
    # Every mean but the first is moved far away, so every image is of the first class.
    statistics.means = {c: mean if c == 0 else mean - 50 for c, mean in statistics.means.items()}
    statistics.revision += 1
    assert set(learner.adapt(pixels).labels.tolist()) == {0}


def test_statistics_can_label_the_stream_of_dosapp(learned) -> None:
    options = {"pseudo_labels": "head"}
    learner, pixels = learned(method="dosapp", head="gda-moved", options=options)
    expected = learner.class_scores(pixels, learner.answering_expert[1]).argmax(dim=1)
    assert learner.adapt(pixels).labels.tolist() == expected.tolist()
    learner, pixels = learned(method="dosapp", options=options)
    with pytest.raises(InputError, match="needs class statistics; add --head gda-moved"):
        learner.adapt(pixels)


def test_a_step_encodes_the_batch_three_times(learned, monkeypatch) -> None:
    """For the loss, after the step, and by the expert before the session."""
    learner, pixels = learned()
    calls, encode = [], type(learner.student.backbone).encode_image
    monkeypatch.setattr(
        type(learner.student.backbone),
        "encode_image",
        lambda self, images: calls.append(len(images)) or encode(self, images),
    )
    learner.head.drift = {0: torch.zeros_like(learner.head.statistics.means[0])}
    learner.head.seen_weight = {0: learner.head.statistics.means[0].new_zeros(())}
    learner.adapt(pixels)
    assert calls == [len(pixels)] * 3
