"""The benchmark compares two ways of doing the same."""

import pytest
import torch

from dosapp.bench.measure import bench, race
from dosapp.bench.model import pictures, random_clip, small
from dosapp.bench.plain import Plain
from dosapp.core.masks import top_fraction
from dosapp.data.base import Prompts
from dosapp.methods import build
from dosapp.student import Selection, Student

CLASSES = [f"class {n}" for n in range(7)]


@pytest.fixture
def pair():
    """Ours and the plain one, at the same point, in double precision."""
    ours, theirs = (random_clip(small()) for _ in range(2))
    for net in (ours, theirs):
        net.model.double()
    student = Student(ours, lr=1e-3, weight_decay=0.2)
    student.meet(CLASSES, Prompts(train="{}", evaluate=("{}",)))
    return student, Plain(theirs, CLASSES, lr=1e-3, weight_decay=0.2)


def masks(student, seed: int):
    generator = torch.Generator().manual_seed(seed)
    shapes = {n: w.shape for n, w in student.net.first_mlp().items()}
    scores = {n: torch.rand(shape, generator=generator) for n, shape in shapes.items()}
    return top_fraction(scores, 0.1)


def test_both_do_the_same_in_both_phases(pair) -> None:
    student, plain = pair
    method = build("dosapp")
    method.start(student)
    lessons = masks(student, 0)
    student.train_only(Selection(tuple(lessons), lessons))
    plain.begin(lessons)
    for step in range(3):
        pixels, labels = pictures(6, 32, f"lesson {step}"), torch.tensor([0, 1, 2, 0, 1, 1])
        loss = student.clip_loss(pixels, labels)
        assert loss.item() == pytest.approx(plain.lesson(pixels.double(), labels).item())
        assert student.step(loss)
        method.after_step(student)
    union = masks(student, 1)
    student.train_only(Selection(tuple(union), union))
    plain.begin(union)
    for step in range(3):
        pixels = pictures(5, 32, f"stream {step}")
        guess = method.stream_loss(student, pixels)
        loss, labels = plain.adapt(pixels.double())
        assert torch.equal(guess.labels, labels)
        assert guess.loss.item() == pytest.approx(loss.item())
        student.step(guess.loss)
        method.after_stream_step(student)
    for ours, theirs in ((student.net, plain.student), (method.teacher, plain.teacher)):
        other = dict(theirs.named_parameters())
        for name, weight in ours.weights().items():
            torch.testing.assert_close(weight, other[name], atol=1e-9, rtol=0)


def test_the_figures_are_ratios_and_all_there() -> None:
    found = bench(small(), quick=True)
    assert set(found["ratios"]) == {
        "ttl_batch64_classes100",
        "ttl_batch8_classes200",
        "supervised_batch64_classes10",
        "limit",
        "memory",
        "update_share",
        "allreduce",
    }
    assert found["ratios"]["ttl_batch64_classes100"] is None  # left out when it has to be quick
    assert found["ratios"]["ttl_batch8_classes200"] > 1
    assert found["ratios"]["allreduce"] == pytest.approx(0.1, abs=0.002)
    assert 0 < found["ratios"]["update_share"] < 1


def test_repetitions_take_turns_and_the_first_is_not_counted() -> None:
    said: list[str] = []
    found = race({"a": lambda: said.append("a"), "b": lambda: said.append("b")}, 3)
    assert "".join(said) == "ba" + "ab" + "ba" + "ab"
    assert len(found["a"].seconds) == 3
