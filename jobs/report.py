"""Forecast against fact: what a batch was expected to take, what it took, and by how much the two differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """What became of a batch, over its finished jobs. The names are those of forecast.Forecast.ranges."""

    batch_id: int
    name: str
    total: int
    done: int
    over: bool  # nothing is left to do
    workers: int  # that ran any of its jobs
    hits: int
    steps_skipped: int
    tokens_total: int
    tokens_computed: int
    gpu_hours: float
    wall_seconds: float | None  # from the first claim to the last end; None before any
    video_bytes: int
    latents_bytes: int
    entry_bytes: int

    @property
    def bytes(self) -> int:
        """Of all objects that the batch added."""
        return self.video_bytes + self.latents_bytes + self.entry_bytes


@dataclass(frozen=True)
class Line:
    """One figure. `deviation`: fact over forecast, less 1; None where either is missing, zero, or not yet final.

    `within`: whether the fact lies inside the forecast's range.
    """

    figure: str
    low: float | None
    expected: float | None
    high: float | None
    fact: float | None
    deviation: float | None
    within: bool | None


FIGURES = (
    "hits", "steps_skipped", "tokens_total", "tokens_computed", "gpu_hours", "wall_seconds", "video_bytes",
    "latents_bytes", "entry_bytes", "bytes",
)  # fmt: skip
ROUNDING = 1e-9  # of a figure: sums in another order


def compared(stored: Mapping[str, Any], fact: Fact) -> list[Line]:
    """One line for each figure; `stored` is the forecast as `batches.plan` keeps it (of an old batch it may lack much).

    Wall time compares only if as many workers ran the batch as the forecast was for.
    """
    ranges: Mapping[str, Mapping[str, Any] | None] = stored.get("ranges") or {
        name: _known(stored.get(name)) for name in ("steps_skipped",)
    }
    lines = []
    for figure in FIGURES:
        found = ranges.get(figure)
        if figure == "wall_seconds" and stored.get("workers") != fact.workers:
            found = None
        lines.append(_line(figure, found, getattr(fact, figure), final=fact.over and fact.done == fact.total))
    return lines


def _known(value: float | None) -> Mapping[str, Any] | None:
    return None if value is None else dict.fromkeys(("low", "expected", "high"), value)


def _line(figure: str, found: Mapping[str, Any] | None, fact: float | None, *, final: bool) -> Line:
    if found is None:
        return Line(figure, None, None, None, fact, None, None)
    low, expected, high = (float(found[name]) for name in ("low", "expected", "high"))
    deviation = within = None
    if final and fact is not None:
        slack = ROUNDING * max(abs(high), 1.0)
        within = low - slack <= fact <= high + slack
        deviation = fact / expected - 1 if expected else (0.0 if fact == 0 else None)
    return Line(figure, low, expected, high, fact, deviation, within)
