"""The gain on the text keys of differential tokens (Chorus, token-guided attention amplification)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from . import reference
from .choice import takes_triton


def key_gain(keys: torch.Tensor, indices: Sequence[int], gain: float, *, triton: bool | None = None) -> torch.Tensor:
    """A copy of keys [B, S, C] with the slots `indices` times `gain`, the others untouched: `reference.key_gain`.

    `triton` forces or forbids the Triton program, which serves CUDA tensors by default. Raises ValueError for a slot
    outside 0..S-1.
    """
    if not takes_triton(triton, keys):
        return reference.key_gain(keys, indices, gain)
    reference.check_key_gain(keys, indices)
    from . import programs

    slots, channels = keys.shape[1:]
    block, out = programs.block(channels), torch.empty_like(keys)
    chosen = _chosen(frozenset(indices), slots, keys.device)
    strides = out.stride(), keys.stride()
    return programs.launch(programs.amplify, block, out, keys, chosen, *strides, channels, float(gain), block)


@lru_cache(maxsize=16)
def _chosen(indices: frozenset[int], slots: int, device: torch.device) -> torch.Tensor:
    """Bytes [slots], 1 at the indices. Kept, since every layer of every step of a request asks for the same ones."""
    return torch.tensor([i in indices for i in range(slots)], dtype=torch.uint8, device=device)
