"""River's interface: one image at a time, and predict before learning."""

import pytest
import torch

from dosapp.errors import InputError
from dosapp.experiments.plan import build_scenario
from dosapp.learner.learner import Learner
from dosapp.online import (
    Accuracy,
    OnlineClassifier,
    iter_progressive_val_score,
    progressive_val_score,
)


@pytest.fixture
def model(learner_settings, tiny) -> OnlineClassifier:
    settings = learner_settings(method="dosapp", epochs=4, batch_size=2)
    return OnlineClassifier(Learner(settings, tiny), session_size=8, stream_batch_size=4)


@pytest.fixture
def examples(small, loaded_tiny) -> list[tuple[torch.Tensor, str]]:
    """The training images of the first task, as a stream of pairs."""
    task = build_scenario(small(), loaded_tiny.preprocess).tasks[0]
    images = task.train.read(range(len(task.train)))
    names = [task.classes[n] for n in task.train.labels]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    return [(images[n], names[n]) for n in order]


def test_it_learns_new_classes_one_image_at_a_time(model, examples) -> None:
    assert model.predict_one(examples[0][0]) is None
    assert model.predict_proba_one(examples[0][0]) == {}
    for n, (x, y) in enumerate(examples[:8]):
        assert model.waiting == n
        model.learn_one(x, y)
    assert (model.waiting, model.learner.sessions) == (0, 1)
    probabilities = model.predict_proba_one(examples[0][0])
    assert set(probabilities) == {y for _, y in examples[:8]}
    assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    assert model.predict_one(examples[0][0]) == max(probabilities, key=probabilities.get)


def test_labels_keep_their_type_and_the_last_images_are_flushed(model, examples) -> None:
    for x, y in examples[:3]:
        model.learn_one(x, len(y))
    model.flush()
    assert model.learner.sessions == 1
    assert isinstance(model.predict_one(examples[0][0]), int)
    with pytest.raises(InputError, match="have the same name"):
        model.learn_one(examples[0][0], str(len(examples[0][1])))


class Recorder:
    """A model that notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def predict_one(self, x) -> str:
        self.calls.append(("predict", x))
        return "fox"

    def learn_one(self, x, y) -> None:
        self.calls.append(("learn", x))

    def adapt_one(self, x) -> None:
        self.calls.append(("adapt", x))


def test_each_image_is_predicted_before_it_is_learned() -> None:
    model, metric = Recorder(), Accuracy()
    dataset = [(0, "fox"), (1, "wolf"), (2, None)]
    states = list(iter_progressive_val_score(dataset, model, metric, step=2))
    assert model.calls == [
        ("predict", 0), ("learn", 0), ("predict", 1), ("learn", 1), ("adapt", 2),
    ]  # fmt: skip
    assert [state["step"] for state in states] == [2, 3]
    assert metric.get() == 0.5  # the image without a label is not scored


def test_labels_may_arrive_late_or_only_score() -> None:
    late, dataset = Recorder(), [(n, "fox") for n in range(3)]
    assert progressive_val_score(dataset, late, delay=2).get() == 1
    assert [x for call, x in late.calls if call == "learn"] == [0, 1, 2]
    assert late.calls.index(("predict", 2)) < late.calls.index(("learn", 0))
    stream = Recorder()
    progressive_val_score(dataset, stream, learn="stream")
    assert {call for call, _ in stream.calls} == {"predict", "adapt"}
    frozen = Recorder()
    progressive_val_score(dataset, frozen, learn="nothing")
    assert {call for call, _ in frozen.calls} == {"predict"}


def test_progressive_evaluation_of_a_learner_adapts_to_the_stream(model, examples, capsys) -> None:
    for x, y in examples[:8]:
        model.learn_one(x, y)
    before = model.learner.digest()
    metric = progressive_val_score(examples[:8], model, learn="stream", print_every=4)
    assert metric.get() > 0.3
    assert model.learner.digest() != before  # two steps on the stream
    assert model.learner.sessions == 1
    assert capsys.readouterr().out.startswith("[4] Accuracy: ")


def test_bad_input_is_one_sentence(model) -> None:
    with pytest.raises(InputError, match="an image is a list; give a Pillow image"):
        model.predict_proba_one([1]) if model.learner.classes else model.learn_one([1], "x")
    with pytest.raises(InputError, match="session_size is 0; give at least 1"):
        OnlineClassifier(model.learner, session_size=0)
    with pytest.raises(InputError, match="learn is 'x'; give labels, stream or nothing"):
        progressive_val_score([], model, learn="x")
    with pytest.raises(InputError, match="delay is -1"):
        progressive_val_score([], model, delay=-1)
