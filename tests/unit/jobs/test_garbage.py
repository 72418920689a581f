"""What of the store nobody needs: a pure decision."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from chorus_batch.jobs import keys
from chorus_batch.jobs.garbage import References, is_needed, sweep
from chorus_batch.jobs.storage import ListedObject

SHA = "0123456789abcdef" * 4
OTHER = "f" * 64
NOTHING = References(True, frozenset(), frozenset(), frozenset(), frozenset())
NOW = datetime(2026, 4, 13, 6, tzinfo=UTC)

OF_AN_ATTEMPT = (
    keys.video_key(3, 14, 2),
    keys.latents_key(3, 14, 2),
    keys.checkpoint_key(3, 14, 2),
    keys.entry_key(SHA, 14, 2),
)
TEXT, MASK = keys.text_key(OTHER, "a red fox"), keys.mask_key(SHA, "fox")


def test_keys_are_read_again() -> None:
    assert {keys.writer_of(key) for key in OF_AN_ATTEMPT} == {(14, 2)}
    assert keys.entry_of(MASK) == SHA
    assert keys.text_of(TEXT) == "647c3a6520b87d387c85a08faff768cf92f436d1477dabb951d7c6417813beb4"
    for read, own in ((keys.writer_of, OF_AN_ATTEMPT), (keys.entry_of, (MASK,)), (keys.text_of, (TEXT,))):
        for key in {*OF_AN_ATTEMPT, TEXT, MASK, "batches/3/else", "else"} - set(own):
            assert read(key) is None


@pytest.mark.parametrize("key", OF_AN_ATTEMPT)
def test_what_a_row_names_or_a_running_attempt_wrote_is_needed(key: str) -> None:
    assert not is_needed(key, NOTHING)
    assert is_needed(key, replace(NOTHING, objects=frozenset({key})))
    assert is_needed(key, replace(NOTHING, running=frozenset({(14, 2)})))
    # Of another attempt, or another job.
    assert not is_needed(key, replace(NOTHING, running=frozenset({(14, 3), (1, 2)})))


def test_texts_masks_and_probes() -> None:
    assert not any(is_needed(key, NOTHING) for key in (TEXT, MASK, "probe/0123"))
    assert is_needed(TEXT, replace(NOTHING, texts=frozenset({str(keys.text_of(TEXT))})))
    assert is_needed(MASK, replace(NOTHING, entries=frozenset({SHA})))
    assert not is_needed(MASK, replace(NOTHING, entries=frozenset({OTHER})))


@pytest.mark.parametrize("key", ["else", "batches/3/notes.txt", "cache/readme", "texts/mine", "masks/", "batchesx"])
def test_what_the_program_didnt_write_is_left_alone(key: str) -> None:
    assert is_needed(key, NOTHING)


def test_what_is_young_stays() -> None:
    old, young = (ListedObject(MASK, 10, NOW - timedelta(days=days)) for days in (8, 6))
    needed = ListedObject(TEXT, 100, NOW - timedelta(days=800))
    found = sweep(
        [old, young, needed], replace(NOTHING, texts=frozenset({str(keys.text_of(TEXT))})), NOW - timedelta(days=7)
    )
    assert (found.garbage, found.freed, found.young, found.listed, found.size) == ((old,), 10, 1, 3, 120)
