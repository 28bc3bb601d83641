"""Fine-tuning with the loss CLIP was trained with, one task after the other or all at once."""

from dosapp.methods.base import Method, settings


@settings
class FLYP(Method):
    idea = "fine-tune every weight with CLIP's own loss"
    reference = "Goyal et al., 2023"


@settings
class Joint(FLYP):
    idea = "FLYP on all tasks at once: the upper bound"
    joint = True
