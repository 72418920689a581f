"""Rotary embedding of gathered tokens, in one pass over the queries or keys."""

from __future__ import annotations

import torch

from . import reference
from .choice import takes_triton


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, triton: bool | None = None) -> torch.Tensor:
    """Rotary embedding of x [B, N, heads, D] by cos and sin [1, N, 1, D]: `reference.rope`.

    `triton` forces or forbids the Triton program, which serves CUDA tensors by default. It computes in float32, so
    with tables of half precision it rounds less often than the reference. Raises ValueError for other shapes.
    """
    if not takes_triton(triton, x, cos, sin):
        return reference.rope(x, cos, sin)
    reference.check_rope(x, cos, sin)
    from . import programs

    heads, dim = x.shape[2:]
    head_block, dim_block = programs.block(heads), programs.block(dim)
    out = torch.empty_like(x)
    strides = [t.stride() for t in (out, x, cos, sin)]
    return programs.launch(
        programs.rotate, head_block * dim_block, out, x, cos, sin, *strides, heads, dim, head_block, dim_block
    )
