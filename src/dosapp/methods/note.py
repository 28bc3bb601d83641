"""NOTE: adapt to a class-balanced reservoir of the stream instead of to the current batch.

CLIP has no BatchNorm, so NOTE's instance-aware batch normalisation does not apply. This port keeps
the prediction-balanced reservoir and minimises the entropy in the image tower's LayerNorm weights.
The reservoir stores images: in memory and in checkpoints, in no version of a learner.
"""

from collections.abc import Mapping

import torch
from pydantic import PositiveInt
from torch import Tensor

from dosapp.functional.losses import entropy
from dosapp.methods.base import AdaptResult, Tensors, method_dataclass
from dosapp.methods.note_reservoir import BalancedReservoir
from dosapp.methods.tent import Tent
from dosapp.student.student import Student


@method_dataclass
class NOTE(Tent):
    """Tent on the images of a prediction-balanced reservoir."""

    summary = "Tent on a reservoir of the stream that is balanced by predicted class"
    reference = "Gong et al., 2022"
    abilities = frozenset({"corrupted data"})
    stores_data = True
    old_names = {"memory_size": "capacity"}

    memory_size: PositiveInt = 64  # images in the reservoir

    def setup(self, student: Student) -> None:
        self.reservoir = BalancedReservoir(self.memory_size)

    def begin_stream(self, student: Student) -> None:
        super().begin_stream(student)
        self.reservoir = BalancedReservoir(self.memory_size)  # there are new classes

    def stream_loss(self, student: Student, pixels: Tensor) -> AdaptResult:
        with torch.no_grad():
            labels = student.scaled_image_logits(pixels).argmax(dim=1)
        generator = student.rng("reservoir", self.reservoir.total_seen)
        for image, label in zip(pixels, labels.tolist(), strict=True):
            self.reservoir.add(image, label, generator)
        logits = student.scaled_image_logits(torch.stack(self.reservoir.images))
        # The released code averages over images and classes: entropy / C.
        return AdaptResult(labels, entropy(logits).mean() / logits.shape[1])

    def remove_class(self, index: int) -> None:
        self.reservoir = BalancedReservoir(self.memory_size)

    def working_state_dict(self) -> Tensors:
        return self.reservoir.state_dict()

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.reservoir = BalancedReservoir(self.memory_size)
        self.reservoir.load_state_dict(tensors)
