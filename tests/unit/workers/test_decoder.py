"""Decoding where memory is short: once more in tiles, and then no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.wan_codec import WanCodec
from chorus_batch.chorus.wan_model import WanModel, WanSource
from chorus_batch.jobs import memory, registry
from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings
from chorus_batch.workers.decoder import TILED, Decoder

LATENTS = torch.randn(16, 1, 4, 40, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def card(wan_folder: Path, tmp_path: Path) -> ModelCard:
    return registry.add(Settings(data_dir=tmp_path), Asked("tiny", str(wan_folder), dtype="float32"))


@pytest.fixture
def engine(wan_folder: Path) -> Engine:
    return Engine(WanModel("tiny", WanSource(wan_folder, "0" * 64), dtype="float32", text_later=True))


def full(codec: WanCodec, monkeypatch: pytest.MonkeyPatch, *, tiles_too: bool = False) -> list[bool]:
    """The device has no room for a whole frame, or for anything. Returns how each decode was tried."""
    real, tried = codec.decode, []

    def decode(latents: torch.Tensor) -> torch.Tensor:
        tried.append(codec.tiling)
        if tiles_too or not codec.tiling:
            raise torch.OutOfMemoryError("out of memory")
        return real(latents)

    monkeypatch.setattr(codec, "decode", decode)
    return tried


def test_a_full_device_is_met_once_by_tiles(engine: Engine, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(engine, card, "cpu")
    whole, notes = decoder.decode(LATENTS)
    assert notes == ()
    codec = engine.model.codec
    codec.tiling = True
    tiles = engine.decode(LATENTS)
    assert not np.array_equal(tiles, whole)
    with monkeypatch.context() as patch:
        tried = full(codec, patch)
        frames, notes = decoder.decode(LATENTS)
    assert (tried, notes) == ([False, True], (TILED,))
    assert np.array_equal(frames, tiles)
    # The next one is tried whole again: by then there may be room.
    frames, notes = decoder.decode(LATENTS)
    assert (np.array_equal(frames, whole), notes) == (True, ())
    tried = full(codec, monkeypatch, tiles_too=True)
    with pytest.raises(torch.OutOfMemoryError):
        decoder.decode(LATENTS)
    assert tried == [False, True]


def test_tiles_from_the_start_where_the_plan_says_so(
    engine: Engine, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that says how much is free."""
    asked = []

    def free(device: str) -> tuple[int, int]:
        asked.append(device)
        return room[0], 80 * memory.GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 400)
    decoder = Decoder(engine, card, "cuda:1")
    assert card.anatomy is not None
    need = int(1.1 * memory._whole(card.anatomy, 320, 32, 1))
    room = [0]
    for room[0], notes in ((need - 600, ()), (need - 601, (TILED,))):
        assert decoder.decode(LATENTS)[1] == notes
    # Nobody knows of a card from before sizes were counted.
    assert Decoder(engine, replace(card, anatomy=None), "cuda:1").decode(LATENTS)[1] == ()
    assert asked == ["cuda:1", "cuda:1"]
