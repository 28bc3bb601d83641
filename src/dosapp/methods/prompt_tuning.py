"""What L2P and DualPrompt share: keyed prompts beside a frozen backbone, and their loss.

An image's feature without prompts is the query; the keys nearest to it select its prompts. Logits
are CLIP's own, against fixed captions, instead of a linear head's. New images are classified among
the classes of their session, replayed images among all classes.
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import Pixels
from dosapp.backbones.wrappers import BackboneWrapper, find_wrapper
from dosapp.functional.losses import masked_cross_entropy
from dosapp.methods.base import Batch, Batches, Method, Tensors, method_dataclass
from dosapp.scenario import Session
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


def uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """Uniform in [-1, 1)."""
    return torch.rand(shape, generator=generator) * 2 - 1


class KeyedPrompts(BackboneWrapper):
    """Prompts with keys around a frozen backbone.

    `key_similarity [B]` is how similar the selected keys were to the queries of the last batch.
    """

    keys: str  # name of the tensor of keys
    key_similarity: Tensor

    def similarities(self, pixels: Pixels) -> Tensor:
        """Cosines `[B, keys]` of the images' queries with the keys."""
        with torch.no_grad():
            queries = self.inner.encode_image(pixels)  # [B, D], without prompts
        return queries @ normalize(self.added[self.keys], dim=-1).T


@method_dataclass
class PromptMethod(Method):
    """Train the prompts: masked cross-entropy - coefficient · similarity of keys and queries."""

    old_names = {"pool_size": "pool", "prompt_length": "length", "pull_constraint_coeff": "pull"}

    pool_size: PositiveInt = 10  # M
    prompt_length: PositiveInt = 5  # tokens of a prompt
    pull_constraint_coeff: NonNegativeFloat = 0.1  # of the keys to their queries

    def prompts(self, student: Student) -> KeyedPrompts:
        """The prompts around the student's backbone."""
        return find_wrapper(student.backbone, KeyedPrompts)

    def setup(self, student: Student) -> None:
        self.current = torch.zeros(0, dtype=torch.long)  # class indices of the loss

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        return Selection(tuple(self.prompts(student).added))

    def begin_session(self, student: Student, session: Session) -> None:
        # One class alone is classified among all: among itself there is nothing to learn.
        names = session.classes if len(session.classes) > 1 else student.classes
        self.current = torch.tensor([student.classes.index(name) for name in names])

    def loss(self, student: Student, batch: Batch) -> Tensor:
        logits = student.scaled_image_logits(batch.pixels)
        allowed = batch.replayed[:, None].repeat(1, logits.shape[1])
        allowed[:, self.current] = True
        loss = masked_cross_entropy(logits, batch.labels, allowed)
        # Replayed images do not pull: a key belongs to the images of its own session.
        similarity = self.prompts(student).key_similarity[~batch.replayed]
        return loss - self.pull_constraint_coeff * similarity.mean()

    def state_dict(self) -> Tensors:
        return {"current": self.current}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.current = tensors["current"]
