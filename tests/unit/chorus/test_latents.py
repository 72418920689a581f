"""Law 9 for bytes: what is truncated, altered or something else is detected; what is whole comes back exactly."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from chorus_batch.chorus.errors import CorruptLatents
from chorus_batch.chorus.evidence import Evidence
from chorus_batch.chorus.latents import pack, unpack


def trajectory(*steps: int) -> dict[int, torch.Tensor]:
    return {k: torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(k)) for k in steps}


PACKED = pack(trajectory(6, 8, 20), {"job": "7", "fingerprint": "ab"})


def test_float32_comes_back_bit_for_bit() -> None:
    latents, metadata, _ = unpack(PACKED)
    assert metadata == {"job": "7", "fingerprint": "ab"}
    assert list(latents) == [6, 8, 20]
    for k, expected in trajectory(6, 8, 20).items():
        assert torch.equal(latents[k], expected)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_half_precision_comes_back_as_float32_and_half_the_size(dtype: str, error: float) -> None:
    data = pack(trajectory(6, 8, 20), {}, dtype)
    latents = unpack(data).latents
    for k, expected in trajectory(6, 8, 20).items():
        assert latents[k].dtype == torch.float32
        torch.testing.assert_close(latents[k], expected, rtol=error, atol=1e-6)
        assert not torch.equal(latents[k], expected)
    assert len(data) < 0.6 * len(PACKED)


def test_the_same_trajectory_gives_the_same_bytes() -> None:
    assert pack(trajectory(20, 6, 8), {"fingerprint": "ab", "job": "7"}) == PACKED


def test_no_step_is_a_trajectory_too() -> None:
    assert unpack(pack({}, {"a": "b"})) == ({}, {"a": "b"}, None)


@given(st.integers(0, len(PACKED) - 1))
def test_truncation_is_detected(size: int) -> None:
    with pytest.raises(CorruptLatents):
        unpack(PACKED[:size])


@settings(max_examples=300)
@given(st.integers(0, len(PACKED) - 1), st.integers(1, 255))
def test_any_altered_byte_is_detected_or_harmless(position: int, flip: int) -> None:
    altered = bytearray(PACKED)
    altered[position] ^= flip
    try:
        latents, metadata, _ = unpack(bytes(altered))
    except CorruptLatents:
        return
    # Only bytes that mean nothing may differ: JSON's blanks.
    assert metadata == {"job": "7", "fingerprint": "ab"}
    assert all(torch.equal(latents[k], expected) for k, expected in trajectory(6, 8, 20).items())


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptLatents):
        unpack(data)


@pytest.mark.parametrize(
    "data",
    [
        save({"x_00006": torch.zeros(2)}),
        save({"x_00006": torch.zeros(2)}, {"chorus": "[]"}),
        save({"x_00006": torch.zeros(2)}, {"chorus": '{"format": "other", "metadata": {}, "sha256": ""}'}),
        save({"y": torch.zeros(2)}, {"chorus": '{"format": "chorus-trajectory/1", "metadata": {}, "sha256": ""}'}),
        pickle.dumps({6: [1.0]}),
    ],
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptLatents):
        unpack(data)


def test_what_is_not_finite_is_never_written() -> None:
    with pytest.raises(CorruptLatents, match=r"x\[3\]"):
        pack({3: torch.full((16, 1, 2, 2), float("nan"))}, {})
    with pytest.raises(CorruptLatents, match="float16"):
        pack({3: torch.full((16, 1, 2, 2), 1e6)}, {}, "float16")


def test_evidence_travels_with_the_latents() -> None:
    maps = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).reshape(2, 3, 2, 2)
    data = pack(trajectory(6, 8, 20), {}, evidence=Evidence(((0, 3), (4, 9)), maps))
    unpacked = unpack(data)
    assert unpacked.evidence is not None
    assert unpacked.evidence.spans == ((0, 3), (4, 9))
    assert torch.equal(unpacked.evidence.maps, maps)
    assert set(unpacked.latents) == {6, 8, 20}
    assert unpack(PACKED).evidence is None


def test_evidence_of_other_words_is_noticed() -> None:
    data = pack(
        trajectory(6, 8, 20), {}, evidence=Evidence(((0, 3), (4, 9)), torch.zeros(2, 3, 2, 2, dtype=torch.uint8))
    )
    for altered in (data.replace(b"[4, 9]", b"[4, 8]"), data.replace(b", [4, 9]", b"        ")):
        assert altered != data
        with pytest.raises(CorruptLatents):
            unpack(altered)
