"""DualPrompt: key and value prefixes in the attention of the first blocks of the image tower.

G-prompts are shared by all sessions. E-prompts have one row per session: in training, images use
the row of their session; otherwise the row with the nearest key.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor

from dosapp.backbones.base import Backbone, Pixels, TowerHooks
from dosapp.backbones.wrappers import find_wrapper
from dosapp.errors import InputError
from dosapp.methods.base import Batches, Tensors, method_dataclass
from dosapp.methods.prompt_tuning import KeyedPrompts, PromptMethod, uniform
from dosapp.runtime.plural import plural
from dosapp.runtime.rng import torch_rng
from dosapp.scenario import Session
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@dataclass
class SessionState:
    """Which E-prompts are in use; shared by a backbone and its copies."""

    count: int = 0  # sessions that have E-prompts
    training: bool = False  # every image uses the newest


class PrefixPrompts(KeyedPrompts):
    """G-prompts in the first blocks, E-prompts in the blocks after those."""

    keys = "dualprompt.keys"

    def __init__(
        self,
        inner: Backbone,
        *,
        pool_size: int,
        prompt_length: int,
        g_prompt_layers: int,
        e_prompt_layers: int,
        seed: int = 0,
    ) -> None:
        generator = torch_rng("dualprompt", seed)
        self.g_blocks = range(min(g_prompt_layers, inner.num_blocks))
        last = min(g_prompt_layers + e_prompt_layers, inner.num_blocks)
        self.e_blocks = range(len(self.g_blocks), last)
        shape = (2, prompt_length, inner.hidden_size)  # keys and values
        added = {
            "dualprompt.general": uniform(generator, len(self.g_blocks), *shape),
            "dualprompt.expert": uniform(generator, pool_size, len(self.e_blocks), *shape),
            self.keys: uniform(generator, pool_size, inner.embed_dim),
        }
        super().__init__(inner, added)
        self.sessions = SessionState()

    def pool_image(self, pixels: Pixels, hooks: TowerHooks | None = None) -> Tensor:
        similarities = self.similarities(pixels)[:, : max(1, self.sessions.count)]
        rows = similarities.argmax(dim=1)
        if self.sessions.training:
            rows = torch.full_like(rows, self.sessions.count - 1)
        self.key_similarity = similarities.gather(1, rows[:, None]).squeeze(1)
        # Prefixes of a block are [2, B, P, W].
        general = self.added["dualprompt.general"][:, :, None].expand(-1, -1, len(pixels), -1, -1)
        expert = self.added["dualprompt.expert"][rows].permute(1, 2, 0, 3, 4)
        blocks = (*self.g_blocks, *self.e_blocks)
        prefixes = dict(zip(blocks, (*general, *expert), strict=True))
        return self.inner.pool_image(pixels, replace(hooks or TowerHooks(), prefixes=prefixes))


@method_dataclass
class DualPrompt(PromptMethod):
    """G-prompts for all sessions and E-prompts for each; the towers stay frozen."""

    summary = "key and value prefixes in the first blocks, shared and per session"
    reference = "Wang et al., 2022"
    old_names = {
        **PromptMethod.old_names,
        "g_prompt_layers": "general",
        "e_prompt_layers": "expert",
    }

    pool_size: PositiveInt = 10  # sessions that can have E-prompts
    pull_constraint_coeff: NonNegativeFloat = 1.0
    g_prompt_layers: PositiveInt = 2  # number of blocks with G-prompts, from the first
    e_prompt_layers: PositiveInt = 3  # number of blocks with E-prompts, after those

    def wrap_backbone(self, backbone: Backbone, seed: int) -> Backbone:
        if backbone.num_blocks <= self.g_prompt_layers:
            warnings.warn(
                f"dualprompt has no E-prompts: g_prompt_layers is {self.g_prompt_layers}, and the "
                f"image tower has {plural(backbone.num_blocks, 'block')}; give fewer with --set "
                "g_prompt_layers=1",
                stacklevel=2,
            )
        return PrefixPrompts(
            backbone,
            pool_size=self.pool_size,
            prompt_length=self.prompt_length,
            g_prompt_layers=self.g_prompt_layers,
            e_prompt_layers=self.e_prompt_layers,
            seed=seed,
        )

    def setup(self, student: Student) -> None:
        super().setup(student)
        self.sessions = find_wrapper(student.backbone, PrefixPrompts).sessions

    def check_session(self, student: Student, session: Session) -> None:
        if self.sessions.count >= self.pool_size:
            raise InputError(
                f"dualprompt has prompts for {self.pool_size} sessions and this is number "
                f"{self.sessions.count + 1}; start again with --set pool_size={2 * self.pool_size}"
            )

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        """The G-prompts, and the new session's row of the E-prompts and keys."""
        prompts, mask = self.prompts(student), {}
        for name in ("dualprompt.expert", prompts.keys):
            mask[name] = torch.zeros_like(prompts.added[name], dtype=torch.bool)
            mask[name][self.sessions.count] = True
        return Selection(tuple(prompts.added), mask)

    def begin_session(self, student: Student, session: Session) -> None:
        super().begin_session(student, session)
        row = self.sessions.count
        if row > 0:  # E-prompts start from those of the previous session
            e_prompts = self.prompts(student).added["dualprompt.expert"].detach().clone()
            e_prompts[row] = e_prompts[row - 1]
            student.assign({"dualprompt.expert": e_prompts})
        self.sessions.count, self.sessions.training = row + 1, True

    def end_training(self, student: Student, session: Session) -> None:
        self.sessions.training = False

    def state_dict(self) -> Tensors:
        route = torch.tensor([self.sessions.count, self.sessions.training])
        return {**super().state_dict(), "route": route}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        count, training = tensors["route"].tolist()
        self.sessions.count, self.sessions.training = int(count), bool(training)
