"""Learners whose head predicts: evaluation, prediction, classes, saving and export follow it."""

from dataclasses import replace

import pytest
import torch

from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.export import export
from dosapp.learner.learner import Learner
from support.images import PREPROCESS


@pytest.fixture(params=["ncm", "gda", "ranpac"])
def learned(request, small, tiny):
    """A learner after two sessions, and its scenario."""
    settings = small(method="zero-shot", head=request.param, head_width=64)
    scenario = build_scenario(settings, PREPROCESS)
    learner = Learner(settings.learner(), tiny)
    for t in range(2):
        learner.learn(scenario.session(t))
    return learner, scenario


def test_predictions_are_the_heads(learned) -> None:
    learner, scenario = learned
    pixels = scenario.tasks[0].test.read(range(4))
    _, expert = learner.answering_expert
    texts = learner.student.text_head.class_embeddings(expert.encoder)
    logits = expert.head.score(expert.encoder.encode_image(pixels), texts)
    for prediction, row in zip(learner.predict(pixels), logits.softmax(dim=1), strict=True):
        assert prediction.label == learner.classes[int(row.argmax())]
        assert prediction.score == pytest.approx(row.max().item(), abs=1e-5)


def test_no_weight_moves(learned, tiny) -> None:
    learner, _ = learned
    pairs = zip(learner.student.backbone.weights().values(), tiny.weights().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_order_of_sessions_does_not_change_a_prediction(learned, tiny) -> None:
    learner, scenario = learned
    other = Learner(learner.settings, tiny)
    for t in (1, 0):
        other.learn(scenario.session(t))
    pixels = scenario.tasks[1].test.read(range(6))
    one, two = ([p.label for p in x.predict(pixels)] for x in (learner, other))
    assert one == two
    # Each session is held out among the classes known then, so the temperature may differ.
    one, two = (
        x.score_images(pixels, x.answering_expert[1]) * x.class_head.temperature.value
        for x in (learner, other)
    )
    order = [other.classes.index(name) for name in learner.classes]
    torch.testing.assert_close(one, two[:, order], atol=1e-3, rtol=1e-4)


def test_unknown_classes_are_predicted_by_their_captions(learned) -> None:
    """Forward transfer and the control set ask for classes that were never learned."""
    learner, scenario = learned
    pixels = scenario.tasks[0].test.read(range(4))
    _, expert = learner.answering_expert
    prompts = {
        "a red disc": scenario.tasks[0].prompts,
        learner.classes[0]: scenario.tasks[0].prompts,
    }
    by_text = learner.score_images(pixels, expert.encoder, prompts)
    assert torch.equal(learner.score_images(pixels, expert, prompts), by_text)


def test_renamed_and_removed_classes_keep_their_statistics(learned) -> None:
    learner, scenario = learned
    pixels = scenario.tasks[1].test.read(range(4))
    before = learner.predict(pixels, top=6)
    learner.rename(learner.classes[-1], "newcomer")
    learner.remove(learner.classes[0])
    assert len(learner.predict(pixels)[0].top) == min(5, len(learner.classes))
    ranking = [[name for name, _ in p.top if name != "newcomer"] for p in learner.predict(pixels)]
    for names, old in zip(ranking, before, strict=True):
        kept = [name for name, _ in old.top if name in names]
        assert names == kept


def test_a_saved_learner_predicts_the_same(learned, tmp_path) -> None:
    learner, scenario = learned
    pixels = scenario.tasks[0].test.read(range(4))
    learner.save(tmp_path / "learner", "two sessions")
    expected = learner.predict(pixels)
    assert Learner.load(tmp_path / "learner").predict(pixels) == expected
    assert learner.at(learner.state(), trainable=False).predict(pixels) == expected  # as a service


def test_a_class_without_images_is_an_error_before_anything_is_learned(learned) -> None:
    learner, scenario = learned
    session = scenario.session(0)
    empty = replace(session, classes=(*session.classes, "newcomer"))
    before = learner.digest()
    with pytest.raises(InputError, match="'newcomer' has no training images, so head"):
        learner.learn(empty)
    assert learner.digest() == before


def test_onnx_is_one_graph_from_images_to_logits(learned, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    learner, scenario = learned
    pixels = scenario.tasks[0].test.read(range(3))
    export(learner, tmp_path / "x", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x" / "image.onnx")
    [logits] = session.run(["logits"], {"pixels": pixels.numpy()})
    expected = learner.score_images(pixels, learner.answering_expert[1])
    torch.testing.assert_close(torch.from_numpy(logits), expected, atol=2e-2, rtol=1e-3)
    with pytest.raises(InputError, match="export it with --kind onnx"):
        export(learner, tmp_path / "y", "pretrained")
