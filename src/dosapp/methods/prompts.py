"""L2P and DualPrompt: leave the network alone and learn what to add to its input.

Which prompts a picture gets is decided by the nearest keys to its feature without any. Class logits
are CLIP's own, over frozen captions, instead of a linear head. In a session only its classes are
told apart; replayed pictures are told apart from all.
"""

from collections.abc import Mapping

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from dosapp.backbones.base import Backbone
from dosapp.backbones.wrappers import find_wrapper
from dosapp.errors import InputError
from dosapp.functional.losses import masked_cross_entropy
from dosapp.methods.base import Batch, Batches, Method, Tensors, method_dataclass
from dosapp.methods.prompting import Keyed, Pool, Prefixes
from dosapp.scenario import Session
from dosapp.student.selection import Selection
from dosapp.student.student import Student


@method_dataclass
class Prompted(Method):
    """What both have in common: what they learn, and from which loss."""

    pool: PositiveInt = 10
    length: PositiveInt = 5
    pull: NonNegativeFloat = 0.1  # of keys to the features they were chosen for

    def prompts(self, student: Student) -> Keyed:
        return find_wrapper(student.backbone, Keyed)

    def setup(self, student: Student) -> None:
        self.current = torch.zeros(0, dtype=torch.long)  # classes of the session

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        return Selection(tuple(self.prompts(student).extra))

    def begin_session(self, student: Student, session: Session) -> None:
        self.current = torch.tensor([student.classes.index(name) for name in session.classes])

    def loss(self, student: Student, batch: Batch) -> Tensor:
        logits = student.image_logits(batch.pixels)
        allowed = batch.replayed[:, None].repeat(1, logits.shape[1])
        allowed[:, self.current] = True
        loss = masked_cross_entropy(logits, batch.labels, allowed)
        near = self.prompts(student).near[~batch.replayed]  # a set's key is for its own session
        return loss - self.pull * near.mean()

    def state_dict(self) -> Tensors:
        return {"current": self.current}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.current = tensors["current"]


@method_dataclass
class L2P(Prompted):
    summary = "a pool of prompts beside the patches, chosen for each picture by key"
    reference = "Wang et al., 2022"

    take: PositiveInt = 5  # prompts per picture
    together: bool = False  # the batch's most frequent prompts for all of it, as released

    def __post_init__(self) -> None:
        if self.take > self.pool:
            raise ValueError(f"cannot take {self.take} of {self.pool} prompts")

    def wrap_backbone(self, net: Backbone, seed: int) -> Backbone:
        return Pool(net, self.pool, self.length, self.take, self.together, seed)


@method_dataclass
class DualPrompt(Prompted):
    summary = "key and value prefixes in the first blocks, general ones and one set per session"
    reference = "Wang et al., 2022"

    pool: PositiveInt = 10  # sessions that can have a set
    pull: NonNegativeFloat = 1.0
    general: PositiveInt = 2  # blocks with general prefixes, from the first
    expert: PositiveInt = 3  # blocks with the session's, after those

    def wrap_backbone(self, net: Backbone, seed: int) -> Backbone:
        return Prefixes(net, self.pool, self.length, self.general, self.expert, seed)

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.route = find_wrapper(student.backbone, Prefixes).route

    def check_session(self, student: Student, session: Session) -> None:
        known = self.route.known
        if known >= self.pool:
            raise InputError(
                f"dualprompt has prefixes for {self.pool} sessions and this is number "
                f"{known + 1}; start again with --set pool={2 * self.pool}"
            )

    def select_parameters(self, student: Student, lessons: Batches) -> Selection:
        """The general prefixes, and the new session's row of the others."""
        prompts = self.prompts(student)
        row, mask = self.route.known, {}
        for name in ("dualprompt.expert", prompts.keys):
            mask[name] = torch.zeros_like(prompts.extra[name], dtype=torch.bool)
            mask[name][row] = True
        return Selection(tuple(prompts.extra), mask)

    def begin_session(self, student: Student, session: Session) -> None:
        super().begin_session(student, session)
        row = self.route.known
        sets = self.prompts(student).extra["dualprompt.expert"].detach().clone()
        if row > 0:  # a new set begins where the last one ended
            sets[row] = sets[row - 1]
            student.assign({"dualprompt.expert": sets})
        self.route.known, self.route.teaching = row + 1, True

    def end_training(self, student: Student, session: Session) -> None:
        self.route.teaching = False

    def state_dict(self) -> Tensors:
        route = torch.tensor([self.route.known, self.route.teaching])
        return {**super().state_dict(), "route": route}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        known, teaching = tensors["route"].tolist()
        self.route.known, self.route.teaching = int(known), bool(teaching)
