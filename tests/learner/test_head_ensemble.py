"""Class Gaussians of the frozen model beside those of the trained one."""

import pytest
import torch

from dosapp.data.base import Prompts
from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.heads.class_statistics import ClassStatistics
from dosapp.learner.export import export
from dosapp.learner.learner import Learner
from dosapp.settings import LearnerSettings
from support.images import PREPROCESS


@pytest.fixture
def train(small, tiny):
    """A learner after some sessions with their streams, and its scenario."""

    def run(sessions=2, **settings):
        settings = small(**{"method": "stream-gda-ensemble", **settings})
        scenario = build_scenario(settings, PREPROCESS)
        learner = Learner(settings.learner(), tiny.shared_copy(unshared=list(tiny.weights())))
        for t in range(sessions):
            learner.learn(scenario.session(t))
            for pixels in scenario.session(t).unlabelled.batches(8):
                learner.adapt(pixels)
        return learner, scenario

    return run


def log_likelihoods(statistics: ClassStatistics, features: torch.Tensor) -> torch.Tensor:
    """f·Σ⁻¹μ_c - ½ μ_cᵀΣ⁻¹μ_c, image by image."""
    means, precision = statistics.stack_means(len(statistics.means)), statistics.precision()
    return torch.tensor(
        [
            [(f @ precision @ m - m @ precision @ m / 2).item() for m in means]
            for f in features.double()
        ]
    )


def test_scores_are_the_sum_of_both_log_likelihoods_and_the_captions(train, tiny) -> None:
    learner, scenario = train()
    head, teacher = learner.class_head, learner.method.teacher
    pixels = scenario.tasks[0].test.read(range(4))
    with torch.no_grad():
        features, frozen = teacher.encode_image(pixels), tiny.encode_image(pixels)
        texts = learner.student.text_head.class_embeddings(teacher)
    expected = (
        log_likelihoods(head.statistics, features)
        + teacher.logit_scale.item() * features @ texts.T
        + log_likelihoods(head.frozen_statistics, frozen)
    ) / head.temperature.value
    scores = learner.score_images(pixels, learner.answering_expert[1])
    assert torch.allclose(scores, expected, rtol=1e-4, atol=1e-3)


def test_the_frozen_statistics_are_those_of_the_pretrained_model(train, tiny) -> None:
    learner, scenario = train()
    for task in scenario.tasks[:2]:
        with torch.no_grad():
            features = tiny.encode_image(task.train.read(range(len(task.train)))).double()
        for n, name in enumerate(task.classes):
            mean = features[torch.from_numpy(task.train.labels == n)].mean(dim=0)
            found = learner.class_head.frozen_statistics.means[learner.classes.index(name)]
            assert torch.allclose(found, mean, atol=1e-6)
    assert learner.fingerprint == tiny.fingerprint()


def test_it_labels_the_stream_as_it_predicts(train) -> None:
    learner, scenario = train(1, method="flyp", adapt="stream-gda-ensemble")
    pixels = next(iter(scenario.session(0).unlabelled.batches(8)))
    expected = learner.score_images(pixels, learner.answering_expert[1]).argmax(dim=1)
    assert learner.adapt(pixels).labels.tolist() == expected.tolist()


def test_a_saved_learner_continues_as_the_original(train, tmp_path) -> None:
    learner, scenario = train()
    learner.save(tmp_path / "learner")
    restored = Learner.load(tmp_path / "learner")
    pixels = scenario.tasks[0].test.read(range(8))
    assert restored.predict(pixels) == learner.predict(pixels)
    for one in (learner, restored):
        one.adapt(pixels)
        one.learn(scenario.session(0))
        one.adapt(pixels)
    assert restored.digest() == learner.digest()


def test_the_frozen_copy_takes_no_room_in_a_version(train, tmp_path) -> None:
    """Nothing of it ever changes, so a version stores no value of it."""
    sizes = {}
    for method in ("stream-gda", "stream-gda-ensemble"):
        learner, _ = train(method=method)
        learner.save(tmp_path / method)
        files = (tmp_path / method / "versions").iterdir()
        statistics = learner.class_head.frozen_statistics.state_dict().values()
        extra = sum(t.numel() * t.element_size() for t in statistics)
        sizes[method] = sum(file.stat().st_size for file in files) - extra
    plain, ensemble = sizes.values()
    assert ensemble < 1.02 * plain + 20_000


def test_classes_can_be_removed_and_others_be_asked_for(train) -> None:
    learner, scenario = train()
    pixels = scenario.tasks[1].test.read(range(4))
    learner.remove(learner.classes[0])
    assert {p.label for p in learner.predict(pixels)} <= set(learner.classes)
    prompts = {**dict.fromkeys(learner.classes, Prompts()), "unknown thing": Prompts()}
    scores = learner.score_images(pixels, learner.answering_expert[1], prompts)
    assert scores.shape == (4, len(learner.classes) + 1)  # captions decide


def test_onnx_has_both_models_in_one_graph(train, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    learner, scenario = train()
    published = learner.at(learner.state(), trainable=False)
    published.predict(scenario.tasks[0].test.read(range(2)))  # in inference mode
    export(published, tmp_path / "x")
    pixels = scenario.tasks[0].test.read(range(3))
    session = onnxruntime.InferenceSession(tmp_path / "x" / "image.onnx")
    (logits,) = session.run(None, {"pixels": pixels.numpy()})
    expected = learner.score_images(pixels, learner.answering_expert[1])
    assert torch.allclose(torch.from_numpy(logits), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dosapp", "head": "ncm"}, "head_ensemble goes with head gda"),
        ({"method": "dosapp"}, "not with captions"),
        ({"method": "spu", "adapt": "rmt", "head": "gda"}, "predicts with one expert"),
    ],
)
def test_it_goes_with_gda_and_one_expert(small, tiny, settings, message) -> None:
    with pytest.raises(InputError, match=message):
        Learner(small(head_ensemble=True, **settings).learner(), tiny)


def test_sessions_move_the_means_of_a_default_learner(train) -> None:
    """A learner in use may see no stream; an experiment asks for this."""
    assert Learner().class_head.session_drift is True
    assert Learner(LearnerSettings(method="dosapp")).class_head.session_drift is False
    assert train(sessions=0)[0].class_head.session_drift is False
