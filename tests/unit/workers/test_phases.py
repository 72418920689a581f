from __future__ import annotations

import time

import pytest

from chorus_batch.workers.phases import Phases


def test_a_phase_is_timed_and_adds_up_over_its_blocks() -> None:
    phases = Phases()
    with phases.timed("upload"):
        time.sleep(0.02)
    once = phases.seconds["upload"]
    assert 0.02 <= once < 1
    with phases.timed("upload"):
        time.sleep(0.02)
    assert phases.seconds["upload"] >= once + 0.02
    assert list(phases.seconds) == ["upload"]


def test_a_block_that_raises_counts_too() -> None:
    phases = Phases()
    with pytest.raises(KeyError), phases.timed("fetch"):
        time.sleep(0.01)
        raise KeyError
    assert phases.seconds["fetch"] >= 0.01


def test_phases_inside_each_other_count_both() -> None:
    phases = Phases()
    with phases.timed("outer"), phases.timed("inner"):
        time.sleep(0.01)
    assert phases.seconds["outer"] >= phases.seconds["inner"] >= 0.01


def test_the_total_goes_on_from_the_start_whatever_is_timed() -> None:
    phases = Phases()
    time.sleep(0.01)
    with phases.timed("claim"):
        pass
    total = phases.total
    assert total >= 0.01 + phases.seconds["claim"]
    assert phases.total > total


def test_seconds_can_be_counted_as_another_phases() -> None:
    phases = Phases()
    with phases.timed("decide"):
        time.sleep(0.01)
        phases.move("decide", "mask", 0.25)
    assert phases.seconds["mask"] == 0.25
    assert -0.25 < phases.seconds["decide"] < 0
