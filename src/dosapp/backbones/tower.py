"""The way through the blocks of a tower: one function for both towers.

A block has two halves: attention, then the MLP, whose first layer has the paper's candidates. All
that comes before the first block's MLP is the trunk, in which two experts do not differ as long as
only candidates move. In the last block only the token that is read needs a query and an MLP; the
others are keys and values.
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
    """Rows on their way through a tower.

    In a causal tower, rows that begin alike have their common beginning beside them: it cannot see
    what follows, so it is computed once, and the rows look back at it.
    """

    rows: Tensor  # [B, L, W]
    at: Tensor  # [B]: the token of each row that is read at the end
    head: Tensor | None = None  # [1, H, W]
    causal: bool = False
    attended: bool = False  # the next block's attention is behind them

    def read(self) -> Tensor:  # [B, 1, W]
        return self.rows.gather(1, self.at[:, None, None].expand(-1, 1, self.rows.shape[2]))


def apply_block(layer: Any, tokens: Tokens, prefix: Tensor | None, ending: bool) -> Tokens:
    if not tokens.attended:
        tokens = apply_attention(layer, tokens, prefix, ending)
    return apply_mlp(layer, tokens)


def run_blocks(
    layers: Sequence[nn.Module],
    tokens: Tokens,
    hooks: TowerHooks | None = None,
    through: Callable[[Any, Tokens, Tensor | None, bool], Tokens] = apply_block,
) -> Tensor:
    """The one place that goes through the blocks; what is read at the end `[B, W]`."""
    hooks, entered, last = hooks or TowerHooks(), tokens.rows, len(layers) - 1
    for n, layer in enumerate(layers):
        ending = n == last and n not in hooks.block_hooks
        tokens = through(layer, tokens, hooks.prefixes.get(n), ending)
        if n in hooks.block_hooks:
            entered = hooks.block_hooks[n](entered, tokens.rows)
            tokens = replace(tokens, rows=entered)
    return tokens.read().squeeze(1)


def apply_attention(
    layer: Any, tokens: Tokens, prefix: Tensor | None = None, ending: bool = False
) -> Tokens:
    """A block's first half; `prefix [2, B, P, W]` has more keys and values. If it is `ending`, only
    the token that is read goes on."""
    rows, head, seen = tokens.rows, tokens.head, layer.layer_norm1(tokens.rows)
    keys, values = _keys_values(layer, seen)
    mask = _causal(rows, 0 if head is None else head.shape[1]) if tokens.causal else None  # [L, K]
    if head is not None:
        above = layer.layer_norm1(head)
        pair = _keys_values(layer, above)
        prefix = torch.stack(pair).expand(2, rows.shape[0], -1, -1)
        head = None if ending else _attended(layer, head, above, *pair, _causal(head))
    if prefix is not None:
        keys, values = torch.cat([prefix[0], keys], dim=1), torch.cat([prefix[1], values], dim=1)
    if ending:
        mask = None if mask is None else mask[tokens.at][:, None, None]  # [B, 1, 1, K]
        rows, seen = tokens.read(), replace(tokens, rows=seen).read()
        tokens = replace(tokens, at=torch.zeros_like(tokens.at))
    rows = _attended(layer, rows, seen, keys, values, mask)
    return replace(tokens, rows=rows, head=head, attended=True)


def apply_mlp(layer: Any, tokens: Tokens) -> Tokens:
    """Its second half."""

    def alone(x: Tensor) -> Tensor:
        after: Tensor = x + layer.mlp(layer.layer_norm2(x))
        return after

    rows = alone(tokens.rows)
    head = None if tokens.head is None else alone(tokens.head)
    return replace(tokens, rows=rows, head=head, attended=False)


def _attended(
    layer: Any, rows: Tensor, seen: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Rows `[B, L, W]` with what they attend to at keys and values `[B, K, W]`."""
    own = layer.self_attn

    def heads(x: Tensor) -> Tensor:  # [B, L, W] → [B, heads, L, W / heads]
        return x.view(*x.shape[:2], -1, own.head_dim).transpose(1, 2)

    queries = heads(own.q_proj(seen))
    found = scaled_dot_product_attention(queries, heads(keys), heads(values), mask)
    after: Tensor = rows + own.out_proj(found.transpose(1, 2).flatten(2))
    return after


def _keys_values(layer: Any, seen: Tensor) -> tuple[Tensor, Tensor]:
    return layer.self_attn.k_proj(seen), layer.self_attn.v_proj(seen)


def _causal(rows: Tensor, before: int = 0) -> Tensor:
    """`[L, before + L]`: what each token adds to its attention; all see what is before them."""
    length = rows.shape[1]
    ahead = rows.new_full((length, length), -math.inf).triu(1)
    return torch.cat([rows.new_zeros(length, before), ahead], dim=1)


def compile_block(function: Callable[..., Tokens]) -> Callable[..., Tokens]:
    """By torch.compile, or as it is, with a sentence, where that cannot be had."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler speaks of its own future
            torch.compile(torch.neg)(torch.ones(2))
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:120]
        warnings.warn(f"torch.compile does not work here ({reason}); without it", stacklevel=3)
        return function
    torch._dynamo.config.recompile_limit = 64  # two towers, their ends, with and without gradients
    found: Callable[..., Tokens] = torch.compile(function, dynamic=True)
    return found


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its activations are computed again in the backward instead of kept."""
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
