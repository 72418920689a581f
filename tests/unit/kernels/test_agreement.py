"""The Triton programs against the references, interpreted on the CPU, and compiled for the GPUs they're meant for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorus_batch.kernels import reference
from chorus_batch.kernels.gain import key_gain
from chorus_batch.kernels.modulate import modulate
from chorus_batch.kernels.rope import rope

from .conftest import Run

pytestmark = pytest.mark.usefixtures("seed")

# Half types: both sides round nearly the same float32, the reference to nearest. So does the interpreter to float16,
# but to bfloat16 it cuts off; either way the results are at most one unit in the last place apart: 2^-10 or 2^-7.
RELATIVE = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", RELATIVE, ids=str)


def assert_agree(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual, expected, rtol=RELATIVE[expected.dtype], atol=1e-5)


def tables(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of random angles, every other row of a longer table.

    Each channel has an angle of its own, though the model gives both of a pair the same one: so a wrong one shows.
    """
    angles = torch.rand(1, 2 * tokens, 1, dim) * 6.3
    return angles.cos()[:, ::2], angles.sin()[:, ::2]


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (2, 7, 3, 40), (1, 33, 5, 96), (1, 0, 2, 8)], ids=str)
def test_rope(interpreted: Run, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, (cos, sin) = torch.randn(shape, dtype=dtype), tables(shape[1], shape[3])
    assert_agree(interpreted(rope, x, cos, sin), reference.rope(x, cos, sin))


def test_rope_of_views(interpreted: Run) -> None:
    dtype, (cos, sin) = torch.bfloat16, tables(7, 24)
    stored_by_head = torch.randn(2, 3, 7, 24, dtype=dtype).transpose(1, 2)
    query, key, _ = torch.randn(2, 7, 3 * 72, dtype=dtype).chunk(3, dim=-1)
    every_other = torch.randn(2, 7, 3, 48, dtype=dtype)[..., 1::2]
    for x in (stored_by_head, query.unflatten(2, (3, -1)), key.unflatten(2, (3, -1)), every_other):
        assert not x.is_contiguous()
        assert_agree(interpreted(rope, x, cos, sin), reference.rope(x, cos, sin))


def test_rope_by_half_precision_tables(interpreted: Run) -> None:
    x, (cos, sin) = torch.randn(1, 129, 4, 12, dtype=torch.bfloat16), tables(129, 12)
    cos, sin = cos.bfloat16(), sin.bfloat16()
    # The reference rounds two products, up to max |x| each, and their sum, each by 2^-8 of it; the interpreter cuts off
    # up to 2^-7 of the sum.
    bound = float(x.abs().max()) * (2 + 2 + 2 * 2) * 2**-8
    torch.testing.assert_close(interpreted(rope, x, cos, sin), reference.rope(x, cos, sin), rtol=0, atol=bound)


@DTYPES
@pytest.mark.parametrize("own_times", [False, True], ids=["times shared", "times of their own"])
@pytest.mark.parametrize("shape", [(1, 1, 96), (2, 7, 40), (1, 33, 384), (1, 0, 8), (1, 7, 1)], ids=str)
def test_modulate(interpreted: Run, shape: tuple[int, int, int], own_times: bool, dtype: torch.dtype) -> None:
    batch, tokens, channels = shape
    x = torch.randn(shape, dtype=dtype)
    # As the block cuts them: not contiguous.
    parts = torch.randn(batch, tokens if own_times else 1, 6, channels).chunk(6, dim=2)
    scale, shift = parts[1].squeeze(2), parts[3].squeeze(2)
    assert_agree(interpreted(modulate, x, scale, shift, 1e-6), reference.modulate(x, scale, shift, 1e-6))


def test_modulate_of_views_and_of_one_shift_for_all(interpreted: Run) -> None:
    x, scale, shift = torch.randn(1, 40, 129).mT, torch.randn(1, 129, 80)[..., ::2], torch.randn(1, 1, 40)
    assert not x.is_contiguous()
    assert_agree(interpreted(modulate, x, scale, shift, 1e-6), reference.modulate(x, scale, shift, 1e-6))


def test_modulate_far_from_zero_and_of_nothing_but_one_value(interpreted: Run) -> None:
    """The variance survives a mean a thousand times its root; without any, eps keeps the result finite."""
    scale, shift = torch.zeros(1, 1, 384), torch.zeros(1, 1, 384)
    far = torch.randn(1, 7, 384) + 1000
    # float32 holds the mean to a few times 2^-14; squares without it would be off by a tenth.
    expected = torch.nn.functional.layer_norm(far.double(), (384,)).float()
    torch.testing.assert_close(interpreted(modulate, far, scale, shift, 1e-5), expected, rtol=0, atol=1e-3)
    assert torch.equal(
        interpreted(modulate, torch.full((1, 7, 384), 3.0), scale, shift + 2, 1e-6), shift.expand(1, 7, -1) + 2
    )
    eps = torch.randn(1, 7, 384) * 1e-3
    assert_agree(interpreted(modulate, eps, scale, shift, 1e-2), reference.modulate(eps, scale, shift, 1e-2))


def test_modulate_by_a_half_precision_scale(interpreted: Run) -> None:
    x = torch.randn(1, 33, 96)
    scale, shift = torch.randn(1, 1, 96).bfloat16(), torch.randn(1, 1, 96).bfloat16()
    expected = reference.modulate(x, scale, shift, 1e-6)
    # The reference rounds 1 + scale to bfloat16, by 2^-8 of it.
    bound = float((expected - shift).abs().max()) * 2**-8
    torch.testing.assert_close(interpreted(modulate, x, scale, shift, 1e-6), expected, rtol=0, atol=1.01 * bound)


@DTYPES
@pytest.mark.parametrize(
    ("shape", "indices"),
    [((1, 1, 2), [0]), ((2, 7, 40), []), ((1, 33, 96), [32, 0, 5, 5]), ((1, 129, 384), range(100, 129))],
    ids=str,
)
def test_key_gain(interpreted: Run, shape: tuple[int, ...], indices: list[int], dtype: torch.dtype) -> None:
    keys = torch.randn(shape, dtype=dtype)
    out, expected = interpreted(key_gain, keys, indices, 1.3), reference.key_gain(keys, indices, 1.3)
    untouched = [s for s in range(shape[1]) if s not in indices]
    assert torch.equal(out[:, untouched], keys[:, untouched])
    if dtype is torch.bfloat16:
        assert_agree(out, expected)
    else:
        assert torch.equal(out, expected)  # one product, rounded once


def test_key_gain_of_views_and_of_other_slots_after_the_first(interpreted: Run) -> None:
    keys = torch.randn(2, 40, 7).mT
    for indices in ([1], [2, 3], [1]):
        out = interpreted(key_gain, keys, indices, 2)
        assert out.stride() == keys.stride()
        assert torch.equal(out, reference.key_gain(keys, indices, 2))
    assert torch.equal(interpreted(key_gain, keys.bfloat16(), range(7), 1), keys.bfloat16())


@pytest.mark.parametrize(("dtype", "capability"), [("bf16", 80), ("bf16", 90), ("fp16", 90), ("fp32", 90)])
def test_programs_compile(dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To machine code, at Wan2.1 14B's sizes: the interpreter takes much that the compiler doesn't."""
    pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from chorus_batch.kernels import programs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes: dict[Any, dict[str, int]] = {
        programs.rotate: {"head_block": 64, "dim_block": 128},
        programs.normalize: {"block": 8192},
        programs.amplify: {"block": 8192},
    }
    kinds = {"x": f"*{dtype}", "keys": f"*{dtype}", "out": f"*{dtype}", "chosen": "*u8", "eps": "fp32", "gain": "fp32"}
    kinds |= dict.fromkeys(["cos", "sin", "scale", "shift"], "*fp32") | dict.fromkeys(
        ["heads", "dim", "channels"], "i32"
    )
    for program, blocks in sizes.items():
        signature = {
            name: ("i32",) * 4 if name.endswith("strides") else kinds.get(name, "constexpr")
            for name in program.arg_names
        }
        source = ASTSource(program, signature, constexprs={(program.arg_names.index(n),): v for n, v in blocks.items()})
        assert compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 16, "enable_fp_fusion": False}
        ).asm["cubin"]
