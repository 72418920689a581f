"""What a forward pass of a Wan transformer costs, counted from shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """How many blocks ran in one pass, and how many of their parts: a step cache may leave some out."""

    blocks: int
    self_attention: int
    text_attention: int
    feed_forward: int

    @classmethod
    def whole(cls, blocks: int) -> Work:
        """A pass in which everything ran."""
        return cls(blocks, blocks, blocks, blocks)


def tokens_of(config: Any, latent_shape: tuple[int, ...]) -> int:
    """Tokens of a latent [C, T, H, W]: one per patch."""
    return math.prod(size // patch for size, patch in zip(latent_shape[1:], config.patch_size, strict=True))


def text_flops(config: Any, slots: int) -> int:
    """Floating point operations of one branch's text, computed once per request: embedding, keys and values."""
    dim, blocks = _dim(config), config.num_layers
    flops: int = 2 * slots * (config.text_dim * dim + dim * dim + blocks * 2 * dim * dim)
    return flops


def forward_flops(config: Any, tokens: int, slots: int) -> int:
    """Floating point operations of one pass: `tokens` computed, `slots` text slots, batch of one, the text known.

    Two per multiply-add of every matrix product, convolution and attention; norms and activations aren't counted.
    """
    quadratic, linear = split_flops(config, slots)
    flops: int = quadratic * tokens * tokens + linear * tokens
    return flops


def split_flops(config: Any, slots: int) -> tuple[int, int]:
    """(a, b) of a pass's a*n^2 + b*n operations for n tokens: attention between tokens, and all the rest.

    What a step needs whatever n is (its time's embedding) is a few million operations and left out.
    """
    dim = _dim(config)
    per_block = 4 * dim * dim + 2 * dim * dim + 2 * slots * dim + 2 * dim * config.ffn_dim
    return 2 * config.num_layers * 2 * dim, 2 * (config.num_layers * per_block + _ends(config))


def work_flops(config: Any, tokens: int, slots: int, work: Work) -> int:
    """What `forward_flops` counts, of a pass in which no more than `work` ran."""
    dim = _dim(config)
    flops: int = 2 * (
        work.self_attention * (4 * tokens * dim * dim + 2 * tokens * tokens * dim)
        + work.text_attention * (2 * tokens * dim * dim + 2 * slots * tokens * dim)
        + work.feed_forward * 2 * tokens * dim * config.ffn_dim
        + tokens * _ends(config)
    )
    return flops


def _ends(config: Any) -> int:
    """Multiply-adds a token of what lies before and behind the blocks."""
    ends: int = _dim(config) * math.prod(config.patch_size) * (config.in_channels + config.out_channels)
    return ends


def _dim(config: Any) -> int:
    dim: int = config.num_attention_heads * config.attention_head_dim
    return dim
