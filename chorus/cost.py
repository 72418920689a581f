"""What a forward pass of a Wan transformer costs, counted from shapes."""

from __future__ import annotations

import math
from typing import Any


def tokens_of(config: Any, latent_shape: tuple[int, ...]) -> int:
    """Tokens of a latent [C, T, H, W]: one per patch."""
    return math.prod(size // patch for size, patch in zip(latent_shape[1:], config.patch_size, strict=True))


def forward_flops(config: Any, tokens: int, slots: int) -> int:
    """Floating point operations of one pass: `tokens` video tokens, `slots` text slots, batch of one.

    Two per multiply-add of every matrix product, convolution and attention; norms and activations aren't counted.
    """
    dim, blocks, ffn = config.num_attention_heads * config.attention_head_dim, config.num_layers, config.ffn_dim
    patch = math.prod(config.patch_size)
    self_attention = 4 * tokens * dim * dim + 2 * tokens * tokens * dim
    cross_attention = 2 * tokens * dim * dim + 2 * slots * dim * dim + 2 * tokens * slots * dim
    per_block = self_attention + cross_attention + 2 * tokens * dim * ffn
    ends = tokens * dim * patch * (config.in_channels + config.out_channels)
    text = slots * (config.text_dim * dim + dim * dim)
    time = config.freq_dim * dim + dim * dim + 6 * dim * dim
    flops: int = 2 * (blocks * per_block + ends + text + time)
    return flops
