"""Nearest neighbors among very many rows, nearly all of them: many independent tables, then neighbors of neighbors.

A table puts the points into an order in which near ones mostly stand beside each other, cuts it into blocks, and
compares the points of each block with each other. What one table misses at the borders of its blocks another one, in
another order, mostly finds; and what all of them miss is mostly a neighbor of a neighbor. Many cheap tables are worth
more than few thorough ones (measured on 100,000 synthetic prompts, CPU seconds and share of nearest neighbors found:
12 tables that compare whole groups of 256 around random centers 41 s, 0.958; 10 tables of blocks of 256 with cells of
12 and one pass over neighbors of neighbors 19 s, 0.909, with cells of 6 20 s, 0.925; 18 and two passes 37 s, 0.967).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from chorus_batch.jobs.curve import FloatArray
from chorus_batch.jobs.nearest import NONE, Hunt, IntArray, Nearest, ascending, strongest
from chorus_batch.jobs.processors import side_by_side

_AT_ONCE = 4_000_000  # similarities held at once (16 MB)
_FEW = 64  # centers that a vector is compared with all of
_HEADS = 3  # groups in which a vector's center is looked for
_ROWS = 2048  # that are worked on together


@dataclass(frozen=True)
class Effort:
    """How hard to look. More of each, but of `cell`: more recall, more time."""

    tables: int | None = None  # None: 14 for 100,000 points, and 4 more for ten times as many
    block: int = 256  # points compared with each other
    cell: int = 6  # points around one center, in the mean
    sketch: int = 96  # dimensions in which the nearest center is looked for
    passes: int = 2  # over the neighbors of neighbors
    circle: int = 8  # nearest neighbors, and their nearest neighbors, that a pass looks at


def approximate(hunt: Hunt, effort: Effort) -> Nearest:
    """Like `exact`, but some neighbors are missed. O(tables n (block d + (n / cell)^(1/3) sketch)) time."""
    nearest = Nearest.empty(len(hunt.clients), min(hunt.keep, len(hunt.points)))
    axes = _axes(hunt.points.vectors, effort.sketch)
    points = _sketched(hunt.points.vectors, axes)
    clients = points if hunt.own else _sketched(hunt.clients.vectors, axes)
    for table in range(_tables(len(hunt.points)) if effort.tables is None else effort.tables):
        _add_table(hunt, nearest, effort, table, points, clients)
    if hunt.own:  # of entries it isn't known whom they are near to
        for _ in range(effort.passes):
            _ask_neighbors(hunt, nearest, effort.circle)
    return nearest


def _tables(points: int) -> int:
    """So many that about as large a share of the nearest neighbors is found among many points as among few."""
    return max(6, round(4 * math.log10(max(points, 1))) - 6)


def _axes(vectors: FloatArray, dimensions: int) -> FloatArray:
    """The directions [d, dimensions] in which a sample of the vectors differs most."""
    sample = vectors[np.random.default_rng(0).choice(len(vectors), min(len(vectors), 4096), replace=False)]
    return np.ascontiguousarray(np.linalg.eigh(sample.T @ sample).eigenvectors[:, -dimensions:])


def _sketched(vectors: FloatArray, axes: FloatArray) -> FloatArray:
    found = np.empty((len(vectors), axes.shape[1]), np.float32)
    for start in range(0, len(vectors), 65_536):
        np.matmul(vectors[start : start + 65_536], axes, out=found[start : start + 65_536])
    return found


def _add_table(
    hunt: Hunt, nearest: Nearest, effort: Effort, seed: int, points: FloatArray, clients: FloatArray
) -> None:
    rng = np.random.default_rng(seed)
    centers = points[rng.choice(len(points), max(1, len(points) // effort.cell), replace=False)]
    cells = _Cells(centers, rng)
    cell = cells.assigned(points)
    blocks = np.array_split(ascending(cell), max(1, len(points) // effort.block))
    if hunt.own:
        followers = blocks
    else:  # a client belongs where its own cell begins
        size = np.bincount(cell, minlength=len(centers))
        begins = np.cumsum(size) - size
        ends = np.cumsum([len(block) for block in blocks])
        place = np.searchsorted(ends, begins[cells.assigned(clients)], side="right")
        followers = _grouped(np.minimum(place, len(blocks) - 1), len(blocks))

    def compare(block: int) -> None:
        rows = followers[block]
        columns = blocks[block]
        # Very many clients may want the same few points: they are compared a strip at a time.
        step = max(16, _AT_ONCE // len(columns))
        for start in range(0, len(rows), step):
            part = rows if len(rows) <= step else rows[start : start + step]
            near = hunt.compared(part, columns)
            column, value = strongest(near, nearest.floors(part, hunt.floor), hunt.keep)
            if hunt.own and not seed:
                nearest.link(hunt, near, part, columns)
            nearest.merge(part, np.where(column >= 0, columns[column], -1).astype(np.int32), value)

    side_by_side(compare, range(len(blocks)))
    nearest.sort_hubs()


def _ask_neighbors(hunt: Hunt, nearest: Nearest, circle: int) -> None:
    """Compare each row with the nearest neighbors of its nearest neighbors."""
    before = nearest.point[:, :circle].copy()

    def ask(start: int) -> None:
        rows = np.arange(start, min(len(before), start + _ROWS))
        asked = before[rows]
        point = np.where(asked[:, :, None] >= 0, before[asked], -1).reshape(len(rows), -1)
        point[point == rows[:, None]] = -1
        point.sort(axis=1)
        point[:, 1:][point[:, 1:] == point[:, :-1]] = -1
        known = nearest.point[rows]
        for place in range(known.shape[1]):
            point[point == known[:, place, None]] = -1
        row, column = np.nonzero(point >= 0)
        value = np.full(point.shape, NONE, np.float32)
        value[row, column] = hunt.paired(rows[row], point[row, column])
        point[value < nearest.floors(rows, hunt.floor)[:, None]] = -1
        nearest.merge(rows, point, value)

    side_by_side(ask, range(0, len(before), _ROWS))


class _Cells:
    """Centers in an order in which near ones mostly stand beside each other: groups around heads, which are cells too.

    So a vector needn't be compared with all centers: only with those of the groups whose heads are near to its own.
    """

    def __init__(self, centers: FloatArray, rng: np.random.Generator) -> None:
        self.heads: _Cells | None = None
        self.centers = centers
        self.choices = [np.arange(len(centers))]
        if len(centers) <= _FEW:
            return
        groups = int(len(centers) ** (0.5 if len(centers) <= _FEW**2 else 2 / 3))
        self.heads = _Cells(centers[rng.choice(len(centers), groups, replace=False)], rng)
        heads = self.heads.centers
        owner = self.heads.assigned(centers)
        # Inside a group the order is that between its head and some other one.
        along = np.einsum("cd,cd->c", centers, (heads - heads[rng.permutation(groups)])[owner])
        order = np.lexsort((along, owner))
        self.centers = centers[order]
        members = _grouped(owner[order], groups)
        near = np.argsort(-(heads @ heads.T), axis=1, kind="stable")[:, :_HEADS]
        self.choices = [np.concatenate([members[head] for head in row]) for row in near.tolist()]

    def assigned(self, vectors: FloatArray) -> IntArray:
        """For each vector the number of the center that is (mostly) the nearest."""
        head = self.heads.assigned(vectors) if self.heads else np.zeros(len(vectors), np.int64)
        rows_of = _grouped(head, len(self.choices))
        found = np.empty(len(vectors), np.int64)

        def to_center(part: tuple[int, int]) -> None:
            head, start = part
            rows, choices = rows_of[head][start : start + _ROWS], self.choices[head]
            found[rows] = choices[(vectors[rows] @ self.centers[choices].T).argmax(axis=1)]

        parts = ((head, start) for head, rows in enumerate(rows_of) for start in range(0, len(rows), _ROWS))
        side_by_side(to_center, parts)
        return found


def _grouped(group: IntArray, groups: int) -> list[IntArray]:
    """The places of each group's members, ascending."""
    order = ascending(group)
    return np.split(order, np.searchsorted(group[order], np.arange(1, groups)))


def recall(hunt: Hunt, nearest: Nearest, sample: int = 1000) -> float | None:
    """The share of rows whose nearest neighbor was found, among those of a random sample that have one.

    None if no row of the sample has a neighbor. A neighbor as near as the nearest counts as it.
    """
    rows = np.random.default_rng(0).choice(len(hunt.clients), min(sample, len(hunt.clients)), replace=False)
    best = np.full(len(rows), NONE, np.float32)
    step = max(1, _AT_ONCE // len(rows))
    for start in range(0, len(hunt.points), step):
        columns = np.arange(start, min(len(hunt.points), start + step))
        np.maximum(best, hunt.compared(rows, columns).max(axis=1), out=best)
    has = best >= np.float32(hunt.floor)
    if not has.any():
        return None
    return float((nearest.similarity[rows[has], 0] >= best[has] - np.float32(1e-5)).mean())
