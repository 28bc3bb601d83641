"""The recipe of the embedded tiny CLIP: from nothing, on generated pictures, on two cores.

Pictures are drawn anew for every batch, so there is nothing to overfit; the compositions they show
are disjoint from the benchmark's and the control's (`Domain`). Random noise, light and clutter of
moderate strength make the features usable, but not comfortable, in the benchmark's harsher light.
"""

import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dosapp.backbones.clip import CLIPBackbone, import_transformers
from dosapp.data.base import Prompts
from dosapp.data.synthetic.shapes import SHAPES
from dosapp.data.synthetic.signs import SIGNS
from dosapp.functional.losses import clip_loss

DOMAINS = (SHAPES, SIGNS)
TEMPLATES = (Prompts().train, "a picture of a {}.", "a {}.", "one {} in a photo.")
PIXELS = 32
VISION = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": PIXELS,
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
    "size": {"shortest_edge": PIXELS},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": PIXELS, "width": PIXELS},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

ProgressCallback = Callable[[int, float], None]


def tokenizer(vocabulary: int = 512) -> Any:
    """Byte-level BPE: every string has tokens, so that a name never seen is still a name."""
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


def untrained(seed: int) -> CLIPBackbone:
    library = import_transformers()
    words = tokenizer()
    # CLIPTextModel reads `eos_token_id == 2` as "the highest id ends the text", a habit of old
    # checkpoints; ours has its end token elsewhere, so it must not be 2.
    ids = {"bos_token_id": 1, "eos_token_id": words.eos_token_id, "pad_token_id": 0}
    text = TEXT | ids | {"vocab_size": len(words)}
    torch.manual_seed(seed)
    config = library.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=96)
    return CLIPBackbone(library.CLIPModel(config), words, PROCESSING, "tiny")


def pretrain(
    folder: Path,
    *,
    steps: int = 3400,
    batch: int = 256,
    lr: float = 1e-3,
    signs: float = 0.2,
    seed: int = 0,
    watch: ProgressCallback = lambda step, loss: None,
) -> CLIPBackbone:
    """Train and write a folder that `--backbone` loads; `signs` is the second domain's share."""
    net = untrained(seed)
    generator, choice = torch.Generator().manual_seed(seed), random.Random(seed)
    weights = list(net.weights().values())
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.05, betas=(0.9, 0.98))
    warmup = min(200, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / max(warmup, 1), 0.5 * (1 + math.cos(math.pi * s / steps))),
    )
    for step in range(steps):
        domain = SIGNS if choice.random() < signs else SHAPES
        # Each composition at most once in a batch: no false negatives.
        names = choice.sample(domain.pretraining_names, min(batch, len(domain.pretraining_names)))
        pictures = domain.draw(names, PIXELS, domain.pretraining_style, generator).float() / 255
        template = choice.choice(TEMPLATES)
        images = net.encode_image(pictures)
        texts = net.encode_text([template.format(name) for name in names])
        loss = clip_loss(images, texts, net.logit_scale.clamp(max=100))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        watch(step + 1, loss.item())
    write(net, folder)
    return net


def write(net: CLIPBackbone, folder: Path) -> None:
    """A whole folder or none: written beside its place and moved there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
        made = Path(beside) / "model"
        net.save(made)
        made.rename(folder)
