"""LayerNorm, scale and shift in one pass over the tokens."""

from __future__ import annotations

import torch

from . import reference
from .choice import takes_triton


def modulate(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float, *, triton: bool | None = None
) -> torch.Tensor:
    """LayerNorm of x [B, N, C] in float32, times 1 + scale, plus shift [B, 1, C] or [B, N, C]: `reference.modulate`.

    `triton` forces or forbids the Triton program, which serves CUDA tensors by default. It computes in float32, so
    with a scale of half precision it rounds less often than the reference. Raises ValueError for other shapes.
    """
    if not takes_triton(triton, x, scale, shift):
        return reference.modulate(x, scale, shift, eps)
    reference.check_modulate(x, scale, shift)
    from . import programs

    # A row that serves all tokens gets the stride 0.
    scale, shift, out = scale.expand_as(x), shift.expand_as(x), x.new_empty(x.shape)
    strides = [t.stride() for t in (out, x, scale, shift)]
    channels, block = x.shape[2], programs.block(x.shape[2])
    return programs.launch(programs.normalize, block, out, x, scale, shift, *strides, channels, eps, block)
