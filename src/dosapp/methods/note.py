"""NOTE: adapt to a small, class-balanced memory of the stream instead of to its last batch.

CLIP has no BatchNorm, so instance-aware batch normalisation has nothing to act on: what is left is
the prediction-balanced reservoir, with entropy minimised in the image tower's LayerNorm weights.
The reservoir holds pictures, so a learner with NOTE stores data; no version of it does.
"""

from collections.abc import Mapping

import torch
from pydantic import PositiveInt
from torch import Tensor

from dosapp.functional.losses import entropy
from dosapp.methods.base import AdaptResult, Tensors, method_dataclass
from dosapp.methods.reservoir import Reservoir
from dosapp.methods.tent import Tent
from dosapp.student.student import Student


@method_dataclass
class NOTE(Tent):
    summary = "Tent on a reservoir of the stream that is balanced by predicted class"
    reference = "Gong et al., 2022"
    abilities = frozenset({"corrupted data"})
    stores_data = True

    capacity: PositiveInt = 64  # pictures kept

    def setup(self, student: Student) -> None:
        self.reservoir = Reservoir(self.capacity)

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        self.reservoir = Reservoir(self.capacity)  # the classes are others now

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        with torch.no_grad():
            labels = student.image_logits(pixels).argmax(dim=1)
        generator = student.rng("reservoir", self.reservoir.offered)
        for picture, label in zip(pixels, labels.tolist(), strict=True):
            self.reservoir.offer(picture, label, generator)
        logits = student.image_logits(torch.stack(self.reservoir.images))
        # The mean over images and classes, as released: entropy over C.
        return AdaptResult(labels, entropy(logits).mean() / logits.shape[1])

    def remove_class(self, index: int) -> None:
        self.reservoir = Reservoir(self.capacity)

    def working_state_dict(self) -> Tensors:
        return self.reservoir.state()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.reservoir = Reservoir(self.capacity)
        self.reservoir.load(tensors)
