"""A learner's life in this process, alone or as one of several; its state goes to a file."""

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

LIVES = {
    "dosapp": {"method": "dosapp"},
    "replay": {"method": "dosapp", "buffer_size": 6},
    "flyp": {"method": "flyp", "adapt": "self-training"},
    "lwf": {"method": "lwf", "adapt": "tent"},
    "slca": {"method": "slca", "adapt": "eata"},
    "sparcl": {"method": "sparcl", "adapt": "note"},
    "l2p": {"method": "l2p", "adapt": "ecotta"},
    "zscl": {"method": "zscl", "options": {"references": "signs"}},
}


def live(settings: RunSettings) -> dict[str, torch.Tensor]:
    """Odd batches, so that shares differ; everything that was learned and every label given."""
    planned = plan(settings)
    load_dataset("signs", planned.backbone)  # pictures are drawn once, in single precision
    torch.set_default_dtype(torch.float64)  # or AdamW makes whole steps of rounding errors
    for weight in planned.backbone.weights().values():
        weight.data = weight.data.double()
    encoded = 0

    def counted(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal encoded
        encoded += len(inputs[0])

    planned.backbone.model.vision_model.post_layernorm.register_forward_pre_hook(counted)
    learner = Learner(planned.settings.learner(), planned.backbone)
    labels, losses = [], []
    for t in range(len(planned.scenario.task_groups)):
        session = planned.scenario.session(t)
        losses += [lesson.loss for lesson in learner.training_steps(session)]
        for pixels in session.unlabelled.batches(settings.stream_batch_size):
            guess = learner.adapt(pixels)
            labels += guess.labels.tolist() if guess else []
    found = {n: t.clone().contiguous() for n, t in learner.state().tensors.items()}
    torch.set_default_dtype(torch.float32)
    more = {"labels": labels, "losses": losses, "encoded": encoded}
    return found | {name: torch.tensor(value) for name, value in more.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed.process_group():
        for name, life in LIVES.items():
            small = {**SMALL, "batch_size": 7, "stream_batch_size": 5, "lr": 1e-4, **life}
            file = f"{name}-{distributed.rank()}-of-{distributed.world_size()}.safetensors"
            save_file(live(RunSettings.parse(small)), Path(sys.argv[1]) / file)
