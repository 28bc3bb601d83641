"""With many classes the stream keeps activations of the captions it needs only."""

import torch

from dosapp.data.base import Prompts
from dosapp.methods import dosapp
from dosapp.methods.dosapp import DoSAPP
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection

NAMES = [f"{c} {p} circle" for c in ("red", "blue", "pink") for p in ("plain", "dotted", "hollow")]


def stream_gradients(tiny, limit: int, monkeypatch) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Gradients of a step on the stream, and the captions of each pass that has a gradient."""
    monkeypatch.setattr(dosapp, "MANY_CLASSES", limit)
    student, method = Student(tiny, lr=1e-3), DoSAPP()
    method.setup(student)
    student.text_head.add_classes(NAMES, Prompts())
    student.set_trainable(Selection(tuple(tiny.first_mlp_weights())))
    counts: list[int] = []
    tiny.model.text_projection.register_forward_hook(
        lambda module, inputs, output: counts.append(len(output)) if output.requires_grad else None
    )
    pixels = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    result = method.stream_loss(student, pixels)
    assert result.loss is not None
    result.loss.backward()
    weights = tiny.first_mlp_weights()
    return {n: w.grad.clone() for n, w in weights.items() if w.grad is not None}, counts


def test_gradients_are_those_of_all_captions(loaded_tiny, monkeypatch) -> None:
    every = list(loaded_tiny.weights())
    few, few_counts = stream_gradients(loaded_tiny.shared_copy(every), 256, monkeypatch)
    many, many_counts = stream_gradients(loaded_tiny.shared_copy(every), 4, monkeypatch)
    assert few_counts == [len(NAMES)]
    assert many_counts[-1] <= 4  # at most one caption for each image
    assert len(many_counts) == 1
    assert few.keys() == many.keys()
    for name, gradient in few.items():
        torch.testing.assert_close(many[name], gradient, atol=1e-5, rtol=1e-3)
