"""A backbone, the classes it has met, and the one place where weights change.

A method says what may move (`set_trainable`) and what is wrong (`step`); it never touches a weight.
Twins of the student (teachers, anchors) are made, moved and kept apart here too.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import normalize

from dosapp.backbones.base import Backbone, Captions, Expert, Pixels
from dosapp.data.base import Prompts
from dosapp.errors import DivergedError
from dosapp.functional.ema import ema_update
from dosapp.functional.losses import clip_loss
from dosapp.functional.masks import Mask, Scores, gradient_scores, iter_gradients
from dosapp.functional.named_tensors import bits_differ, select_prefix
from dosapp.runtime import distributed
from dosapp.runtime.rng import torch_rng
from dosapp.settings import PAPER_LR
from dosapp.student.selection import Selection
from dosapp.student.sparse_parameter import (
    SparseParameter,
    keep_if_few,
    mask_indices,
    union_indices,
)

INITIAL_LOSS_SCALE = 2.0**10  # of losses in float16, at first


class Student:
    def __init__(
        self,
        net: Backbone,
        *,
        lr: float = PAPER_LR,
        weight_decay: float = 0.2,
        seed: int = 0,
        half: bool = False,
    ) -> None:
        self.backbone = net
        self.lr, self.weight_decay, self.seed = lr, weight_decay, seed
        self.classes: list[str] = []
        self.prompts: dict[str, Prompts] = {}
        self.selection = Selection()  # what may move now
        self.session_selection = Selection()  # what the lessons chose; adapters inherit it
        self.stream_skew = 0.0  # of the stream: 1 makes teachers follow as slowly as they ever do
        self.steps = 0
        self.all_class_negatives = (
            False  # whether captions of classes a batch lacks are its negatives too
        )
        self.weights_assigned = False  # by `assign`, since the last step
        self.trained_names: set[str] = set()  # every weight that was ever allowed to move
        self._parameters: dict[str, SparseParameter] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        # In float16 a small gradient would be zero: losses are scaled up, and gradients down again.
        kind = net.logit_scale.device.type
        self._scaler = torch.amp.GradScaler(kind, init_scale=INITIAL_LOSS_SCALE, enabled=half)
        self._differing: dict[str, Tensor | None] = {}  # where twins can differ; None: anywhere
        self._copies: weakref.WeakSet[Backbone] = weakref.WeakSet()
        self._texts: weakref.WeakKeyDictionary[Expert, tuple[object, Tensor]] = (
            weakref.WeakKeyDictionary()
        )
        for weight in net.weights().values():
            weight.requires_grad_(False)

    # Classes

    def add_classes(self, classes: Sequence[str], prompts: Prompts) -> None:
        """Add the classes that are new; their captions come with them."""
        for name in classes:
            if name not in self.prompts:
                self.classes.append(name)
            self.prompts[name] = prompts

    def caption(self, name: str) -> str:
        return self.prompts[name].caption(name)

    # Looking

    def encode_captions(self, net: Expert | None = None) -> Tensor:
        """Features `[C, D]` of the training caption of every class met."""
        return (net or self.backbone).encode_text([self.caption(name) for name in self.classes])

    def encode_shared_trunk(self, pixels: Tensor, twin: Backbone) -> tuple[Pixels, Captions]:
        """A batch and the caption of every class met, for the student and a twin: what both would
        compute alike is done. Where their trunks differ nothing is."""
        captions = [self.caption(name) for name in self.classes]
        mine, theirs = self.backbone.trunk_weights(), twin.trunk_weights()
        if any(theirs[name] is not mine[name] for name in mine):
            return pixels, captions
        return self.backbone.encode_image_trunk(pixels), self.backbone.encode_text_trunk(captions)

    @torch.no_grad()
    def class_embeddings(self, net: Expert, names: Mapping[str, Prompts]) -> Tensor:
        """Evaluation features `[C, D]`: the mean over templates, cached until a weight moves.
        Captions of one template go together: they have their beginning in common."""
        key = (net.revision, tuple(names.items()))
        cached = self._texts.get(net)
        if cached is None or cached[0] != key:
            found: dict[str, Tensor] = {}
            for prompts in dict.fromkeys(names.values()):
                group = [name for name in names if names[name] == prompts]
                texts = [net.encode_text([t.format(n) for n in group]) for t in prompts.evaluate]
                means = normalize(torch.stack(texts).mean(dim=0), dim=-1)
                found |= zip(group, means, strict=True)
            cached = (key, torch.stack([found[name] for name in names]))
            self._texts[net] = cached
        return cached[1]

    def logits(self, pixels: Tensor, net: Expert | None = None) -> Tensor:
        """Cosines `[B, C]` with the training captions, as the unlabelled phase compares them."""
        net = net or self.backbone
        return net.encode_image(pixels) @ self.encode_captions(net).T

    def image_logits(self, pixels: Tensor) -> Tensor:
        """Scaled logits `[B, C]` in which only the image side can move, as in ports of classifiers
        to CLIP."""
        with torch.no_grad():
            texts = self.encode_captions()
        return self.backbone.logit_scale.detach() * self.backbone.encode_image(pixels) @ texts.T

    def rng(self, *words: object) -> torch.Generator:
        """Random numbers for a purpose at this step: the same again when the step is repeated."""
        return torch_rng(*words, self.seed, self.steps)

    def encode_pairs(
        self, pixels: Tensor, labels: Tensor, net: Backbone | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features `[B, D]` of images and of the captions of their classes, each encoded once."""
        net = net or self.backbone
        present, place = labels.unique(return_inverse=True)
        texts = net.encode_text([self.caption(self.classes[i]) for i in present.tolist()])
        return net.encode_image(pixels), texts[place]

    def clip_loss(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Each image against the caption of its class, and against those of others if wanted."""
        images, texts = self.encode_pairs(pixels, labels)
        return clip_loss(
            images, texts, self.backbone.logit_scale, self.encode_absent_captions(labels)
        )

    def encode_absent_captions(self, labels: Tensor) -> Tensor | None:
        """Features `[R, D]` of the captions of all classes that are not these, if wanted."""
        present = set(labels.tolist())
        absent = [self.caption(c) for n, c in enumerate(self.classes) if n not in present]
        return self.backbone.encode_text(absent) if self.all_class_negatives and absent else None

    def score_weights(self, weights: Mapping[str, Tensor], losses: Iterable[Tensor]) -> Scores:
        """How much each weight would like to move (Eq. 1); nothing moves yet."""
        return gradient_scores(self.iter_gradients(losses, weights))

    def iter_gradients(
        self, losses: Iterable[Tensor], weights: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """For each loss in turn; nothing moves. The same in every process."""
        # The steps' scale grows until it overflows, which costs them a step; here it would a mask.
        scale = INITIAL_LOSS_SCALE if self._scaler.is_enabled() else 1.0
        with self._gradients_enabled(weights):
            for found in (
                iter_gradients(weights, (loss * scale for loss in losses)) if weights else ()
            ):
                distributed.average_gradients(list(found.values()))
                if not all(bool(g.isfinite().all()) for g in found.values()):
                    raise DivergedError(
                        f"a gradient is not finite after {self.steps} steps with learning rate "
                        f"{self.lr:g}; try a smaller one, or --precision float32"
                    )
                yield found if scale == 1 else {n: g / scale for n, g in found.items()}

    @contextmanager
    def _gradients_enabled(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let gradients of these weights be asked for, without letting the weights move."""
        resting = [weight for weight in weights.values() if not weight.requires_grad]
        for weight in resting:
            weight.requires_grad_(True)
        try:
            yield
        finally:
            for weight in resting:
                weight.requires_grad_(False)

    # Moving

    def select(self, selection: Selection) -> None:
        """What a session's lessons move, and adapters after it unless they have their own."""
        self.session_selection = selection
        self.set_trainable(selection)

    def drop_scores(self) -> None:
        """Whoever wanted to know why has read them; they are as large as the weights they rank."""
        self.session_selection = self.selection = replace(self.selection, scores=None)

    def set_trainable(self, selection: Selection) -> None:
        """Choose what may move from now on, with a fresh optimizer."""
        for entries in self._parameters.values():
            entries.release()
        weights = self.backbone.weights()
        for twin in self._copies:
            theirs = twin.weights()
            twin.materialize([n for n in selection.names if theirs[n] is weights[n]])
        self.selection = selection
        self.trained_names.update(selection.names)
        mask = selection.mask or {}
        self._parameters = {n: SparseParameter(weights[n], mask.get(n)) for n in selection.names}
        for name, entries in self._parameters.items():
            known = self._differing.get(name, entries.where)
            self._differing[name] = keep_if_few(
                union_indices(known, entries.where), entries.weight.numel()
            )
        self._optimizer = None
        if self._parameters:
            towers = (
                self.backbone.tower_weights()
            )  # what a method adds has no reason to be near zero
            groups = [
                {
                    "params": [e.values],
                    "usual": self.lr * selection.lr_scales.get(n, 1.0),
                    "weight_decay": self.weight_decay if n in towers else 0.0,
                }
                for n, e in self._parameters.items()
            ]
            self._optimizer = torch.optim.AdamW(groups)

    def change_mask(self, mask: Mask) -> None:
        """Train other entries of the same tensors. Those in both masks keep their Adam moments; new
        ones start from zero moments but with the tensor's count of steps, so bias correction does
        not scale them: their first updates can be a few times as large as Adam's usual first."""
        kept = {
            n: {key: self._parameters[n].spread(t) if t.ndim else t for key, t in state.items()}
            for n, state in self._moments().items()
        }
        inherited = self.session_selection is self.selection
        self.set_trainable(replace(self.selection, mask={**(self.selection.mask or {}), **mask}))
        if inherited:
            self.session_selection = self.selection
        assert self._optimizer is not None
        for name, state in kept.items():
            entries = self._parameters[name]
            self._optimizer.state[entries.values] = {
                key: entries.gather(t) if t.ndim else t for key, t in state.items()
            }

    def step(self, loss: Tensor, rate: float = 1.0) -> bool:
        """One optimizer step; entries outside the selection stay bit-identical.

        A loss of exactly zero (a contrastive batch of one) teaches nothing: no step is taken, so
        that weight decay and old moments do not act alone. Says whether a step was taken.
        """
        if not torch.isfinite(loss):
            raise DivergedError(
                f"the loss became {loss.item()} at step {self.steps} with learning rate "
                f"{self.lr:g}; try a smaller one, for example --lr {self.lr / 10:g}"
            )
        if self._optimizer is None or loss.item() == 0 or rate == 0:
            return False
        self._optimizer.zero_grad(set_to_none=True)
        scale = self._scaler.get_scale()
        self._scaler.scale(loss).backward()
        found = [e.values.grad for e in self._parameters.values() if e.values.grad is not None]
        distributed.average_gradients(found)
        for entries in self._parameters.values():
            entries.refresh()
        for group in self._optimizer.param_groups:
            group["lr"] = group["usual"] * rate
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scaler.get_scale() < scale:  # the gradient was not finite, and no step was taken
            return False
        for entries in self._parameters.values():
            entries.scatter()
        self.steps += 1
        self.backbone.revision += 1
        self.weights_assigned = False
        return True

    def last_gradients(self) -> dict[str, Tensor]:
        """Of the last step, zero where nothing may move; gone with the next."""
        return {
            name: entries.spread(entries.values.grad)
            for name, entries in self._parameters.items()
            if entries.values.grad is not None
        }

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor], where: Mask | None = None) -> None:
        """Set weights, everywhere or where the mask is True: restores and ensembles."""
        weights = self.backbone.weights()
        for name, value in values.items():
            weight = weights[name]
            weight.copy_(value if where is None else torch.where(where[name], value, weight))
            if where is None:
                self._differing[name] = None  # `where` lies inside what may move, which is known
        self.backbone.revision += 1
        self.weights_assigned = True

    # Twins

    def shared_copy(self) -> Backbone:
        """A second expert. It shares each tensor with the student until that tensor may move."""
        twin = self.backbone.shared_copy(self.selection.names)
        self._copies.add(twin)
        return twin

    @torch.no_grad()
    def load_copy(self, twin: Backbone, values: Mapping[str, Tensor]) -> None:
        """Put a twin where it was."""
        weights = twin.weights()
        for name, value in values.items():
            weights[name].copy_(value)
        twin.revision += 1

    def sync_copy(self, twin: Backbone) -> None:
        """Make a twin equal to the student again."""
        mine, theirs = self.backbone.weights(), twin.weights()
        self.load_copy(twin, {n: mine[n].detach() for n in mine if theirs[n] is not mine[n]})

    def find_differences(self) -> None:
        """Look where twins really differ, after weights were put in place from outside."""
        mine = self.backbone.weights()
        for name, entries in self._parameters.items():
            others = [twin.weights()[name] for twin in self._copies]
            found = [bits_differ(other, mine[name]) for other in others if other is not mine[name]]
            moved = torch.stack(found).any(dim=0) if found else torch.zeros_like(mine[name]).bool()
            self._differing[name] = keep_if_few(
                union_indices(mask_indices(moved), entries.where), moved.numel()
            )

    def ema_update(self, teacher: Backbone, *, active: float, frozen: float) -> None:
        """Move a twin towards the student: `active` inside the mask, `frozen` outside."""
        active += (frozen - active) * self.stream_skew
        mine, theirs = self.backbone.weights(), teacher.weights()
        apart = {n: theirs[n] for n in theirs if theirs[n] is not mine[n]}
        chosen, mask = self.selection, self.selection.mask or {}
        # Chosen without a mask: all of it moves. Not chosen: it rests now.
        where = {n: mask.get(n, n in chosen.names) for n in apart}
        known = {n: at for n, at in self._differing.items() if at is not None}
        ema_update(apart, mine, where, active=active, frozen=frozen, apart=known)
        teacher.revision += 1

    # Saving: what the next step needs besides the weights

    def optimizer_state(self) -> dict[str, Tensor]:
        moments = {
            f"{name}/{key}": value
            for name, state in self._moments().items()
            for key, value in state.items()
        }
        scaler = self._scaler.state_dict()  # empty unless it is in use
        return moments | {f"scaler/{key}": torch.tensor(value) for key, value in scaler.items()}

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        scaler = select_prefix("scaler/", state)
        self._scaler.load_state_dict({key: value.item() for key, value in scaler.items()})
        for path, value in state.items():
            name, _, key = path.rpartition("/")
            if name == "scaler":
                continue
            assert self._optimizer is not None
            self._optimizer.state[self._parameters[name].values][key] = value.clone()

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        if self._optimizer is None:
            return {}
        states = self._optimizer.state
        return {n: states[e.values] for n, e in self._parameters.items() if e.values in states}
