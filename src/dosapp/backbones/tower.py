"""What a tower is, and how it is run: one implementation for all families.

A tower embeds its input, applies transformer blocks, reads one token (or all) and pools it. A block
has two halves: attention, then the MLP, whose first layer has the paper's candidates. Everything
before the first block's MLP is the trunk: two models are equal there as long as only candidates
train. In the last block only a token that is read needs a query and an MLP; the others are keys and
values.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dosapp.backbones.base import TowerHooks


@dataclass(frozen=True)
class Block:
    """The parts of a transformer block, whatever its library calls them."""

    norm1: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_output: nn.Module
    head_dim: int
    norm2: nn.Module
    mlp: nn.Module
    first_mlp: Sequence[nn.Linear]  # inside `mlp`: the layers that read the block's tokens
    post_norm: bool = False  # norms follow the sum, as in BERT; otherwise they precede both halves

    @property
    def attention_modules(self) -> Sequence[nn.Module]:
        """The modules of the first half."""
        return self.norm1, self.query, self.key, self.value, self.attention_output

    def linear_layers(self) -> Iterator[nn.Linear]:
        """The linear layers of both halves."""
        for part in (*self.attention_modules, self.mlp):
            yield from (m for m in part.modules() if isinstance(m, nn.Linear))


def read_first(rows: Tensor) -> Tensor:
    """Index `[B]` of the first token."""
    return rows.new_zeros(rows.shape[0], dtype=torch.long)  # (an exporter follows shapes only)


def read_last(rows: Tensor) -> Tensor:
    """Index `[B]` of the last token."""
    return read_first(rows) + (rows.shape[1] - 1)


def read_all(rows: Tensor) -> None:
    """All tokens are read."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """What a family says about a tower; `B` inputs become `L` tokens of width `W`."""

    module: nn.Module  # the whole tower
    embeddings: nn.Module  # all that `embed` uses
    embed: Callable[[Tensor], Tensor]  # images or token ids → tokens [B, L, W]
    blocks: Sequence[Block]
    pool: Callable[[Tensor], Tensor]  # what is read, [B, W] or [B, L, W] → [B, W]
    projection: nn.Module = field(default_factory=nn.Identity)  # [B, W] → [B, D]
    # tokens or token ids → index [B] of the token that is read; None if all are
    read_at: Callable[[Tensor], Tensor | None] = read_first

    def trunk_modules(self) -> Iterator[nn.Module]:
        """The modules that are used before the first MLP."""
        yield self.embeddings
        yield from self.blocks[0].attention_modules


@dataclass(frozen=True, kw_only=True)
class ImageTower(Tower):
    """The tower of `[B, 3, image_size, image_size]`, normalised."""

    image_size: int
    resizable: bool = False  # takes other sizes as well: the checkpoint's preprocessing decides
    first_patch: int = 1  # index of the first patch; prompts of methods are placed before it
    tokens_norm: nn.Module = field(default_factory=nn.Identity)  # after prompts, before the blocks

    def trunk_modules(self) -> Iterator[nn.Module]:
        yield from super().trunk_modules()
        yield self.tokens_norm


@dataclass(frozen=True, kw_only=True)
class TextTower(Tower):
    """The tower of token ids `[C, L]`.

    In a causal tower padding after the end changes nothing, and a common beginning is computed
    once. Without `causal`, captions are padded to the longest and padding is masked, or, with
    `pad_to_max_length`, they are padded to `max_length` and padding takes part.
    """

    max_length: int
    causal: bool = False
    pad_to_max_length: bool = False


@dataclass(frozen=True)
class Tokens:
    """Sequences inside a tower.

    In a causal tower, sequences with a common beginning store it once: it cannot attend to what
    follows, so it is computed once, and all sequences attend to it.
    """

    rows: Tensor  # [B, L, W]
    read_at: Tensor | None  # [B]: index of the token whose output is the feature; None: all are
    shared_prefix: Tensor | None = None  # [1, H, W]
    causal: bool = False
    attended: bool = False  # the attention of the next block has been applied
    is_text: Tensor | None = None  # [B, L]: False where a token is masked padding

    def __getitem__(self, rows: slice) -> "Tokens":
        read_at = None if self.read_at is None else self.read_at[rows]
        is_text = None if self.is_text is None else self.is_text[rows]
        return replace(self, rows=self.rows[rows], read_at=read_at, is_text=is_text)

    def readout(self) -> Tensor:
        """The tokens whose output is read `[B, 1, W]`, or all `[B, L, W]`."""
        if self.read_at is None:
            return self.rows
        index = self.read_at[:, None, None].expand(-1, 1, self.rows.shape[2])
        return self.rows.gather(1, index)


def apply_block(block: Block, tokens: Tokens, prefix: Tensor | None, is_last: bool) -> Tokens:
    """One transformer block."""
    if not tokens.attended:
        tokens = apply_attention(block, tokens, prefix, is_last)
    return apply_mlp(block, tokens)


def run_blocks(
    blocks: Sequence[Block],
    tokens: Tokens,
    hooks: TowerHooks | None = None,
    apply: Callable[[Block, Tokens, Tensor | None, bool], Tokens] = apply_block,
) -> Tensor:
    """Apply all blocks of a tower and return what is read: `[B, W]`, or all tokens `[B, L, W]`."""
    hooks, part_input, last = hooks or TowerHooks(), tokens.rows, len(blocks) - 1
    for n, block in enumerate(blocks):
        is_last = n == last and n not in hooks.block_hooks and tokens.read_at is not None
        tokens = apply(block, tokens, hooks.prefixes.get(n), is_last)
        if n in hooks.block_hooks:
            part_input = hooks.block_hooks[n](part_input, tokens.rows)
            tokens = replace(tokens, rows=part_input)
    output = tokens.readout()
    return output if tokens.read_at is None else output.squeeze(1)


def apply_attention(
    block: Block, tokens: Tokens, prefix: Tensor | None = None, is_last: bool = False
) -> Tokens:
    """The first half of a block.

    Args:
        block: The block.
        tokens: Its input.
        prefix: Additional keys and values `[2, B, P, W]`.
        is_last: Keep only the token that is read.
    """
    rows, shared, normed = tokens.rows, tokens.shared_prefix, _attention_input(block, tokens.rows)
    keys, values = block.key(normed), block.value(normed)
    before = 0 if shared is None else shared.shape[1]
    mask = _causal_mask(rows, before) if tokens.causal else None  # [L, K]
    if shared is not None:
        shared_normed = _attention_input(block, shared)
        pair = block.key(shared_normed), block.value(shared_normed)
        prefix = torch.stack(pair).expand(2, rows.shape[0], -1, -1)
        shared_mask = _causal_mask(shared)
        shared = None if is_last else _attend(block, shared, shared_normed, *pair, shared_mask)
    if prefix is not None:
        keys, values = torch.cat([prefix[0], keys], dim=1), torch.cat([prefix[1], values], dim=1)
    if is_last:
        assert tokens.read_at is not None
        mask = None if mask is None else mask[tokens.read_at][:, None, None]  # [B, 1, 1, K]
        rows, normed = tokens.readout(), replace(tokens, rows=normed).readout()
        tokens = replace(tokens, read_at=torch.zeros_like(tokens.read_at))
    if tokens.is_text is not None:
        mask = tokens.is_text[:, None, None]  # [B, 1, 1, K]
    rows = _attend(block, rows, normed, keys, values, mask)
    return replace(tokens, rows=rows, shared_prefix=shared, attended=True)


def apply_mlp(block: Block, tokens: Tokens) -> Tokens:
    """The second half of a block."""

    def apply(x: Tensor) -> Tensor:
        if block.post_norm:
            normed: Tensor = block.norm2(x + block.mlp(x))
            return normed
        output: Tensor = x + block.mlp(block.norm2(x))
        return output

    shared = None if tokens.shared_prefix is None else apply(tokens.shared_prefix)
    return replace(tokens, rows=apply(tokens.rows), shared_prefix=shared, attended=False)


def _attention_input(block: Block, rows: Tensor) -> Tensor:
    normed: Tensor = rows if block.post_norm else block.norm1(rows)
    return normed


def _attend(
    block: Block, rows: Tensor, normed: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Rows `[B, L, W]` plus their attention over keys and values `[B, K, W]`."""

    def split_heads(x: Tensor) -> Tensor:  # [B, L, W] → [B, heads, L, W / heads]
        return x.view(*x.shape[:2], -1, block.head_dim).transpose(1, 2)

    queries = split_heads(block.query(normed))
    mixed = scaled_dot_product_attention(queries, split_heads(keys), split_heads(values), mask)
    output: Tensor = rows + block.attention_output(mixed.transpose(1, 2).flatten(2))
    return block.norm1(output) if block.post_norm else output


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
