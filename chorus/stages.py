"""Boundaries of the stages: (K1, K2) = F(m, kind; N), as data (README, "Method")."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .errors import BoundaryError
from .schedule import noise_levels

# Two noise levels closer than this are the same level: they differ by rounding only.
SAME_LEVEL = 1e-6

Tables = Mapping[int, Sequence[Sequence[float]]] | Mapping[str, Sequence[Sequence[float]]]

# For Wan2.1. Four steps: K1=1, K2=2 fits the hits' speed-up that Chorus reports; fifty: K1 after NIRVANA's table.
# The rest is this project's, to be confirmed by calibration.
WAN_TABLES: Mapping[int, Sequence[Sequence[float]]] = {
    4: [[0.75, 1, 2], [0.92, 2, 3]],
    50: [[0.65, 5, 10], [0.75, 10, 18], [0.85, 15, 25], [0.90, 20, 30], [0.95, 25, 35]],
}
WAN_SHIFT = 5.0


@dataclass(frozen=True)
class Row:
    """From the match score `m_from` on: skip the steps before k1, compute by region before k2."""

    m_from: float
    k1: int
    k2: int


@dataclass(frozen=True)
class Boundaries:
    """F(m, kind; N): rows per number of steps N, sorted by m_from; made by `parse`.

    `tables` hold for every kind of difference that has none of its own in `kinds`: the score sees how many words
    differ well and which words badly, so one kind may skip far deeper than another at the same score. (Chorus, arXiv
    2604.04451, uses the score alone; kinds are this project's.) A kind's table without rows means: never reused.

    `shift` is the noise schedule that the tables were made for. A request with another number of steps or another
    shift reads the nearest table at the *same noise level*, rounded down, so that it never skips deeper than the table
    allows.
    """

    tables: Mapping[int, tuple[Row, ...]]
    shift: float
    kinds: Mapping[str, Mapping[int, tuple[Row, ...]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, tables: Tables, shift: float, kinds: Mapping[str, Tables] | None = None) -> Boundaries:
        """From plain data, {steps: [[m_from, k1, k2], ...]}; steps may be text, as in JSON. Raises BoundaryError.

        `kinds` has such tables by kind of difference. Only there may a table be empty: that kind is never reused.
        """
        parsed = _parsed(tables, "boundaries", may_be_empty=False)
        by_kind = {
            kind: _parsed(own, f"boundaries of kind {kind!r}", may_be_empty=True) for kind, own in (kinds or {}).items()
        }
        if not math.isfinite(shift) or shift <= 0:
            raise BoundaryError(f"boundaries: the shift must be a positive number, not {shift}")
        return cls(parsed, shift, by_kind)

    @property
    def tau(self) -> float:
        """The lowest match score that any table of any kind reuses at."""
        every = (self.tables, *self.kinds.values())
        return min(rows[0].m_from for tables in every for rows in tables.values() if rows)

    def tau_at(self, steps: int) -> float:
        """The lowest match score that a request of so many steps reuses at, whatever the kind.

        From here on a neighbour is worth looking at; the kind is only known once there is one.
        """
        nearest = [tables[_nearest(tables, steps)] for tables in (self.tables, *self.kinds.values())]
        return min(rows[0].m_from for rows in nearest if rows)

    def at(
        self, m: float, steps: int, sigmas: Sequence[float] | None = None, kind: str | None = None
    ) -> tuple[int, int]:
        """(K1, K2) for match score `m` and a kind of difference, (0, 0) below tau.

        `sigmas` are the request's N+1 noise levels, 1 down to 0; left out, they're those of the tables' own shift. A
        kind that has no table of its own reads the general one, as no kind does.
        """
        if not math.isfinite(m):
            raise BoundaryError(f"the match score must be a number, not {m}")
        found = (0, 0)
        for row in self.rows(steps, sigmas, kind):
            if m >= row.m_from:
                found = (row.k1, row.k2)
        return found

    def rows(self, steps: int, sigmas: Sequence[float] | None = None, kind: str | None = None) -> tuple[Row, ...]:
        """The table for a request of so many steps, scaled by noise level where it isn't given as such."""
        tables = self.tables if kind is None else self.kinds.get(kind, self.tables)
        nearest = _nearest(tables, steps)
        table, own = tables[nearest], noise_levels(nearest, self.shift)
        levels = noise_levels(steps, self.shift) if sigmas is None else sigmas
        if len(levels) != steps + 1:
            raise BoundaryError(f"{steps} steps have {steps + 1} noise levels, not {len(levels)}")
        return tuple(Row(r.m_from, _at_level(own[r.k1], levels), _at_level(own[r.k2], levels)) for r in table)

    def kept_steps(self, steps: int, sigmas: Sequence[float] | None = None) -> frozenset[int]:
        """The k whose x[k] some row of any kind reads, so what an entry must hold: every k1, every k in (k1, k2]."""
        kept: set[int] = set()
        for kind in (None, *self.kinds):
            for row in self.rows(steps, sigmas, kind):
                # A k1 of 0 reads nothing: x[0] is the request's own noise.
                kept |= {row.k1} - {0} | set(range(row.k1 + 1, row.k2 + 1))
        return frozenset(kept)


def _nearest(tables: Mapping[int, tuple[Row, ...]], steps: int) -> int:
    if steps < 1:
        raise BoundaryError(f"steps must be at least 1, not {steps}")
    return steps if steps in tables else max(tables)


def _at_level(sigma: float, levels: Sequence[float]) -> int:
    """The last step whose latent is at least as noisy as `sigma`: the same level, rounded down."""
    return max((k for k, level in enumerate(levels) if level >= sigma - SAME_LEVEL), default=0)


def _parsed(tables: Tables, name: str, *, may_be_empty: bool) -> dict[int, tuple[Row, ...]]:
    parsed: dict[int, tuple[Row, ...]] = {}
    if not isinstance(tables, Mapping):
        raise BoundaryError(f"{name}: rows stand under a number of steps, not as {tables!r}")
    for key, rows in tables.items():
        try:
            steps = int(key)
        except ValueError:
            raise BoundaryError(f"{name}: {key!r} is not a number of steps") from None
        where = f"{name} for {steps} steps"
        parsed[steps] = tuple(_row(where, values) for values in rows)
        if steps < 1 or not (rows or may_be_empty):
            raise BoundaryError(f"{where}: at least one step and one row are needed")
        _check(where, steps, parsed[steps])
    if not parsed:
        raise BoundaryError(f"{name}: no table given")
    return parsed


def _row(where: str, values: Sequence[float]) -> Row:
    if len(values) != 3 or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise BoundaryError(f"{where}: a row is [m_from, k1, k2], not {values!r}")
    m_from, k1, k2 = values
    if int(k1) != k1 or int(k2) != k2:
        raise BoundaryError(f"{where}: k1 and k2 are whole steps, not {k1} and {k2}")
    return Row(float(m_from), int(k1), int(k2))


def _check(where: str, steps: int, rows: tuple[Row, ...]) -> None:
    for row in rows:
        if not 0 <= row.k1 <= row.k2 <= steps:
            raise BoundaryError(f"{where}: 0 <= k1 <= k2 <= {steps} doesn't hold in {row}")
    for low, high in pairwise(rows):
        if low.m_from >= high.m_from:
            raise BoundaryError(f"{where}: m_from must rise from row to row: {low}, {high}")
        if low.k1 > high.k1 or low.k2 > high.k2:
            raise BoundaryError(f"{where}: k1 and k2 must not fall as m rises: {low}, {high}")
