"""The references equal diffusers' own code, bit for bit, and refuse what doesn't fit."""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from diffusers.models.transformers import transformer_wan as wan

from chorus_batch.kernels import reference
from chorus_batch.kernels.gain import key_gain
from chorus_batch.kernels.modulate import modulate
from chorus_batch.kernels.rope import rope

pytestmark = pytest.mark.usefixtures("seed")
DTYPES = [torch.float32, torch.bfloat16]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def diffusers_rope() -> Any:
    """The function that WanAttnProcessor.__call__ defines inside itself."""
    constants = wan.WanAttnProcessor.__call__.__code__.co_consts
    (code,) = [c for c in constants if isinstance(c, CodeType) and c.co_name == "apply_rotary_emb"]
    return FunctionType(code, vars(wan))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("table_dtype", DTYPES)
def test_rope_is_diffusers_own(dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    cos, sin = torch.randn(2, 1, 75, 1, 24, dtype=table_dtype)
    visible = torch.randperm(75)[:33].sort().values
    cos, sin = cos[:, visible], sin[:, visible]
    x = torch.randn(2, 33, 3, 24, dtype=dtype)
    expected = diffusers_rope()(x, cos, sin)
    assert same_bits(rope(x, cos, sin), expected)
    assert same_bits(reference.rope(x, cos, sin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_times", [False, True], ids=["times shared", "times of their own"])
def test_modulate_is_what_diffusers_block_computes(dtype: torch.dtype, own_times: bool) -> None:
    """Both modulations of a real block, caught where they enter the attention and the feed-forward."""
    batch, tokens, channels = 2, 33, 40
    block = wan.WanTransformerBlock(channels, 64, 2, cross_attn_norm=True).to(dtype).eval()
    x, text = torch.randn(batch, tokens, channels, dtype=dtype), torch.randn(batch, 7, channels, dtype=dtype)
    temb = torch.randn(batch, *([tokens] if own_times else []), 6, channels, dtype=dtype)
    caught: dict[str, torch.Tensor] = {}
    for name in ("attn1", "norm3", "ffn"):
        block.get_submodule(name).register_forward_pre_hook(
            lambda _, inputs, name=name: caught.update({name: inputs[0]})
        )
    table = torch.randn(1, tokens, 1, 20)
    with torch.inference_mode():
        block(x, text, temb, (table, table))
        parts = (block.scale_shift_table + temb.float()).chunk(6, dim=-2)
        shift1, scale1, _, shift3, scale3, _ = (p.squeeze(-2) if own_times else p for p in parts)
        assert same_bits(modulate(x, scale1, shift1, block.norm1.eps), caught["attn1"])
        x3 = caught["norm3"].to(dtype)  # handed over in float32, so nothing is lost on the way back
        assert same_bits(modulate(x3, scale3, shift3, block.norm3.eps), caught["ffn"])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_key_gain_touches_the_named_slots_of_a_copy(dtype: torch.dtype) -> None:
    keys = torch.randn(2, 33, 40, dtype=dtype)
    before = keys.clone()
    out = key_gain(keys, [5, 0, 32, 5], 1.375)
    assert same_bits(keys, before)
    named = torch.zeros(33, dtype=torch.bool)
    named[[0, 5, 32]] = True
    assert same_bits(out[:, ~named], keys[:, ~named])
    assert same_bits(out[:, named], (keys[:, named].double() * 1.375).to(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_key_gain_of_one_and_of_no_slot_keep_the_bits_in_a_new_tensor(dtype: torch.dtype) -> None:
    keys = torch.randn(1, 7, 40, dtype=dtype)
    keys[0, :, :4] = torch.tensor(
        [-0.0, float("inf"), float("-inf"), torch.finfo(dtype).smallest_normal / 2], dtype=dtype
    )
    for out in (key_gain(keys, range(7), 1), key_gain(keys, [], 2.0)):
        assert same_bits(out, keys)
        assert out.data_ptr() != keys.data_ptr()


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize(
    ("x", "cos", "sin", "named"),
    [
        ((2, 7, 24), (1, 7, 1, 24), (1, 7, 1, 24), ["[2, 7, 24]"]),
        ((2, 7, 3, 23), (1, 7, 1, 23), (1, 7, 1, 23), ["[2, 7, 3, 23]"]),
        ((2, 7, 3, 24), (1, 8, 1, 24), (1, 7, 1, 24), ["[2, 7, 3, 24]", "[1, 8, 1, 24]"]),
        ((2, 7, 3, 24), (1, 7, 1, 24), (1, 1, 1, 24), ["[1, 7, 1, 24]", "[1, 1, 1, 24]"]),
        ((2, 7, 3, 24), (1, 7, 1, 12), (1, 7, 1, 12), ["[1, 7, 1, 12]"]),
        ((2, 7, 3, 24), (2, 7, 1, 24), (2, 7, 1, 24), ["[2, 7, 1, 24]"]),
    ],
)
def test_rope_names_shapes_that_do_not_fit(
    x: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...], named: list[str], triton: bool
) -> None:
    with pytest.raises(ValueError, match=r"^rope: ") as caught:
        rope(torch.ones(x), torch.ones(cos), torch.ones(sin), triton=triton)
    assert all(shape in str(caught.value) for shape in named)


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize(
    ("x", "scale", "shift", "named"),
    [
        ((7, 24), (1, 24), (1, 24), ["[7, 24]"]),
        ((2, 7, 24), (2, 1, 24), (2, 6, 24), ["[2, 7, 24]", "[2, 6, 24]"]),
        ((2, 7, 24), (1, 1, 24), (2, 1, 24), ["[1, 1, 24]"]),
        ((2, 7, 24), (2, 1, 1), (2, 1, 24), ["[2, 1, 1]"]),
        ((2, 7, 24), (2, 1, 24), (24,), ["[24]"]),
    ],
)
def test_modulate_names_shapes_that_do_not_fit(
    x: tuple[int, ...], scale: tuple[int, ...], shift: tuple[int, ...], named: list[str], triton: bool
) -> None:
    with pytest.raises(ValueError, match=r"^modulate: ") as caught:
        modulate(torch.ones(x), torch.ones(scale), torch.ones(shift), 1e-6, triton=triton)
    assert all(shape in str(caught.value) for shape in named)


@pytest.mark.parametrize("triton", [False, True])
def test_key_gain_names_slots_and_shapes_that_do_not_fit(triton: bool) -> None:
    keys = torch.ones(1, 7, 8)
    for wrong in (7, -1, sys.maxsize):
        with pytest.raises(ValueError, match=rf"\[1, 7, 8\] have slots 0\.\.6, not \[{wrong}\]"):
            key_gain(keys, [0, wrong, 6], 2.0, triton=triton)
    with pytest.raises(ValueError, match=r"\[B, S, C\], not \[7, 8\]"):
        key_gain(keys[0], [0], 2.0, triton=triton)
