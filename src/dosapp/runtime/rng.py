"""Random generators keyed by purpose and position: the same key gives the same numbers.

No generator keeps a running state, so any step can be repeated from its position alone.
"""

import hashlib

import numpy as np
import torch


def derive_seed(*key: object) -> int:
    """Hash a key into a seed."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def numpy_rng(*key: object) -> np.random.Generator:
    """A NumPy generator for a key, for example `numpy_rng("stream", seed, session)`."""
    return np.random.default_rng(derive_seed(*key))


def torch_rng(*key: object) -> torch.Generator:
    """A torch generator for a key, on the CPU."""
    return torch.Generator().manual_seed(derive_seed(*key))
