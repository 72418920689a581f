"""The sources that a worker holds in memory: bounded in bytes, and never another object's latents."""

from __future__ import annotations

import pytest
import torch

from chorus_batch.workers.runtime import HeldSource, HeldSources

EACH = 4 * 100  # bytes of what `latents` makes


def latents(value: float = 0.0, count: int = 1) -> HeldSource:
    return HeldSource({k: torch.full((1, 1, 10, 10), value) for k in range(1, count + 1)}, None)


def test_what_is_held_comes_back_by_job_and_checksum() -> None:
    held = HeldSources()
    kept = latents(3.0)
    held.add(7, "a" * 64, kept)
    assert held.get(7, "a" * 64) is kept
    assert held.ids() == [7]
    assert held.get(8, "a" * 64) is None


def test_another_objects_latents_are_not_used() -> None:
    held = HeldSources()
    held.add(7, "a" * 64, latents())
    assert held.get(7, "b" * 64) is None
    # A job that was done again has a new object; its latents replace the old ones.
    again = latents(1.0)
    held.add(7, "b" * 64, again)
    assert held.get(7, "a" * 64) is None
    assert held.get(7, "b" * 64) is again


def test_the_longest_unused_go_when_memory_is_up() -> None:
    held = HeldSources(limit=3 * EACH)
    for job in (1, 2, 3):
        held.add(job, "x", latents())
    assert held.ids() == [1, 2, 3]
    assert held.get(1, "x") is not None  # used: now 2 is the longest unused
    held.add(4, "x", latents())
    assert held.ids() == [3, 1, 4]
    held.add(5, "x", latents(count=2))
    assert held.ids() == [4, 5]


def test_exactly_the_limit_fits() -> None:
    held = HeldSources(limit=2 * EACH)
    held.add(1, "x", latents())
    held.add(2, "x", latents())
    assert held.ids() == [1, 2]
    held.add(3, "x", HeldSource({1: torch.zeros(1)}, None))
    assert held.ids() == [2, 3]


def test_a_source_larger_than_the_limit_is_held_alone() -> None:
    """Its followers come next: fetching it for each of them would cost more than the memory does."""
    held = HeldSources(limit=EACH)
    held.add(1, "x", latents())
    held.add(2, "x", latents(count=5))
    assert held.ids() == [2]
    held.add(3, "x", latents())
    assert held.ids() == [3]


@pytest.mark.parametrize("replacements", [1, 50])
def test_replacing_and_dropping_give_their_bytes_back(replacements: int) -> None:
    held = HeldSources(limit=2 * EACH)
    held.add(1, "x", latents())
    for n in range(replacements):
        held.add(2, str(n), latents(float(n)))
    assert held.ids() == [1, 2]
    held.drop(2)
    held.drop(2)  # gone already: no error, and no bytes
    held.add(3, "x", latents())
    assert held.ids() == [1, 3]


def test_bytes_are_counted_in_the_latents_own_type() -> None:
    held = HeldSources(limit=2 * EACH)
    half = HeldSource({1: torch.zeros(1, 1, 10, 10, dtype=torch.float16)}, None)
    for job in range(4):
        held.add(job, "x", half)
    assert held.ids() == [0, 1, 2, 3]
    held.add(4, "x", half)
    assert held.ids() == [1, 2, 3, 4]
