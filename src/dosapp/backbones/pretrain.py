"""Recipe of the embedded tiny CLIP: trained from scratch on generated images, on two CPU cores.

Every batch is drawn anew, so the model cannot overfit. The classes are disjoint from those of the
benchmark and of the control set (`Domain`), and the benchmark's light is harsher, so that zero-shot
accuracy on it leaves something to learn.
"""

import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dosapp.backbones.checkpoint import import_transformers
from dosapp.backbones.clip import CLIPBackbone
from dosapp.data.base import Prompts
from dosapp.data.preprocess import to_float
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.data.synthetic.signs import SIGNS
from dosapp.functional.losses import clip_loss

DOMAINS = (SHAPES, SIGNS)
TEMPLATES = (Prompts().train, "a picture of a {}.", "a {}.", "one {} in a photo.")
IMAGE_SIZE = 32
VISION = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
PROCESSING = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": IMAGE_SIZE},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

StepCallback = Callable[[int, float], None]  # step, loss


def train_tokenizer(vocabulary: int = 512) -> Any:
    """Train a byte-level BPE tokenizer; it encodes every string, also unseen class names."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    captions = [t.format(n) for d in DOMAINS for n in d.pretraining_names for t in TEMPLATES]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<pad>", "<start>", "<unk>", "<end>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 3)]
    )
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<start>", eos_token="<end>"
    )


def build_model(seed: int) -> CLIPBackbone:
    """Build the tiny CLIP with random weights."""
    transformers = import_transformers()
    tokenizer = train_tokenizer()
    # CLIPTextModel treats eos_token_id == 2 as "the highest id ends the text", for old checkpoints;
    # our end token is another one, so its id must not be 2.
    ids = {"bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    text = TEXT | ids | {"vocab_size": len(tokenizer)}
    torch.manual_seed(seed)
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=96)
    return CLIPBackbone(transformers.CLIPModel(config), tokenizer, PROCESSING, "tiny")


def pretrain(
    folder: Path,
    *,
    steps: int = 3400,
    batch_size: int = 256,
    lr: float = 1e-3,
    signs_share: float = 0.2,
    seed: int = 0,
    on_step: StepCallback = lambda step, loss: None,
) -> CLIPBackbone:
    """Train the tiny CLIP and write a folder that `--backbone` loads.

    Args:
        folder: Where to write; must not exist or be empty.
        steps: Training steps.
        batch_size: Images per step; each class occurs at most once in a batch.
        lr: Peak learning rate: linear warm-up, then a cosine schedule.
        signs_share: Share of the batches that are drawn from `signs`, the second domain.
        seed: Of the weights and of the images.
        on_step: Called after each step with its number, from 1, and its loss.

    Returns:
        The trained backbone.
    """
    backbone = build_model(seed)
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    weights = list(backbone.weights().values())
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.05, betas=(0.9, 0.98))
    warmup = min(200, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / max(warmup, 1), 0.5 * (1 + math.cos(math.pi * s / steps))),
    )
    for step in range(steps):
        domain = SIGNS if rng.random() < signs_share else SHAPES
        # Each class at most once in a batch: no false negatives.
        count = min(batch_size, len(domain.pretraining_names))
        names = rng.sample(domain.pretraining_names, count)
        pixels = to_float(domain.draw(names, IMAGE_SIZE, domain.pretraining_style, generator))
        template = rng.choice(TEMPLATES)
        images = backbone.encode_image(pixels)
        texts = backbone.encode_text([template.format(name) for name in names])
        loss = clip_loss(images, texts, backbone.logit_scale.clamp(max=100))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, loss.item())
    save_backbone(backbone, folder)
    return backbone


def save_backbone(backbone: CLIPBackbone, folder: Path) -> None:
    """Write a folder atomically: under a temporary name, then renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        complete = Path(temporary) / "model"
        backbone.save(complete)
        complete.rename(folder)
