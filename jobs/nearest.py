"""Each row's nearest neighbors above a threshold: the part of a similarity matrix that a plan can use.

Rows are compared a strip at a time, so that memory doesn't grow with the square of their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import FloatArray
from chorus_batch.jobs.processors import processors, side_by_side

IntArray: TypeAlias = NDArray[np.int64]
IdArray: TypeAlias = NDArray[np.int32]
Places: TypeAlias = IntArray | IdArray
Links: TypeAlias = tuple[IdArray, IdArray, FloatArray]  # client, facility, similarity

STRIP = 16_000_000  # similarities held at once (64 MB)
_PAIRS = 4096  # vectors looked up at once: what a processor's cache holds
NONE = np.float32(-2.0)  # below every cosine
DENSE = 4  # a row with more than so many times `keep` neighbors is in a dense place, which needs hubs
_DENSE_AT_ONCE = 1_000_000  # similarities of rows in dense places that are looked through at once
REACH = 16  # a hub reaches so many times the rows that it may serve

_BLUR = np.random.default_rng(0).random(65_521, dtype=np.float32) * np.float32(2e-6)


@dataclass(frozen=True)
class Points:
    """What may be followed: unit vectors [p, d] and the codes of their prompts."""

    vectors: FloatArray
    prompt: IntArray

    def __len__(self) -> int:
        return len(self.vectors)


@dataclass(frozen=True)
class Hunt:
    """What is looked for: for each client its `keep` nearest points of similarity >= `floor`, itself excepted.

    Points of a client's own prompt don't count unless the client is `forced`. `own`: the points are the clients
    themselves. `cap`: followers that one point may have, which says how many hubs a dense place needs.
    """

    clients: Points
    forced: NDArray[np.bool_]
    points: Points
    own: bool
    floor: float
    keep: int
    cap: int
    repeated: bool  # some client and some other point share a prompt

    def compared(self, rows: IntArray, columns: IntArray | None) -> FloatArray:
        """Similarities of clients `rows` to points `columns` (None: all), NONE where the rules forbid the pair."""
        points = self.points.vectors if columns is None else self.points.vectors[columns]
        itself = self.own and rows is columns  # numpy computes the half of such a product
        near: FloatArray = (points if itself else self.clients.vectors[rows]) @ points.T
        if self.repeated:
            prompts = self.points.prompt if columns is None else self.points.prompt[columns]
            same = self.clients.prompt[rows][:, None] == prompts[None, :]
            same[self.forced[rows]] = False
            near[same] = NONE
        if itself:
            np.fill_diagonal(near, NONE)
        elif self.own:
            if columns is None:
                near[np.arange(len(rows)), rows] = NONE
            else:
                near[rows[:, None] == columns[None, :]] = NONE
        return near

    def paired(self, rows: IntArray, points: Places) -> FloatArray:
        """The similarity of each of `rows` to the point at the same place of `points`, as `compared` has it."""
        near = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _PAIRS):
            part = slice(start, start + _PAIRS)
            np.einsum("pd,pd->p", self.clients.vectors[rows[part]], self.points.vectors[points[part]], out=near[part])
        if self.repeated:
            same = self.clients.prompt[rows] == self.points.prompt[points]
            near[same & ~self.forced[rows]] = NONE
        if self.own:
            near[rows == points] = NONE
        return near


@dataclass
class Nearest:
    """The neighbors found so far: `point` and `similarity` [n, keep], nearest first, -1 and NONE where there are less.

    `hubs`: links to points in dense places, beyond each row's nearest. A graph of nearest neighbors alone splits a
    giant cluster into as many small ones as neighbors are kept.
    """

    point: IdArray
    similarity: FloatArray
    hubs: list[Links] = field(default_factory=list)

    @classmethod
    def empty(cls, rows: int, keep: int) -> Nearest:
        """Nothing found yet."""
        return cls(np.full((rows, keep), -1, np.int32), np.full((rows, keep), NONE, np.float32))

    def merge(self, rows: IntArray, point: IdArray, similarity: FloatArray) -> None:
        """Take over what is nearer than what these rows have. What they have may come again, but each point once."""
        known = self.point[rows]
        fresh = point >= 0
        width = int(np.count_nonzero(known >= 0, axis=1).max(initial=0))
        for place in range(width):  # most of what comes is known already: this is cheaper than sorting
            fresh &= point != known[:, place, None]
        some = np.flatnonzero(fresh.any(axis=1))
        rows = rows[some]
        added = np.where(fresh[some], similarity[some], NONE)
        found = np.concatenate([self.similarity[rows], added], axis=1)
        points = np.concatenate([known[some], np.where(fresh[some], point[some], -1)], axis=1)
        best = np.argsort(-found, axis=1, kind="stable")[:, : self.point.shape[1]]
        self.similarity[rows] = np.take_along_axis(found, best, axis=1)
        self.point[rows] = np.take_along_axis(points, best, axis=1)

    def link(self, hunt: Hunt, near: FloatArray, rows: IntArray, columns: IntArray) -> None:
        """Add the hubs among `rows`; `near` are the similarities of clients `rows` to points `columns`."""
        hub, client = hubs(near, hunt.floor, hunt.keep, hunt.cap)
        if len(hub):
            self.hubs.append((columns[client].astype(np.int32), rows[hub].astype(np.int32), near[hub, client]))

    def sort_hubs(self) -> None:
        """Put the hubs into an order of their own: what found them ran side by side, and ended in any order."""
        self.hubs.sort(key=lambda links: int(links[1][0]))

    def floors(self, rows: IntArray, floor: float) -> FloatArray:
        """The similarity from which on a point would be among the nearest of these rows."""
        return np.asarray(np.maximum(self.similarity[rows, -1], np.float32(floor)), dtype=np.float32)


def ascending(codes: Places) -> IntArray:
    """A stable order of up to 2**32 codes from 0 to 2**31. Several times faster than numpy's own stable sort."""
    keys = codes.astype(np.int64)
    keys <<= 32
    keys |= np.arange(len(codes))
    keys.sort()
    keys &= 0xFFFFFFFF
    return keys


def strongest(near: FloatArray, floors: FloatArray, keep: int) -> tuple[IdArray, FloatArray]:
    """Of each row of `near` the up to `keep` largest values >= its floor: columns (-1: none) and values."""
    found = near >= floors[:, None]
    counts = np.count_nonzero(found, axis=1)
    width = near.shape[1]
    dense = np.flatnonzero(counts > DENSE * keep)
    step = max(1, _DENSE_AT_ONCE // width)
    for start in range(0, len(dense), step):
        # Where nearly all columns pass, gathering them first costs more than looking through the whole row.
        rows = dense[start : start + step, None]
        blurred = near[rows[:, 0]] + np.take(_BLUR, rows * 7919 + np.arange(width), mode="wrap")
        found[rows[:, 0]] = False
        found[rows, np.argpartition(blurred, width - keep, axis=1)[:, width - keep :]] = True
        counts[rows] = keep
    most = int(counts.max(initial=0))
    column = np.full((len(near), most), -1, np.int32)
    value = np.full((len(near), most), NONE, np.float32)
    i, j = np.nonzero(found)
    rank = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts)
    column[i, rank] = j
    value[i, rank] = near[i, j]
    if most <= keep:
        return column, value
    # Rows alike would all choose the same of their equal neighbors, and nobody would choose the others.
    blurred = value.copy()
    blurred[i, rank] += _BLUR[(i * 7919 + j) % len(_BLUR)]
    top = np.argpartition(blurred, most - keep, axis=1)[:, most - keep :]
    return np.take_along_axis(column, top, axis=1), np.take_along_axis(value, top, axis=1)


def hubs(near: FloatArray, floor: float, keep: int, cap: int) -> tuple[IntArray, IntArray]:
    """Pairs (row, column) of `near` that link the rows in its densest places to many others; none elsewhere."""
    counts = np.count_nonzero(near >= np.float32(floor), axis=1)
    dense = int(np.count_nonzero(counts > DENSE * keep))
    if not dense:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    chosen = np.argsort(-counts, kind="stable")[: min(dense, 4 + 2 * dense // cap)]
    rng = np.random.default_rng(near.shape[0])
    rows, columns = [], []
    for row in chosen.tolist():
        reached = np.flatnonzero(near[row] >= np.float32(floor))
        if len(reached) > REACH * cap:
            reached = rng.choice(reached, REACH * cap, replace=False)
        rows.append(np.full(len(reached), row))
        columns.append(reached)
    return np.concatenate(rows), np.concatenate(columns)


def exact(hunt: Hunt) -> Nearest:
    """Every pair compared: O(n p d) time."""
    rows, width = len(hunt.clients), len(hunt.points)
    nearest = Nearest.empty(rows, min(hunt.keep, width))
    if not width:
        return nearest
    step = max(16, STRIP // (width * processors()))

    def strip(start: int) -> None:
        part = np.arange(start, min(rows, start + step))
        near = hunt.compared(part, None)
        column, value = strongest(near, np.full(len(part), hunt.floor, np.float32), nearest.point.shape[1])
        order = np.argsort(-value, axis=1, kind="stable")
        nearest.point[part, : order.shape[1]] = np.take_along_axis(column, order, axis=1)
        nearest.similarity[part, : order.shape[1]] = np.take_along_axis(value, order, axis=1)
        if hunt.own:
            nearest.link(hunt, near, part, np.arange(width))

    side_by_side(strip, range(0, rows, step))
    nearest.sort_hubs()
    return nearest
