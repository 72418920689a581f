"""A mask as bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.chorus.errors import CorruptMask
from chorus_batch.chorus.masks import Mask, pack, unpack

GRIDS = st.tuples(*[st.integers(1, 9)] * 3)


@given(GRIDS, st.integers(0, 2**32))
def test_a_mask_comes_back(grid: tuple[int, int, int], seed: int) -> None:
    region = torch.rand(grid, generator=torch.Generator().manual_seed(seed)) < 0.5
    back = unpack(pack(Mask(region), "dog"), "dog").region
    assert back is not None and back.dtype == torch.bool and torch.equal(back, region)


def test_nothing_found_is_something_to_remember() -> None:
    assert unpack(pack(Mask(None), "dog"), "dog").region is None


def test_a_mask_takes_a_bit_for_each_token() -> None:
    # Wan2.1 at 480p, 81 frames.
    assert len(pack(Mask(torch.ones(21, 30, 52, dtype=torch.bool)), "dog")) < 21 * 30 * 52 / 8 + 400


def test_anything_else_is_refused() -> None:
    whole = pack(Mask(torch.eye(4, dtype=torch.bool)[None]), "dog")
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    grid = whole.replace(b"[1, 4, 4]", b"[4, 4, 1]")
    assert grid != whole
    for damaged in (changed, grid, whole[:-2], b"", b"nonsense", pack(Mask(None), "cat")):
        with pytest.raises(CorruptMask):
            unpack(damaged, "dog")
