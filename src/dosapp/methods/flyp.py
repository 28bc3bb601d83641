"""FLYP: fine-tune with the loss CLIP was pretrained with, task by task or jointly."""

from dosapp.methods.base import Method, method_dataclass


@method_dataclass
class FLYP(Method):
    """Fine-tune like you pretrain: all weights of both towers, the defaults of `Method`."""

    summary = "fine-tune all weights with the CLIP loss"
    reference = "Goyal et al., 2023"


@method_dataclass
class Joint(FLYP):
    """FLYP with all tasks in one session."""

    summary = "FLYP on all tasks at once: the upper bound"
    joint = True
