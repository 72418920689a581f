"""Masks through a real object store: made once, the same bits, and never from a damaged object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorus_batch.chorus.differ import Difference, Kind, LexicalDiffer, Scope
from chorus_batch.chorus.errors import WeightsError
from chorus_batch.chorus.evidence import Evidence
from chorus_batch.chorus.grounded import GroundedSegmenter
from chorus_batch.chorus.segment import EvidenceSegmenter, Source, Video
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore
from chorus_batch.workers.masks import StoredMasks

ENTRY, MODELS = "e" * 64, "a" * 64
PROMPT = "a red circle moves left"
COLOR = LexicalDiffer().compare(PROMPT, "a blue circle moves left")
FRAMES = np.random.default_rng(0).integers(0, 256, (9, 32, 48, 3), dtype=np.uint8)


def source(**changes: Any) -> Source:
    return replace(Source(PROMPT, None, lambda: Video(FRAMES, (3, 16, 24)), ENTRY), **changes)


class NoSegmenter:
    """Stands where none may be needed."""

    def region(self, source: Source, difference: Difference) -> torch.Tensor | None:
        raise WeightsError("a segmenter was asked")


@pytest.fixture
def store(store_settings: Settings) -> Iterator[ObjectStore]:
    found = ObjectStore.from_settings(store_settings)
    found.ensure_bucket()
    yield found


@pytest.fixture(scope="module")
def grounded(grounded_folders: tuple[Path, Path]) -> GroundedSegmenter:
    return GroundedSegmenter(*grounded_folders)


def stored(store: ObjectStore) -> set[str]:
    return {found.key for found in store.list("masks/")}


def test_a_region_is_looked_for_once(grounded: GroundedSegmenter, store: ObjectStore) -> None:
    masks = StoredMasks(grounded, store, MODELS)
    expected = grounded.region(source(), COLOR)
    assert not masks.is_stored(source(), COLOR)
    region = masks.region(source(), COLOR)
    made = masks.taken()
    assert expected is not None and region is not None and torch.equal(region, expected)
    assert made is not None and made.origin == "made" and masks.taken() is None
    (key,) = stored(store)
    assert key.startswith(f"masks/{ENTRY[:2]}/{ENTRY}/")
    # Elsewhere, without models and without the video.
    other = StoredMasks(NoSegmenter(), store, MODELS)
    found = other.region(source(video=lambda: pytest.fail("the video was fetched")), COLOR)
    fetched = other.taken()
    assert found is not None and torch.equal(found, expected) and other.is_stored(source(), COLOR)
    assert fetched is not None and fetched.origin == "store" and 0 < fetched.seconds < made.seconds


def test_nothing_found_is_not_looked_for_again(grounded_folders: tuple[Path, Path], store: ObjectStore) -> None:
    strict = GroundedSegmenter(*grounded_folders, threshold=1.0)
    assert StoredMasks(strict, store, MODELS).region(source(), COLOR) is None
    assert StoredMasks(NoSegmenter(), store, MODELS).region(source(), COLOR) is None


def test_other_words_scopes_entries_and_models_have_masks_of_their_own(
    grounded: GroundedSegmenter, store: ObjectStore
) -> None:
    masks = StoredMasks(grounded, store, MODELS)
    masks.region(source(), COLOR)
    for other, asked, models in (
        (source(), replace(COLOR, source_spans=((6, 12),)), MODELS),
        (source(), replace(COLOR, kind=Kind.background, scope=Scope.background), MODELS),
        (source(entry="f" * 64), COLOR, MODELS),
        (source(), COLOR, "b" * 64),
    ):
        assert not StoredMasks(grounded, store, models).is_stored(other, asked)
    # The target's words are none of the question.
    green = LexicalDiffer().compare(PROMPT, "a green circle moves left")
    assert masks.is_stored(source(), green)


def test_what_has_no_place_is_neither_looked_for_nor_kept(grounded: GroundedSegmenter, store: ObjectStore) -> None:
    masks = StoredMasks(grounded, store, MODELS)
    assert masks.region(source(), replace(COLOR, scope=Scope.everything)) is None
    assert masks.region(source(entry=""), COLOR) is not None  # of an entry without a name
    assert (stored(store), masks.taken()) == (set(), None)


def test_the_evidences_region_is_not_kept_for_the_videos(grounded: GroundedSegmenter, store: ObjectStore) -> None:
    maps = torch.zeros(1, 3, 16, 24, dtype=torch.uint8)
    maps[0, :, :4, :4] = 255
    lost = source(evidence=Evidence(((2, 12),), maps), video=lambda: None)
    region = StoredMasks(grounded, store, MODELS).region(lost, COLOR)
    expected = EvidenceSegmenter().region(lost, COLOR)
    assert region is not None and expected is not None and torch.equal(region, expected)
    assert stored(store) == set()


def test_a_damaged_mask_is_noticed_and_made_again(grounded: GroundedSegmenter, store: ObjectStore) -> None:
    masks = StoredMasks(grounded, store, MODELS)
    expected = masks.region(source(), COLOR)
    (key,) = stored(store)
    whole = store.get(key)
    background = replace(COLOR, kind=Kind.background, scope=Scope.background)
    masks.region(source(), background)
    (other,) = stored(store) - {key}
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-5], b"", b"nonsense", store.get(other)):
        store.put(key, damaged, "application/octet-stream")
        fresh = StoredMasks(grounded, store, MODELS)
        region = fresh.region(source(), COLOR)
        taken = fresh.taken()
        assert expected is not None and region is not None and torch.equal(region, expected)
        assert taken is not None and taken.origin == "made"
        assert store.get(key) == whole


def test_a_store_that_takes_nothing_costs_no_mask(
    grounded: GroundedSegmenter, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from chorus_batch.jobs.errors import StorageError

    def full(*_: object) -> None:
        raise StorageError("no room")

    monkeypatch.setattr(store, "put", full)
    assert StoredMasks(grounded, store, MODELS).region(source(), COLOR) is not None
