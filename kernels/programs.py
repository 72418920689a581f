"""The Triton programs. Import it only to launch one: triton is optional, and takes its time.

Each program computes one token (axis 0) of one batch element (axis 1) in float32. Inputs come with their strides, so
none is copied; their dtypes may differ. Token and batch are 64-bit: their offsets pass 2^31 in long videos.
"""
# Triton carries no types, and reads a program's annotations as its own.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def block(length: int) -> int:
    """The elements that a program holds for `length` of them: Triton's blocks are powers of two, of pairs at least."""
    return max(2, int(triton.next_power_of_2(length)))


def launch(program: Any, elements: int, out: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Starts a program that holds so many elements for each token of `out` [B, N, ...]; returns `out`, to be filled.

    16 elements a thread, as far as that goes. Multiply and add stay two roundings, as in the reference: reading and
    writing take the time, not they.
    """
    with torch.cuda.device_of(out):
        program[(out.shape[1], out.shape[0])](
            out, *arguments, num_warps=min(16, max(1, elements // 512)), enable_fp_fusion=False
        )
    return out


@triton.jit
def rotate(
    out, x, cos, sin, out_strides, x_strides, cos_strides, sin_strides, heads, dim,
    head_block: tl.constexpr, dim_block: tl.constexpr,
):  # fmt: skip
    """All heads of a token: out and x [B, N, heads, dim], cos and sin [1, N, 1, dim]."""
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    h, d = tl.arange(0, head_block)[:, None], tl.arange(0, dim_block)[None, :]
    inside = (h < heads) & (d < dim)
    at = b * x_strides[0] + n * x_strides[1] + h * x_strides[2] + d * x_strides[3]
    values = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    # Whole rows are read and written, and taken apart in registers: every other element would cost twice the traffic.
    even, odd = tl.split(tl.reshape(values, (head_block, dim_block // 2, 2)))
    pair = tl.arange(0, dim_block // 2)
    c = tl.load(cos + n * cos_strides[1] + 2 * pair * cos_strides[3], mask=pair < dim // 2, other=0)
    s = tl.load(sin + n * sin_strides[1] + (2 * pair + 1) * sin_strides[3], mask=pair < dim // 2, other=0)
    c, s = c.to(tl.float32)[None, :], s.to(tl.float32)[None, :]
    turned = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (head_block, dim_block))
    at = b * out_strides[0] + n * out_strides[1] + h * out_strides[2] + d * out_strides[3]
    tl.store(out + at, turned, mask=inside)


@triton.jit
def normalize(
    out, x, scale, shift, out_strides, x_strides, scale_strides, shift_strides, channels, eps, block: tl.constexpr
):
    """All channels of a token: each tensor [B, N, channels], with stride 0 where one row serves all tokens."""
    n, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, block)
    inside = c < channels
    at = b * x_strides[0] + n * x_strides[1] + c * x_strides[2]
    values = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    # The mean first, then the squares around it: the difference of their sums would cancel where the mean is large.
    centred = tl.where(inside, values - tl.sum(values, 0) / channels, 0.0)
    normal = centred / tl.sqrt(tl.sum(centred * centred, 0) / channels + eps)
    at = b * scale_strides[0] + n * scale_strides[1] + c * scale_strides[2]
    factor = 1.0 + tl.load(scale + at, mask=inside, other=0).to(tl.float32)
    at = b * shift_strides[0] + n * shift_strides[1] + c * shift_strides[2]
    result = normal * factor + tl.load(shift + at, mask=inside, other=0).to(tl.float32)
    at = b * out_strides[0] + n * out_strides[1] + c * out_strides[2]
    tl.store(out + at, result, mask=inside)


@triton.jit
def amplify(out, keys, chosen, out_strides, keys_strides, channels, gain, block: tl.constexpr):
    """All channels of a slot of out and keys [B, S, channels]: times `gain` where `chosen` [S] isn't 0, else as is."""
    s, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.arange(0, block)
    inside = c < channels
    values = tl.load(keys + b * keys_strides[0] + s * keys_strides[1] + c * keys_strides[2], mask=inside, other=0)
    amplified = (values.to(tl.float32) * gain).to(values.dtype)
    result = tl.where(tl.load(chosen + s) != 0, amplified, values)
    tl.store(out + b * out_strides[0] + s * out_strides[1] + c * out_strides[2], result, mask=inside)
