"""Class statistics that predict instead of captions, and follow the features as these drift.

After a session the head keeps, for each class, the mean μ_c of its image features, and one pooled
scatter matrix: no image. Later training changes the features, so stored means become stale. A
*moved* head estimates the change from the unlabelled stream, whose images pass once:

    w_c(x) = exp(-κ ‖f_old(x) - μ_c‖² / σ²)     f_old: the expert before the last session
    D_c ← D_c + Σ_x w̃_c(x) (f_after(x) - f_before(x))   this step's own drift; Σ_x w̃_c(x) = 1
    D_c ← weighted mean of D_c and f_after(x) - f_old(x) over the images seen so far

σ² is the median over the batch of the smallest squared distance. The head's means are μ_c + D_c;
the next session begins by adding D_c to μ_c. Classes of the last session were measured after it,
so only the second line applies to them. Drift compensation with images of the *new* task is due to
Yu et al. (2020); here the stream has images of all classes. With `session_drift` both are used:
the last line is first taken with the session's own images, so that the means also move, though less
well, where no stream follows. A stream replaces this estimate.

The temperature of GDA's logits is chosen by cross-validation on the images of each session, when
these are added.

An *ensemble* keeps Gaussians of the pretrained model's features, too, and adds their logits.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dosapp.backbones.base import Backbone, Expert
from dosapp.backbones.wrappers import Ensemble
from dosapp.errors import InputError
from dosapp.functional.class_indices import remove_class_index
from dosapp.functional.drift import kernel_weights, merge_drift
from dosapp.functional.named_tensors import select_prefix
from dosapp.heads.base import Head, HeadExpert
from dosapp.heads.class_statistics import ClassStatistics
from dosapp.heads.frozen_ensemble import EnsembleHead, PairedExpert
from dosapp.heads.gaussian import GaussianHead, NearestMeanHead
from dosapp.heads.ranpac import RandomFeatureStatistics, RanPACHead
from dosapp.heads.temperature import Temperature, deal_folds
from dosapp.scenario import Session
from dosapp.settings import HeadKind
from dosapp.student.student import Student

ENCODE_BATCH_SIZE = 64
MIN_DRIFT_IMAGES = 16  # of a session; fewer show the drift of one class, not that of all
FOLDS = 5  # of a session's images, for the temperature


@dataclass
class ClassHead:
    """Statistics of the features of the method's expert, and how they move."""

    kind: HeadKind | None = None  # None: captions predict
    text_weight: float = 0.0  # of the captions' logits, beside GDA's or RanPAC's
    width: int = 2000  # random features of RanPAC
    seed: int = 0  # of these features
    # Whether images of a new session move the means of earlier classes; None: if the stream does.
    session_drift: bool | None = None
    with_pretrained: bool = False  # whether the pretrained model's Gaussians predict, too
    statistics: ClassStatistics = field(default_factory=ClassStatistics)  # means are μ_c + D_c
    frozen_statistics: ClassStatistics = field(default_factory=ClassStatistics)
    drift: dict[int, Tensor] = field(default_factory=dict)  # D_c of classes of earlier sessions
    seen_weight: dict[int, Tensor] = field(default_factory=dict)  # Σ w_c(x), scalars
    temperature: Temperature = field(default_factory=Temperature)  # of GDA's logits
    _wrapped: Expert | None = None  # what the expert below was made of
    _expert: HeadExpert | None = None
    _old: Backbone | None = None  # f_old
    _pretrained: Backbone | None = None  # the pretrained model

    def __post_init__(self) -> None:
        is_ranpac = self.kind == "ranpac"
        self._random = RandomFeatureStatistics(self.width, self.seed) if is_ranpac else None
        self._fitted = self._random or self.statistics
        if self.session_drift is None:
            self.session_drift = self.follows_stream

    @property
    def follows_stream(self) -> bool:
        """Whether it learns from the stream."""
        return self.kind is not None and self.kind.endswith("-moved")

    def setup(self, student: Student, expert: Expert) -> None:
        """Check the settings and make the copies of the weights; called once, before training."""
        if self.session_drift and not self.follows_stream:
            raise InputError(
                "head_session_drift goes with a head that the stream moves (ncm-moved, gda-moved, "
                f"or that of stream-gda), not with {self.kind or 'captions'}"
            )
        if self.with_pretrained and self.kind not in ("gda", "gda-moved"):
            raise InputError(
                "head_ensemble goes with head gda or gda-moved, or with that of stream-gda, not "
                f"with {self.kind or 'captions'}"
            )
        if (self.follows_stream or self.with_pretrained) and isinstance(expert, Ensemble):
            wrong = "head_ensemble" if self.with_pretrained else f"head '{self.kind}'"
            raise InputError(
                f"{wrong} needs a method that predicts with one expert, and this one predicts with "
                "student and teacher together; use a head without it or '-moved'"
            )
        if self.follows_stream:
            self._old = student.shared_copy()
        if self.with_pretrained:
            # Weights are shared until they train, and no method knows of this copy.
            self._pretrained = student.frozen_copy = student.shared_copy()

    def wrap_expert(self, expert: Expert) -> HeadExpert:
        """The expert with this head; the same object as long as the expert is."""
        scale = expert.logit_scale.detach()  # training may have changed it
        if self._expert is None or self._wrapped is not expert:
            self._wrapped = expert
            encoder = expert if self._pretrained is None else PairedExpert(expert, self._pretrained)
            self._expert = HeadExpert(encoder, self._make_head(scale))
        head = self._expert.head
        if isinstance(head, EnsembleHead):
            head.trained.scale, head.temperature = self.text_weight * scale, self.temperature.value
        elif isinstance(head, GaussianHead):
            head.scale, head.temperature = self.text_weight * scale, self.temperature.value
        else:
            assert isinstance(head, NearestMeanHead | RanPACHead)
            head.scale = scale
        return self._expert

    def _make_head(self, scale: Tensor) -> Head:
        if self._random is not None:
            return RanPACHead(self._random, scale, self.text_weight)
        if self.with_pretrained:
            return _make_ensemble(self.statistics, self.frozen_statistics, scale)
        is_nearest = self.kind in ("ncm", "ncm-moved")
        return (NearestMeanHead if is_nearest else GaussianHead)(self.statistics, scale)

    # Labelled phase

    def check_session(self, session: Session) -> None:
        """Called before anything of a session is learned; raises if a class has no images."""
        if self.kind is not None:
            session.check_images(f"head '{self.kind}' has no statistics of it")

    def begin_session(self, student: Student, expert: Expert) -> None:
        """Called before a weight changes: from here on, features drift away from these."""
        if self._old is None:
            return
        shared, own = expert.weights(), self._old.weights()
        student.load_copy(self._old, {n: w.detach() for n, w in shared.items() if own[n] is not w})
        self.drift = {c: torch.zeros_like(mean) for c, mean in self.statistics.means.items()}
        self.seen_weight = {c: mean.new_zeros(()) for c, mean in self.statistics.means.items()}

    @torch.no_grad()
    def end_session(self, student: Student, expert: Expert, session: Session) -> None:
        """Add the features of the session's images, as the method's expert encodes them now."""
        if self.kind is None:
            return
        batches = session.train.batches(ENCODE_BATCH_SIZE)
        features = torch.cat([expert.encode_image(pixels) for pixels in batches])
        indices = torch.tensor([student.classes.index(name) for name in session.classes])
        labels = indices[torch.from_numpy(session.train.labels)]
        frozen = features[:, :0]
        if self._pretrained is not None:
            batches = session.train.batches(ENCODE_BATCH_SIZE)
            frozen = torch.cat([self._pretrained.encode_image(pixels) for pixels in batches])
        if self.kind in ("gda", "gda-moved"):
            embeddings = student.text_head.class_embeddings(self.wrap_expert(expert))
            scale = self.text_weight * expert.logit_scale.detach()
            self._add_held_out(features, frozen, labels, scale, embeddings)
        shows_drift = len(features) >= MIN_DRIFT_IMAGES
        if self.session_drift and self._old is not None and self.drift and shows_drift:
            old = torch.cat(
                [self._old.encode_image(x) for x in session.train.batches(ENCODE_BATCH_SIZE)]
            )
            self._set_means(self._merge_drift(old, features, features))
            # Weight zero: the first batch of a stream, with images of all classes, replaces it.
            self.seen_weight = {c: torch.zeros_like(w) for c, w in self.seen_weight.items()}
        self._fitted.add_session(features, labels)
        if self._pretrained is not None:
            self.frozen_statistics.add_session(frozen, labels)
        for index in indices.tolist():
            self.drift.pop(index, None)  # its mean was measured just now
            self.seen_weight.pop(index, None)

    def _add_held_out(
        self, features: Tensor, frozen: Tensor, labels: Tensor, scale: Tensor, text_features: Tensor
    ) -> None:
        """Score each fifth of a session by statistics of the others and of earlier classes."""
        folds = deal_folds(labels, FOLDS)
        for fold in range(FOLDS):
            held_out = folds == fold
            if held_out.any():
                statistics = copy.deepcopy(self.statistics)
                statistics.add_session(features[~held_out], labels[~held_out])
                head: Head = GaussianHead(statistics, scale)
                if self.with_pretrained:
                    others = copy.deepcopy(self.frozen_statistics)
                    others.add_session(frozen[~held_out], labels[~held_out])
                    head = _make_ensemble(statistics, others, scale)
                paired = torch.cat([features, frozen], dim=1)[held_out]
                self.temperature.add(head.score(paired, text_features), labels[held_out])

    # Unlabelled phase

    @torch.no_grad()
    def move_means(self, pixels: Tensor, before: Tensor, expert: Expert) -> None:
        """Move the means by what a step on the stream did to the features of its images.

        Args:
            pixels: Images of the stream `[B, 3, H, W]`.
            before: Their features before the step `[B, D]`, of the method's expert.
            expert: The method's expert after the step.
        """
        if self._old is None or not self.statistics.means:
            return
        after = expert.encode_image(pixels).cpu().double()
        before = before.cpu().double()
        means = self.statistics.means
        moved: dict[int, Tensor] = {}
        if self.drift:
            moved |= self._merge_drift(self._old.encode_image(pixels), before, after)
        recent = [c for c in means if c not in self.drift]
        if recent:
            start = torch.stack([means[c] for c in recent])
            weights = kernel_weights(before, start)
            step = (weights / weights.sum(dim=0)).T @ (after - before)
            moved |= zip(recent, start + step, strict=True)
        self._set_means(moved)

    def _merge_drift(self, old: Tensor, before: Tensor, after: Tensor) -> dict[int, Tensor]:
        """Merge what images show into the drift of earlier classes, and return their means.

        Args:
            old: Features of the images before the session `[B, D]`.
            before: The same before the step.
            after: The same after it.
        """
        old, before, after = (x.cpu().double() for x in (old, before, after))
        known = list(self.drift)
        drift = torch.stack([self.drift[c] for c in known])  # [C, D]
        start = torch.stack([self.statistics.means[c] for c in known]) - drift  # μ_c
        seen = torch.stack([self.seen_weight[c] for c in known])  # [C]
        weights = kernel_weights(old, start)  # [B, C]
        drift, seen = merge_drift(drift, seen, weights, old, before, after)
        self.drift = dict(zip(known, drift.clone(), strict=True))
        self.seen_weight = dict(zip(known, seen.clone(), strict=True))
        return dict(zip(known, start + drift, strict=True))

    def _set_means(self, moved: Mapping[int, Tensor]) -> None:
        means = self.statistics.means
        self.statistics.means = {c: moved.get(c, mean).clone() for c, mean in means.items()}
        self.statistics.revision += 1

    # Classes and state

    def remove_class(self, index: int) -> None:
        """Drop a class; the indices of those after it decrease by one."""
        self._fitted.remove_class(index)
        if self.with_pretrained:
            self.frozen_statistics.remove_class(index)
        self.drift = remove_class_index(self.drift, index)
        self.seen_weight = remove_class_index(self.seen_weight, index)

    def shared_copies(self) -> Mapping[str, Backbone]:
        """Copies of the backbone, saved with the learner."""
        # The frozen copy is not saved: until weights are restored, it shares the pretrained ones.
        return {} if self._old is None else {"head-old": self._old}

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to save."""
        tensors = {f"statistics/{name}": t for name, t in self._fitted.state_dict().items()}
        frozen = self.frozen_statistics.state_dict()
        tensors |= {f"frozen/{name}": tensor for name, tensor in frozen.items()}
        if self.drift:
            tensors["drift/classes"] = torch.tensor(list(self.drift))
            tensors["drift/values"] = torch.stack(list(self.drift.values()))
            tensors["drift/seen"] = torch.stack(list(self.seen_weight.values()))
        if self.temperature.has_held_out:
            held_out = self.temperature.state_dict()
            tensors |= {f"temperature/{name}": tensor for name, tensor in held_out.items()}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        self._fitted.load_state_dict(select_prefix("statistics/", tensors))
        self.frozen_statistics.load_state_dict(select_prefix("frozen/", tensors))
        drift = {name: t.cpu() for name, t in select_prefix("drift/", tensors).items()}
        classes = drift["classes"].tolist() if drift else []
        self.drift = dict(zip(classes, drift["values"], strict=True)) if drift else {}
        self.seen_weight = dict(zip(classes, drift["seen"], strict=True)) if drift else {}
        self.temperature = Temperature()
        self.temperature.load_state_dict(select_prefix("temperature/", tensors))


def _make_ensemble(
    statistics: ClassStatistics, frozen_statistics: ClassStatistics, scale: Tensor
) -> EnsembleHead:
    frozen = GaussianHead(frozen_statistics, torch.zeros_like(scale))
    return EnsembleHead(GaussianHead(statistics, scale), frozen)
