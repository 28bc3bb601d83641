"""CoFiMA: average the weights of two sessions, each entry weighted by its Fisher information."""

from collections.abc import Iterator, Mapping

import torch
from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosapp.backbones.base import Backbone
from dosapp.functional.ema import lerp
from dosapp.functional.fisher import fisher_information
from dosapp.functional.named_tensors import select_prefix
from dosapp.methods.base import Fraction, Tensors, method_dataclass
from dosapp.methods.staged import Stage
from dosapp.scenario import Session
from dosapp.student.student import Student

BATCH_SIZE = 64  # images per gradient of the Fisher information


@method_dataclass
class CoFiMA(Stage):
    """θ ← ((1 - α) F_old θ_old + α F θ) / ((1 - α) F_old + α F), from the second session on.

    θ_old are the weights at the start of the session, F_old is from the end of the previous one.
    """

    summary = "average the weights before and after a session by their Fisher information"
    reference = "Marouf et al., 2024"
    role = "merging"

    wt_alpha: Fraction = 0.5  # α
    fishermax: PositiveFloat = 1e-4  # upper bound of the Fisher information

    def setup(self, student: Student) -> None:
        self.previous: Backbone = student.shared_copy()  # θ_old
        self.fisher: dict[str, Tensor] = {}  # F_old
        self.sessions = 0

    def begin_session(self, student: Student, session: Session) -> None:
        self.sessions += 1
        student.sync_copy(self.previous)

    def end_training(self, student: Student, session: Session) -> None:
        weights = student.backbone.weights()
        trained = {name: weights[name] for name in sorted(student.ever_selected)}
        losses = self.session_losses(student, session)
        fisher = fisher_information(student.iter_gradients(trained, losses))
        fisher = {name: f.clamp(max=self.fishermax) for name, f in fisher.items()}
        if self.sessions > 1:
            previous = self.previous.weights()
            merged = {
                name: lerp(previous[name], weight.detach(), self.share(fisher[name], name))
                for name, weight in trained.items()
            }
            student.assign(merged)
        self.fisher = fisher

    def session_losses(self, student: Student, session: Session) -> Iterator[Tensor]:
        """Cross-entropy over all classes, batch by batch of the session's images."""
        index = torch.tensor([student.classes.index(name) for name in session.classes])
        labels = index[torch.from_numpy(session.train.labels)].split(BATCH_SIZE)
        for pixels, targets in zip(session.train.batches(BATCH_SIZE), labels, strict=True):
            logits = student.backbone.logit_scale * student.score_images(pixels)
            yield cross_entropy(logits, targets.to(logits.device))

    def share(self, fisher: Tensor, name: str) -> Tensor:
        """α F / ((1 - α) F_old + α F), the share of the new weights; α where both are zero."""
        old = self.fisher.get(name, fisher)  # a weight that trains for the first time: α
        total = (1 - self.wt_alpha) * old + self.wt_alpha * fisher
        alpha = torch.full_like(fisher, self.wt_alpha)
        return torch.where(total > 0, self.wt_alpha * fisher / total, alpha)

    def end_session(self, student: Student, session: Session) -> None:
        # Also after an alignment: teachers follow.
        student.weights_assigned = self.sessions > 1 and bool(self.fisher)

    def shared_copies(self) -> Mapping[str, Backbone]:
        return {"previous": self.previous}

    def state_dict(self) -> Tensors:
        fisher = {f"fisher/{name}": f for name, f in self.fisher.items()}
        return {"sessions": torch.tensor(self.sessions), **fisher}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        self.sessions = int(tensors["sessions"])
        self.fisher = select_prefix("fisher/", tensors)
