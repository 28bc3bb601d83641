"""SLCA: a slow learner with classifier alignment.

CLIP's classifier is its two projections: they train faster than the towers, and are aligned after
each session.
"""

from dosapp.methods.alignment import ClassifierAlignment
from dosapp.methods.base import Batches, method_dataclass
from dosapp.student.student import Student
from dosapp.student.trainable_weights import Selection


@method_dataclass
class SLCA(ClassifierAlignment):
    """FLYP with faster projections, then classifier alignment (CA) with class statistics."""

    summary = "slow towers, fast projections, aligned on stored class statistics"
    phase = "labelled"
    title = "slca"
    old_names = {
        "classifier_lr_scale": "fast",
        "ca_epochs": "passes",
        "samples_per_step": "samples",
        "ca_temperature": "temperature",
    }

    def select_parameters(self, student: Student, batches: Batches) -> Selection:
        names = tuple(student.backbone.own_weights())
        return Selection(names, lr_scales=self.lr_scales(student))
