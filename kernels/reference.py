"""The specification: each kernel's operation in plain torch, with diffusers' own order of operations and dtypes.

`rope` and `modulate` equal what diffusers 0.42's Wan transformer computes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import layer_norm


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, N, heads, D] by the tables cos and sin [1, N, 1, D], in x's dtype.

    Row n of the tables belongs to token n's place in the video, so gathered tokens bring gathered rows. Channels turn
    in pairs (2i, 2i+1), by cos[2i] and sin[2i+1] (WanAttnProcessor). Raises ValueError for other shapes.
    """
    check_rope(x, cos, sin)
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], cos[..., 0::2], sin[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm of x [B, N, C] over C in float32, times 1 + scale, plus shift, in x's dtype.

    `scale` and `shift` are [B, 1, C], or [B, N, C] where tokens have times of their own (WanTransformerBlock, norm1
    and norm3). Raises ValueError for other shapes.
    """
    check_modulate(x, scale, shift)
    return (layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift).type_as(x)


def key_gain(keys: torch.Tensor, indices: Sequence[int], gain: float) -> torch.Tensor:
    """A copy of keys [B, S, C] with the slots `indices` times `gain`: K[:, D] *= gamma_k (Chorus, TGAA).

    A slot named twice is amplified once; with gain 1 the bits stay. Raises ValueError for a slot outside 0..S-1.
    """
    check_key_gain(keys, indices)
    out = keys.clone()
    # One by one: indexing by a list would copy it to the device first, and wait.
    for slot in set(indices):
        out[:, slot].mul_(gain)
    return out


def check_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raises ValueError unless the shapes are those that `rope` takes."""
    if x.ndim != 4 or x.shape[3] % 2:
        raise ValueError(f"rope: x must be [B, N, heads, even D], not {list(x.shape)}")
    table = (1, x.shape[1], 1, x.shape[3])
    if cos.shape != table or sin.shape != table:
        raise ValueError(
            f"rope: for x {list(x.shape)} cos and sin must be {list(table)},"
            f" not {list(cos.shape)} and {list(sin.shape)}"
        )


def check_modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> None:
    """Raises ValueError unless the shapes are those that `modulate` takes."""
    shape = x.shape
    if len(shape) != 3:
        raise ValueError(f"modulate: x must be [B, N, C], not {list(shape)}")
    shared = (shape[0], 1, shape[2])
    if scale.shape not in (shared, shape) or shift.shape not in (shared, shape):
        raise ValueError(
            f"modulate: for x {list(x.shape)} scale and shift must be {list(shared)} or {list(x.shape)},"
            f" not {list(scale.shape)} and {list(shift.shape)}"
        )


def check_key_gain(keys: torch.Tensor, indices: Sequence[int]) -> None:
    """Raises ValueError unless keys is [B, S, C] and every index is one of its slots."""
    if keys.ndim != 3:
        raise ValueError(f"key_gain: keys must be [B, S, C], not {list(keys.shape)}")
    if wrong := [i for i in indices if not 0 <= i < keys.shape[1]]:
        raise ValueError(f"key_gain: keys {list(keys.shape)} have slots 0..{keys.shape[1] - 1}, not {wrong}")
