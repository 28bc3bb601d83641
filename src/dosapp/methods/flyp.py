"""Fine-tuning with the loss CLIP was trained with, one task after the other or all at once."""

from dosapp.methods.base import Method, method_dataclass


@method_dataclass
class FLYP(Method):
    summary = "fine-tune every weight with CLIP's own loss"
    reference = "Goyal et al., 2023"


@method_dataclass
class Joint(FLYP):
    summary = "FLYP on all tasks at once: the upper bound"
    joint = True
