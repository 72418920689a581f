"""The order in which a plan's rows are handed out: positions, so that a claim has nothing to weigh. Pure.

Free workers take the first ready row. So the order alone makes dispatch work-conserving and ends it evenly:

- clusters by work, most first, each with its source before its followers;
- sources a little ahead of their turn (`lead` clusters), so that nobody waits for one that runs: with no more clusters
  than that all sources come first;
- rows that nobody follows and that follow nobody after the clusters: they fill what gaps there are;
- cheap followers last (`tail` rows), the dearest of them first: the last rows decide how unevenly the workers end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.nearest import IntArray

LEAD = 64  # clusters: enough for twice as many sources under way as 32 workers have hands
TAIL = 128  # rows: several for each of 32 workers


def positions(
    source: IntArray,
    entry: IntArray,
    cost: NDArray[np.floating],
    priority: IntArray,
    *,
    lead: int = LEAD,
    tail: int = TAIL,
) -> IntArray:
    """Where each row stands in the order, 0 first, all different. int64 [n].

    `source`: index of the row that it waits for, -1 if none; `entry`: id of the entry that it follows, -1 if none;
    `cost`: in plain generations (a duplicate's is 0). Within one priority as described above; a higher one comes first,
    and a row is as urgent as the most urgent of those that wait for it (`urgency`). O(n log n).
    """
    n = len(source)
    index = np.arange(n)
    urgent = urgency(source, priority)
    cluster = _clusters(source, entry)
    head = (source < 0) & (entry < 0)
    members = np.bincount(cluster, minlength=n)
    work: NDArray[np.floating] = np.bincount(cluster, weights=cost, minlength=n).astype(np.float64)
    alone = head & (members[cluster] == 1)
    # One cluster's rows may be of several priorities: it stands once in each of them, by its whole work.
    level = np.unique(-urgent, return_inverse=True)[1].reshape(-1)
    position = np.empty(n, np.int64)
    start = 0
    for code in range(int(level.max()) + 1 if n else 0):
        rows = index[level == code]
        order = _ordered(rows, head, alone, cluster, work, cost, lead, tail)
        position[order] = np.arange(start, start + len(order))
        start += len(order)
    return position


def urgency(source: IntArray, priority: IntArray) -> IntArray:
    """The priority of each row, or of the most urgent row that waits for it, directly or through another."""
    urgent = np.asarray(priority, dtype=np.int64).copy()
    waits = np.flatnonzero(source >= 0)
    while True:
        before = urgent.copy()
        np.maximum.at(urgent, source[waits], urgent[waits])
        if np.array_equal(before, urgent):
            return urgent


def _clusters(source: IntArray, entry: IntArray) -> IntArray:
    """A row of each row's cluster, the same for all of it: the source, or the first that follows the same entry."""
    root = np.where(source >= 0, source, np.arange(len(source)))
    while not np.array_equal(further := root[root], root):  # a duplicate's original may itself follow
        root = further
    at_entry = entry[root] >= 0
    if at_entry.any():
        _, first, inverse = np.unique(entry[root][at_entry], return_index=True, return_inverse=True)
        root = root.copy()
        root[at_entry] = root[at_entry][first][inverse.reshape(-1)]
    return root


def _ordered(
    rows: IntArray,
    head: NDArray[np.bool_],
    alone: NDArray[np.bool_],
    cluster: IntArray,
    work: NDArray[np.floating],
    cost: NDArray[np.floating],
    lead: int,
    tail: int,
) -> IntArray:
    """The rows of one priority in order."""
    single = rows[alone[rows]]
    grouped = rows[~alone[rows]]
    # A cluster's turn: its place among those of this priority, by work.
    names = np.unique(cluster[grouped])
    turn = np.zeros(len(cluster), np.int64)
    turn[names[np.lexsort((names, -work[names]))]] = np.arange(len(names))
    when = turn[cluster[grouped]]
    when = np.where(head[grouped], when - lead, when)
    late = np.zeros(len(grouped), bool)
    follows = np.flatnonzero(~head[grouped] & (cost[grouped] > 0))
    if len(follows) > tail:
        # Those of the last clusters: whose sources are held by nobody for long anyway.
        by_turn = follows[np.lexsort((-grouped[follows], when[follows]))]
        late[by_turn[len(by_turn) - tail :]] = True
    first = np.flatnonzero(~late)
    first = first[np.lexsort((grouped[first], -cost[grouped[first]], ~head[grouped[first]], when[first]))]
    last = np.flatnonzero(late)
    last = last[np.lexsort((grouped[last], -cost[grouped[last]]))]
    return np.concatenate([grouped[first], single, grouped[last]])
