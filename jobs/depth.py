"""How deep a follower starts: K1 and K2 by the card's boundaries, as the engine reads them (README, "Method"). Pure.

The engine looks up (K1, K2) by similarity *and* kind of difference; before the run the kind of a pair may be unknown.
Then K1 is a range: the deepest and the shallowest of what the tables of all kinds say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.cards.card import Boundary, ModelCard
from chorus_batch.jobs.curve import ROUNDING, FloatArray
from chorus_batch.jobs.nearest import IntArray
from chorus_batch.jobs.parameters import Parameters

SAME_LEVEL = 1e-6  # two noise levels closer than this differ by rounding only; as in the engine


@dataclass(frozen=True)
class Depths:
    """Steps skipped (K1) and the end of the region steps (K2) of each follower. Where K1 is 0 nothing is reused."""

    low: IntArray
    k1: IntArray
    high: IntArray
    k2: IntArray

    @classmethod
    def none(cls, rows: int) -> Depths:
        """Of rows that reuse nothing."""
        return cls(*(np.zeros(rows, np.int64) for _ in range(4)))

    def put(self, rows: NDArray[np.bool_] | IntArray, part: Depths) -> None:
        """Write the depths of some of the rows."""
        for name in ("low", "k1", "high", "k2"):
            getattr(self, name)[rows] = getattr(part, name)

    def widen(self, rows: IntArray, other: Depths) -> None:
        """Let the range of some rows hold that of `other`, which they may start from as well."""
        self.low[rows] = np.minimum(self.low[rows], other.low)
        self.high[rows] = np.maximum(self.high[rows], other.high)

    def deepen(self, rows: IntArray, other: Depths) -> None:
        """Let the range of some rows reach as deep as that of `other`."""
        self.high[rows] = np.maximum(self.high[rows], other.high)


def depths(
    card: ModelCard, parameters: Parameters, similarity: FloatArray, kinds: Sequence[Sequence[str]] | None = None
) -> Depths:
    """Of followers at `similarity` [n] whose differences are of `kinds` (kinds.parts; none: nobody knows of which).

    A difference of several kinds starts as deep as the shallowest of them.
    """
    n = len(similarity)
    if parameters.policy == "none" or not n:
        return Depths.none(n)
    m = np.asarray(similarity, np.float64) + ROUNDING
    general = _looked_up(rows_at(card, parameters), m)
    if parameters.policy == "nirvana":  # stage 1 alone, whatever differs
        return Depths(general[:, 0].copy(), general[:, 0], general[:, 0].copy(), general[:, 0].copy())
    by_kind = {kind: _looked_up(rows_at(card, parameters, kind), m) for kind in card.kinds}
    every = np.stack([general, *by_kind.values()])
    low, high, found = every[..., 0].min(axis=0), every[..., 0].max(axis=0), general.copy()
    of_set: dict[tuple[str, ...], list[int]] = {}
    for row, each in enumerate(kinds or ()):
        if each:
            of_set.setdefault(tuple(each), []).append(row)
    for names, rows in of_set.items():
        found[rows] = np.min([by_kind.get(name, general)[rows] for name in names], axis=0)
        low[rows] = high[rows] = found[rows, 0]
    return Depths(low, found[:, 0].copy(), high, found[:, 1].copy())


def kept_steps(card: ModelCard, parameters: Parameters) -> int:
    """How many of a source's latents are kept for its followers."""
    if parameters.policy == "none":
        return 0
    kept: set[int] = set()
    for kind in (None, *card.kinds) if parameters.policy == "chorus" else (None,):
        for _, k1, k2 in rows_at(card, parameters, kind):
            kept |= {k1} - {0} | (set(range(k1 + 1, k2 + 1)) if parameters.policy == "chorus" else set())
    return len(kept)


def rows_at(card: ModelCard, parameters: Parameters, kind: str | None = None) -> tuple[Boundary, ...]:
    """The table for so many steps and such a shift: the card's nearest, at the same noise level, rounded down."""
    tables: Mapping[int, tuple[Boundary, ...]] = card.boundaries if kind is None else card.kinds[kind]
    nearest = parameters.steps if parameters.steps in tables else max(tables)
    own = noise_levels(nearest, card.defaults.shift)
    levels = noise_levels(parameters.steps, parameters.shift)
    return tuple((m, _at_level(own[k1], levels), _at_level(own[k2], levels)) for m, k1, k2 in tables[nearest])


def noise_levels(steps: int, shift: float) -> tuple[float, ...]:
    """sigma[0..N] of N even steps under a shift, from 1 down to 0: the engine's own schedule."""
    even = (1.0 - k / steps for k in range(steps + 1))
    return tuple(shift * u / (1 + (shift - 1) * u) for u in even)


def _at_level(sigma: float, levels: Sequence[float]) -> int:
    return max((k for k, level in enumerate(levels) if level >= sigma - SAME_LEVEL), default=0)


def _looked_up(rows: Sequence[Boundary], m: NDArray[np.float64]) -> IntArray:
    """(k1, k2) [n, 2] of each similarity; zeros below the first row."""
    table = np.array([(0, 0), *((k1, k2) for _, k1, k2 in rows)], np.int64)
    starts = np.array([m_from for m_from, _, _ in rows], np.float64)
    return table[np.searchsorted(starts, m, side="right")]
