"""What reuse costs: c(m), the cost of a follower at similarity m, where a plain generation costs 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.errors import ChorusBatchError

FloatArray: TypeAlias = NDArray[np.float32]

# Dot products of unit vectors in float32 are off by up to about this much: a pair this close below tau counts as tau.
ROUNDING = 1e-6


class PlanInputError(ChorusBatchError):
    """What the planner was given doesn't fit together; the message names the argument."""

    code = "plan_input"


@dataclass(frozen=True)
class Price:
    """What a job costs besides full steps, where one of those is 1.

    `region`: a step that computes a region only; the paper measured 0.67 at half the tokens. `beside`: everything but
    denoising, of a plain generation; `beside_reuse`: of one that starts from another's latents.
    """

    region: float = 1.0
    beside: float = 0.0
    beside_reuse: float = 0.0


@dataclass(frozen=True)
class Curve:
    """c(m): the cost of a follower at similarity m, where a plain generation costs 1.

    `points` (m, cost), m rising, cost not rising, in 0..1. Between two points the cost is interpolated, or, if
    `stepwise`, the lower point's (as the engine's table of boundaries has it). Outside it is the nearest point's.
    """

    points: tuple[tuple[float, float], ...]
    stepwise: bool = False

    def __post_init__(self) -> None:
        m, costs = np.array(self.points, dtype=np.float64).reshape(-1, 2).T
        ordered = np.all(np.diff(m) > 0) and np.all(np.diff(costs) <= 0)
        if not (m.size and np.all(np.isfinite(m)) and ordered and np.all((costs >= 0) & (costs <= 1))):
            raise PlanInputError(f"cost curve {self.points}: similarities must rise, costs fall between 1 and 0")

    @classmethod
    def linear(cls, tau: float, at_tau: float = 0.8, at_one: float = 0.625) -> Curve:
        """Linear from c(tau) to c(1). The defaults are the study's curve for 4 steps; 50 steps: 0.556, 0.286."""
        return cls(((tau, at_tau), (1.0, at_one)) if tau < 1.0 else ((1.0, at_one),))

    @classmethod
    def of_boundaries(cls, rows: Sequence[Sequence[float]], steps: int, price: Price | None = None) -> Curve:
        """From the engine's table: rows (m_from, k1, k2). The first k1 steps are free, those up to k2 a region's."""
        price = price or Price()
        plain = steps + price.beside
        points = []
        for m, k1, k2 in rows:
            cost = steps - k1 - (1.0 - price.region) * (k2 - k1) + price.beside_reuse
            points.append((float(m), min(cost / plain, 1.0)))
        return cls(tuple(points), stepwise=True)

    def __call__(self, m: NDArray[np.floating]) -> FloatArray:
        """Costs, float32, of the similarities `m`, any shape."""
        at, costs = np.array(self.points, dtype=np.float64).T
        if self.stepwise:
            found = costs[np.maximum(np.searchsorted(at, np.asarray(m) + ROUNDING, side="right") - 1, 0)]
        else:
            found = np.interp(m, at, costs)
        return np.asarray(found, dtype=np.float32)


@dataclass(frozen=True)
class Reuse:
    """Pairs of similarity >= `tau` (0..1) at cost `curve`(m)."""

    tau: float
    curve: Curve

    def __post_init__(self) -> None:
        if not 0.0 <= self.tau <= 1.0:
            raise PlanInputError(f"tau is {self.tau}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Domain(Reuse):
    """What reuse means inside one domain.

    Without `semantic` there is none: its rows are linked to equal ones and else computed. `kinds`: what holds instead
    for pairs whose kinds of difference are known, by the kind's code; None: such pairs aren't reused.
    """

    semantic: bool = True
    kinds: tuple[Reuse | None, ...] = ()

    @property
    def lowest(self) -> float:
        """The similarity below which no pair is reused, whatever its kind."""
        return min([self.tau, *(kind.tau for kind in self.kinds if kind is not None)])

    def savings(self, m: FloatArray, kinds: NDArray[np.uint16]) -> FloatArray:
        """What following saves, 1 - c(m), at similarities `m` [n] and kinds; 0: no reuse.

        `kinds` holds bit i for kind i, the next one for every kind without a table of its own, and nothing where the
        kinds aren't known. A difference of several kinds saves what the least of them does.
        """
        general = self._saving(self, m)
        if not self.kinds:
            return general
        found = np.where(kinds == 0, general, np.float32(np.inf))
        for code, reuse in enumerate([*self.kinds, self]):
            of_kind = np.flatnonzero(kinds & np.uint16(1 << code))
            found[of_kind] = np.minimum(found[of_kind], self._saving(reuse, m[of_kind]))
        return np.asarray(found, dtype=np.float32)

    @staticmethod
    def _saving(reuse: Reuse | None, m: FloatArray) -> FloatArray:
        if reuse is None:
            return np.zeros(len(m), np.float32)
        near = m >= np.float32(reuse.tau - ROUNDING)
        return np.where(near, 1.0 - reuse.curve(m), np.float32(0.0)).astype(np.float32)
