"""The status line and the exit codes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus_batch.jobs.progress import exit_code, line
from chorus_batch.jobs.statistics import Progress

FRESH = Progress(
    batch_id=7,
    name="nightly",
    state="running",
    total=10,
    queued=10,
    running=0,
    done=0,
    failed=0,
    quarantined=0,
    cancelled=0,
    hits=0,
    exact_hits=0,
    steps_total=0,
    steps_skipped=0,
    seconds_compute=0.0,
    elapsed=0.0,
    workers=0,
)
HALF = replace(
    FRESH, queued=3, running=1, done=5, failed=1, hits=2, exact_hits=1, steps_total=100, steps_skipped=28, elapsed=60.0,
    workers=2,
)  # fmt: skip
OVER = replace(HALF, state="finished", queued=0, running=0, done=9, elapsed=3725.0, workers=0)


def test_a_batch_that_just_began() -> None:
    assert line(FRESH) == "nightly  running  0/10 done  0 failed  0 quarantined  0 running  10 queued"


def test_a_batch_on_its_way() -> None:
    assert line(HALF) == (
        "nightly  running  5/10 done  1 failed  0 quarantined  1 running  3 queued | hits 40.0 % (exact 20.0)"
        " | steps saved 28.0 % | 300 videos/h on 2 workers | ETA 00:48"
    )


def test_a_batch_that_is_over() -> None:
    assert line(OVER).endswith("| 9 videos/h | took 1:02:05")
    assert "ETA" not in line(OVER)


def test_cancelled_jobs_are_shown_if_there_are_any() -> None:
    assert "  3 cancelled" in line(replace(HALF, queued=0, cancelled=3))
    assert "cancelled" not in line(HALF)


COUNT = st.integers(0, 1000)


@given(COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, st.floats(0, 1e6))
def test_the_counts_of_a_line_sum_to_the_total(
    queued: int, running: int, done: int, failed: int, quarantined: int, cancelled: int, elapsed: float
) -> None:
    total = queued + running + done + failed + quarantined + cancelled
    progress = Progress(
        1, "b", "running", total, queued, running, done, failed, quarantined, cancelled, 0, 0, 20 * done, 0, 0.0, elapsed, 1
    )  # fmt: skip
    counts = line(progress).split(" | ")[0]
    shown = {word: int(number) for number, word in re.findall(r"(\d+)(?:/\d+)? (\w+)", counts)}
    assert sum(shown.values()) == total == int(re.findall(r"/(\d+)", counts)[0])
    assert progress.is_over == (queued + running == 0)


@pytest.mark.parametrize(
    ("progress", "code"),
    [
        (replace(OVER, failed=0, done=10), 0),
        (OVER, 1),
        (replace(OVER, failed=0, quarantined=1), 1),
        (replace(OVER, state="cancelled", cancelled=1, failed=0), 7),
        (replace(OVER, state="cancelled"), 7),
    ],
)
def test_exit_codes(progress: Progress, code: int) -> None:
    assert exit_code(progress) == code
