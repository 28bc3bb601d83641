"""Random numbers for a purpose and a place in time: the same words, the same numbers.

Nothing here is a running generator, so any step can be done again from its position alone.
"""

import hashlib

import numpy as np
import torch


def derive_seed(*words: object) -> int:
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def numpy_rng(*words: object) -> np.random.Generator:
    return np.random.default_rng(derive_seed(*words))


def torch_rng(*words: object) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*words))
