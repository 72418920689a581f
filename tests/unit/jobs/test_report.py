"""Forecast against fact, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chorus_batch.jobs.report import FIGURES, Fact, Line, compared

FACT = Fact(
    batch_id=1, name="b", total=10, done=10, over=True, workers=2, hits=6, steps_skipped=50, tokens_total=2000,
    tokens_computed=1500, gpu_hours=0.5, wall_seconds=90.0, video_bytes=100, latents_bytes=40, entry_bytes=60,
)  # fmt: skip


def stored(**ranges: Any) -> dict[str, Any]:
    told = {
        name: None if r is None else dict(zip(("low", "expected", "high"), r, strict=True))
        for name, r in ranges.items()
    }
    return {"workers": 2, "ranges": told}


def line(forecast: dict[str, Any], figure: str, fact: Fact = FACT) -> Line:
    return {one.figure: one for one in compared(forecast, fact)}[figure]


def test_deviation_and_range() -> None:
    assert line(stored(hits=(5, 6, 6)), "hits") == Line("hits", 5, 6, 6, 6, 0.0, True)
    hours = line(stored(gpu_hours=(0.3, 0.4, 0.45)), "gpu_hours")
    assert hours.deviation == pytest.approx(0.25) and hours.within is False
    assert line(stored(bytes=(100, 160, 220)), "bytes").deviation == pytest.approx(0.25)


def test_every_figure_has_a_line_though_nothing_was_forecast() -> None:
    lines = compared(stored(hits=None), FACT)
    assert tuple(one.figure for one in lines) == FIGURES
    assert all(one.deviation is None and one.within is None and one.fact is not None for one in lines)


def test_wall_time_needs_the_same_number_of_workers() -> None:
    forecast = stored(wall_seconds=(50, 100, 150))
    assert line(forecast, "wall_seconds").deviation == pytest.approx(-0.1)
    assert line(forecast, "wall_seconds", replace(FACT, workers=1)).expected is None


@pytest.mark.parametrize("fact", [replace(FACT, over=False), replace(FACT, done=9)])
def test_what_isnt_done_has_no_deviation_yet(fact: Fact) -> None:
    hits = line(stored(hits=(5, 6, 6)), "hits", fact)
    assert (hits.expected, hits.fact, hits.deviation, hits.within) == (6, 6, None, None)


def test_nothing_expected() -> None:
    assert line(stored(hits=(0, 0, 0)), "hits", replace(FACT, hits=0)).deviation == 0
    missed = line(stored(hits=(0, 0, 0)), "hits")
    assert missed.deviation is None and missed.within is False


def test_an_old_batch_knew_its_steps_only() -> None:
    assert line({"steps_skipped": 40}, "steps_skipped").deviation == pytest.approx(0.25)
