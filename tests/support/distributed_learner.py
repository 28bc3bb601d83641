"""Train learners in this process, alone or as one of several, and write their states to files."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dosapp.data.registry import load_dataset
from dosapp.experiments.plan import plan
from dosapp.learner.learner import Learner
from dosapp.runtime import distributed
from dosapp.settings import RunSettings
from support.settings import SMALL

CASES = {
    "dosapp": {"method": "dosapp"},
    "replay": {"method": "dosapp", "buffer_size": 6},
    "flyp": {"method": "flyp", "adapt": "self-training"},
    "lwf": {"method": "lwf", "adapt": "tent"},
    "slca": {"method": "slca", "adapt": "eata"},
    "sparcl": {"method": "sparcl", "adapt": "note"},
    "l2p": {"method": "l2p", "adapt": "ecotta"},
    "zscl": {"method": "zscl", "options": {"ref_dataset": "signs"}},
}


def train(settings: RunSettings) -> dict[str, torch.Tensor]:
    """The state after all sessions, with all pseudo-labels, losses and the encoded rows."""
    planned = plan(settings)
    load_dataset("signs", planned.backbone.preprocess)  # images are drawn in single precision
    torch.set_default_dtype(torch.float64)  # AdamW would turn rounding errors into whole steps
    for weight in planned.backbone.weights().values():
        weight.data = weight.data.double()
    encoded = 0

    def count_rows(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal encoded
        encoded += len(inputs[0])

    planned.backbone.model.vision_model.post_layernorm.register_forward_pre_hook(count_rows)
    learner = Learner(planned.settings.learner(), planned.backbone)
    labels, losses = [], []
    for t in range(len(planned.scenario.task_groups)):
        session = planned.scenario.session(t)
        losses += [step.loss for step in learner.training_steps(session)]
        for pixels in session.unlabelled.batches(settings.stream_batch_size):
            result = learner.adapt(pixels)
            labels += result.labels.tolist() if result else []
    tensors = {n: t.clone().contiguous() for n, t in learner.state().tensors.items()}
    torch.set_default_dtype(torch.float32)
    measured = {"labels": labels, "losses": losses, "encoded": encoded}
    return tensors | {name: torch.tensor(value) for name, value in measured.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed.process_group():
        for name, changes in CASES.items():
            # Odd batch sizes, so that the processes get different numbers of rows.
            values = {**SMALL, "batch_size": 7, "stream_batch_size": 5, "lr": 1e-4, **changes}
            file = f"{name}-{distributed.rank()}-of-{distributed.world_size()}.safetensors"
            save_file(train(RunSettings.parse(values)), Path(sys.argv[1]) / file)
