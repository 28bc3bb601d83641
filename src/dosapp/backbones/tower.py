"""The transformer blocks of a tower: one implementation for both towers.

A block has two halves: attention, then the MLP, whose first layer has the paper's candidates.
Everything before the first block's MLP is the trunk: two models are equal there as long as only
candidates train. In the last block only the token that is read needs a query and an MLP; the others
are keys and values.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dosapp.backbones.base import TowerHooks


@dataclass(frozen=True)
class Tokens:
    """Sequences inside a tower.

    In a causal tower, sequences with a common beginning store it once: it cannot attend to what
    follows, so it is computed once, and all sequences attend to it.
    """

    rows: Tensor  # [B, L, W]
    read_at: Tensor  # [B]: index of the token whose output is the feature
    shared_prefix: Tensor | None = None  # [1, H, W]
    causal: bool = False
    attended: bool = False  # the attention of the next block has been applied

    def readout(self) -> Tensor:
        """The tokens whose output is read `[B, 1, W]`."""
        index = self.read_at[:, None, None].expand(-1, 1, self.rows.shape[2])
        return self.rows.gather(1, index)


def apply_block(layer: Any, tokens: Tokens, prefix: Tensor | None, is_last: bool) -> Tokens:
    """One transformer block."""
    if not tokens.attended:
        tokens = apply_attention(layer, tokens, prefix, is_last)
    return apply_mlp(layer, tokens)


def run_blocks(
    layers: Sequence[nn.Module],
    tokens: Tokens,
    hooks: TowerHooks | None = None,
    block: Callable[[Any, Tokens, Tensor | None, bool], Tokens] = apply_block,
) -> Tensor:
    """Apply all blocks of a tower and return the token that is read `[B, W]`."""
    hooks, part_input, last = hooks or TowerHooks(), tokens.rows, len(layers) - 1
    for n, layer in enumerate(layers):
        is_last = n == last and n not in hooks.block_hooks
        tokens = block(layer, tokens, hooks.prefixes.get(n), is_last)
        if n in hooks.block_hooks:
            part_input = hooks.block_hooks[n](part_input, tokens.rows)
            tokens = replace(tokens, rows=part_input)
    return tokens.readout().squeeze(1)


def apply_attention(
    layer: Any, tokens: Tokens, prefix: Tensor | None = None, is_last: bool = False
) -> Tokens:
    """The first half of a block.

    Args:
        layer: A transformer layer of CLIP.
        tokens: Its input.
        prefix: Additional keys and values `[2, B, P, W]`.
        is_last: Keep only the token that is read.
    """
    rows, shared, normed = tokens.rows, tokens.shared_prefix, layer.layer_norm1(tokens.rows)
    keys, values = _keys_values(layer, normed)
    before = 0 if shared is None else shared.shape[1]
    mask = _causal_mask(rows, before) if tokens.causal else None  # [L, K]
    if shared is not None:
        shared_normed = layer.layer_norm1(shared)
        pair = _keys_values(layer, shared_normed)
        prefix = torch.stack(pair).expand(2, rows.shape[0], -1, -1)
        shared_mask = _causal_mask(shared)
        shared = None if is_last else _attend(layer, shared, shared_normed, *pair, shared_mask)
    if prefix is not None:
        keys, values = torch.cat([prefix[0], keys], dim=1), torch.cat([prefix[1], values], dim=1)
    if is_last:
        mask = None if mask is None else mask[tokens.read_at][:, None, None]  # [B, 1, 1, K]
        rows, normed = tokens.readout(), replace(tokens, rows=normed).readout()
        tokens = replace(tokens, read_at=torch.zeros_like(tokens.read_at))
    rows = _attend(layer, rows, normed, keys, values, mask)
    return replace(tokens, rows=rows, shared_prefix=shared, attended=True)


def apply_mlp(layer: Any, tokens: Tokens) -> Tokens:
    """The second half of a block."""

    def apply(x: Tensor) -> Tensor:
        output: Tensor = x + layer.mlp(layer.layer_norm2(x))
        return output

    shared = None if tokens.shared_prefix is None else apply(tokens.shared_prefix)
    return replace(tokens, rows=apply(tokens.rows), shared_prefix=shared, attended=False)


def _attend(
    layer: Any, rows: Tensor, normed: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Rows `[B, L, W]` plus their attention over keys and values `[B, K, W]`."""
    attention = layer.self_attn

    def split_heads(x: Tensor) -> Tensor:  # [B, L, W] → [B, heads, L, W / heads]
        return x.view(*x.shape[:2], -1, attention.head_dim).transpose(1, 2)

    queries = split_heads(attention.q_proj(normed))
    mixed = scaled_dot_product_attention(queries, split_heads(keys), split_heads(values), mask)
    output: Tensor = rows + attention.out_proj(mixed.transpose(1, 2).flatten(2))
    return output


def _keys_values(layer: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
    return layer.self_attn.k_proj(normed), layer.self_attn.v_proj(normed)


def _causal_mask(rows: Tensor, before: int = 0) -> Tensor:
    """`[L, before + L]`: added to attention scores; all tokens see the shared prefix."""
    length = rows.shape[1]
    future = rows.new_full((length, length), -math.inf).triu(1)
    return torch.cat([rows.new_zeros(length, before), future], dim=1)


def compile_block(function: Callable[..., Tokens]) -> Callable[..., Tokens]:
    """Compile with torch.compile; where that does not work, warn and return the function."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the compiler
            torch.compile(torch.neg)(torch.ones(2))
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:120]
        warnings.warn(
            f"torch.compile does not work here ({reason}); continuing without it", stacklevel=3
        )
        return function
    torch._dynamo.config.recompile_limit = 64  # two towers, last blocks, with and without gradients
    compiled: Callable[..., Tokens] = torch.compile(function, dynamic=True)
    return compiled


def checkpoint_activations(function: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute the function's activations in the backward pass instead of storing them."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
