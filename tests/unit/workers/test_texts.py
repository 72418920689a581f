"""Text features through a real object store: encoded once, the same bits, and never from a damaged object."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import UMT5EncoderModel

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import CorruptFeatures
from chorus_batch.chorus.features import pack, unpack
from chorus_batch.chorus.request import Request
from chorus_batch.chorus.wan_model import WanModel, WanSource
from chorus_batch.jobs import keys
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore
from chorus_batch.workers.texts import Texts

ENCODER = "a" * 64
FOX, CIRCLE, LEFT = "a red fox", "the circle moves", "a fox moves left"


def model_of(folder: Path, dtype: str = "float32", **how: bool) -> WanModel:
    return WanModel("tiny-wan", WanSource(folder, "0" * 64), dtype=dtype, text_later=True, **how)


@pytest.fixture
def model(wan_folder: Path) -> WanModel:
    return model_of(wan_folder)


@pytest.fixture
def store(store_settings: Settings) -> Iterator[ObjectStore]:
    found = ObjectStore.from_settings(store_settings)
    found.ensure_bucket()
    yield found


def stored_texts(store: ObjectStore) -> set[str]:
    return {found.key for found in store.list("texts/")}


def key(text: str) -> str:
    return keys.text_key(ENCODER, text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fetched_features_are_the_encoders_bit_for_bit(wan_folder: Path, store: ObjectStore, dtype: str) -> None:
    model = model_of(wan_folder, dtype)
    assert Texts(model, store, ENCODER).prepare([FOX, CIRCLE], lambda: []) == 2
    other = model_of(wan_folder, dtype)
    fetched = Texts(other, store, ENCODER)
    assert fetched.prepare([FOX, CIRCLE], lambda: pytest.fail("nothing is missing")) == 0
    assert not other.text.loaded  # so the encoder's weights were never read
    for text in (FOX, CIRCLE):
        with torch.inference_mode():
            expected = model.encode(text)
        assert torch.equal(fetched.features(text), expected)
        assert fetched.features(text).dtype == expected.dtype == getattr(torch, dtype)


def test_what_is_missing_is_encoded_with_the_batchs_next_texts(model: WanModel, store: ObjectStore) -> None:
    texts = Texts(model, store, ENCODER)
    assert texts.prepare([FOX], lambda: [LEFT, FOX, LEFT]) == 2
    assert stored_texts(store) == {key(FOX), key(LEFT)}
    # One is there, one isn't: only that, and what is new in the batch.
    assert texts.prepare([FOX, CIRCLE], lambda: [LEFT, "gray"]) == 2
    assert stored_texts(store) == {key(FOX), key(LEFT), key(CIRCLE), key("gray")}
    # A worker that is told to stop encodes no more than its job needs.
    assert texts.prepare(["over"], lambda: ["background"], lambda: True) == 1
    assert stored_texts(store) == {key(text) for text in (FOX, LEFT, CIRCLE, "gray", "over")}


def test_a_video_is_the_same_with_stored_texts(wan_folder: Path, model: WanModel, store: ObjectStore) -> None:
    request = Request(FOX, 7, GenerationSettings(32, 32, 5, 8, 4, 5.0, 5.0), "domain", negative_prompt="gray")
    expected = Engine(model).generate(request).latents
    Texts(model, store, ENCODER).prepare([FOX, "gray"], lambda: [])
    other = model_of(wan_folder)
    texts, engine = Texts(other, store, ENCODER), Engine(other)
    engine.use_features(texts.features)
    texts.prepare([FOX, "gray"], lambda: [])
    assert torch.equal(engine.generate(request).latents, expected)
    assert not other.text.loaded


def test_a_damaged_object_is_noticed_and_encoded_again(model: WanModel, store: ObjectStore) -> None:
    texts = Texts(model, store, ENCODER)
    texts.prepare([FOX, CIRCLE], lambda: [])
    whole, others = store.get(key(FOX)), store.get(key(CIRCLE))
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (changed, whole[:-5], b"", b"nonsense", others):
        store.put(key(FOX), damaged, "application/octet-stream")
        fresh = Texts(model, store, ENCODER)
        assert fresh.prepare([FOX], lambda: []) == 1
        assert store.get(key(FOX)) == whole
        assert torch.equal(fresh.features(FOX), texts.features(FOX))


def test_packing_keeps_every_bit_and_no_padding() -> None:
    features = torch.zeros(1, 512, 8, dtype=torch.bfloat16)
    features[0, :3] = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    features[0, 1] = 0  # a row of zeros inside stays
    data = pack(features, FOX)
    assert len(data) < 1000
    assert torch.equal(unpack(data, FOX), features)
    assert torch.equal(unpack(pack(torch.zeros(1, 4, 8), ""), ""), torch.zeros(1, 4, 8))
    with pytest.raises(CorruptFeatures, match="another text's"):
        unpack(data, CIRCLE)


def test_transformer_and_encoder_take_turns(wan_folder: Path, model: WanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    turning = model_of(wan_folder, turns=True)
    moves: list[str] = []
    for name, part in (("transformer", turning.transformer), ("encoder", turning.text)):
        move = "to" if name == "transformer" else "park"
        real = getattr(part, move)
        monkeypatch.setattr(
            part, move, lambda *to, name=name, real=real: (moves.append(" ".join((name, *to))), real(*to))[1]
        )
    with torch.inference_mode():
        features = turning.encode(FOX)
        assert moves == ["transformer cpu", "encoder", "transformer cpu"]
        assert torch.equal(features, model.encode(FOX))
        moves.clear()
        with turning.encoding():
            turning.encode(FOX)
            turning.encode(CIRCLE)
    assert moves == ["transformer cpu", "encoder", "transformer cpu"]


def test_an_encoder_that_finds_no_room_leaves_nothing_behind(model: WanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(UMT5EncoderModel, "to", full)
        with pytest.raises(torch.OutOfMemoryError):
            model.encode(FOX)
    assert not model.text.loaded
    with torch.inference_mode():
        assert model.encode(FOX).shape == (1, 512, 32)
