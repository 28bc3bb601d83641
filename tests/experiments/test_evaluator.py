"""Evaluation encodes a test set once per change of the weights, and never uses stale features."""

from dosapp import Learner, LearnerSettings, RunSettings
from dosapp.experiments.evaluator import Evaluator
from dosapp.experiments.plan import plan


def make_evaluator(method: str, **settings: object) -> Evaluator:
    planned = plan(RunSettings(classes=4, tasks=2, train_images=4, test_images=3))
    settings |= {"method": method, "epochs": 1, "batch_size": 8}
    return Evaluator(planned.scenario, Learner(LearnerSettings(**settings), planned.backbone))


def count_encodes(backbone, monkeypatch) -> list[int]:
    sizes: list[int] = []
    encode = backbone.encode_image

    def counting(pixels, *rest):
        sizes.append(len(pixels))
        return encode(pixels, *rest)

    monkeypatch.setattr(backbone, "encode_image", counting)
    return sizes


def test_unchanged_weights_encode_a_test_set_once(monkeypatch) -> None:
    evaluator = make_evaluator("zero-shot", head="ncm")
    evaluator.learner.learn(evaluator.scenario.session(0))
    sizes = count_encodes(evaluator.learner.student.backbone, monkeypatch)
    for expert in evaluator.experts().values():  # the captions, and the head on the same features
        evaluator.accuracy(expert, 0, [0])
        evaluator.accuracy(expert, 0, [0, 1])
    assert sizes == [len(evaluator.scenario.tasks[0].test)]


def test_changed_weights_are_encoded_again(monkeypatch) -> None:
    evaluator = make_evaluator("spu")
    _, expert = evaluator.learner.answering_expert
    sizes = count_encodes(expert, monkeypatch)
    evaluator.accuracy(expert, 0, [0])
    evaluator.learner.learn(evaluator.scenario.session(0))
    sizes.clear()
    evaluator.accuracy(expert, 0, [0])
    assert sizes == [len(evaluator.scenario.tasks[0].test)]
