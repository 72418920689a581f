"""Add-greedy for many rows at once: an election in rounds, among few candidates at a time.

Every candidate says what opening it would save. Each row votes for the one that says most among those that would serve
it better than now. A candidate that holds nearly all of its own gain in votes is opened, together with all the others
that do: their voters differ, so that their gains add up. The next round starts from there. The candidate with the
largest gain always wins, so that this ends.

Gains only fall as others open, so those that can't reach a bar are left alone until nobody above it is left; then the
bar is lowered. In the limit this is add-greedy, without a step of a heap for each facility.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import FloatArray
from chorus_batch.jobs.graph import NOTHING, DoubleArray, Graph
from chorus_batch.jobs.nearest import IdArray, IntArray
from chorus_batch.jobs.processors import taken
from chorus_batch.jobs.serving import Serving

_MAJORITY = 0.9  # of a candidate's gain; lower: fewer rounds, less like add-greedy
_FILLED = 15  # bars, after which followers move to better sources that have room: cheap, and 0.3 % more is saved
_BAR = 0.9  # of the largest gain; lower: more candidates at a time, fewer times that arcs are looked up
_SMALL = 0.05  # plain generations: candidates that gain less than this are all taken together


def elect(serving: Serving) -> None:
    """Open rows until none saves anything. What is open already takes no part, but is filled up now and then."""
    arcs = _Arcs(serving.graph)
    bound = arcs.total_savings()
    for bars in count():
        bound[serving.open[: len(bound)]] = 0.0
        if not bars % _FILLED:
            serving.settle()
            arcs.tidy(serving.benefit, bound)
        bar = _BAR * float(bound.max(initial=0.0))
        if bar <= NOTHING:
            return
        bar = bar if bar > _SMALL else NOTHING
        _elect_above(serving, arcs, bound, np.flatnonzero(bound > bar), bar)


def _elect_above(serving: Serving, arcs: _Arcs, bound: DoubleArray, candidates: IntArray, bar: float) -> None:
    """Open candidates until none of them gains more than `bar`; `bound` [n] gets what they say at last."""
    places, candidate = arcs.of(candidates)
    client, saving = taken(arcs.client, places), taken(arcs.saving, places)
    while len(candidates):
        more = saving - taken(serving.benefit.astype(np.float32), client)
        better = np.flatnonzero(more > NOTHING)
        if len(better) < len(more):
            places, candidate, client = taken(places, better), taken(candidate, better), taken(client, better)
            saving, more = taken(saving, better), taken(more, better)
        counted = _counted(candidate, more, len(candidates), serving.cap)
        voter, choice, worth = client[counted], candidate[counted], more[counted]
        lost = serving.benefit[candidates]
        gain = np.bincount(choice, worth, len(candidates)) - lost
        bound[candidates] = gain
        # rank[i] of candidate i: 0 has the largest gain
        rank = np.empty(len(candidates), np.int64)
        rank[np.argsort(-gain, kind="stable")] = np.arange(len(candidates))
        vote = np.full(len(bound), len(candidates), np.int64)
        vote[candidates] = rank  # one's own opening counts as well
        np.minimum.at(vote, voter, rank[choice])
        won = vote[voter] == rank[choice]
        votes = np.bincount(choice[won], worth[won], len(candidates)) - lost
        elected = (gain > bar) & (votes >= _MAJORITY * gain) & (vote[candidates] == rank)
        new = candidates[elected]
        serving.release(new)
        serving.benefit[new] = np.inf
        serving.open[new] = True
        serving.move(arcs.number[places[counted[won & elected[choice]]]])
        # Who stays below the bar can't come back above it.
        stays = (gain > bar) & ~elected
        number = np.cumsum(stays, dtype=np.int32) - np.int32(1)
        kept = np.flatnonzero(stays.take(candidate))
        places, candidate = taken(places, kept), number.take(taken(candidate, kept))
        client, saving = taken(client, kept), taken(saving, kept)
        candidates = candidates[stays]


class _Arcs:
    """A graph's arcs, those of one facility beside each other: `number` in the graph, `client`, `saving`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.start = graph.facility_start
        self.number = graph.by_facility
        self.client = taken(graph.client, self.number)
        self.saving = taken(graph.saving, self.number)

    def of(self, rows: IntArray) -> tuple[IntArray, IdArray]:
        """The places of the arcs of those that may follow any of `rows`, and for each its row's place in `rows`."""
        first = self.start[rows]
        width = self.start[rows + 1] - first
        row = np.repeat(np.arange(len(rows), dtype=np.int32), width)
        return np.arange(len(row)) + np.repeat(first - (np.cumsum(width) - width), width), row

    def tidy(self, benefit: DoubleArray, bound: DoubleArray) -> None:
        """Drop the arcs over which nobody will ever be won: benefits only rise, and rows without a gain stay so."""
        gains = np.zeros(len(self.start) - 1, dtype=bool)
        gains[: len(bound)] = bound > NOTHING
        useful = np.repeat(gains, np.diff(self.start))
        useful &= self.saving > taken(benefit.astype(np.float32), self.client)
        self.start = np.append(0, np.cumsum(_sums(useful, self.start, np.int64)))
        kept = np.flatnonzero(useful)
        self.number, self.client = taken(self.number, kept), taken(self.client, kept)
        self.saving = taken(self.saving, kept)

    def total_savings(self) -> DoubleArray:
        """What each row would save if nothing else were open and it had no cap. float64 [n]."""
        return _sums(self.saving, self.start, np.float64)[: self.graph.n]


def _sums(values: NDArray[Any], start: IntArray, kind: type[np.generic]) -> NDArray[Any]:
    """The sums of values[start[i]:start[i + 1]]."""
    found = np.zeros(len(start) - 1, kind)
    filled = np.flatnonzero(np.diff(start))
    if len(filled):
        found[filled] = np.add.reduceat(values, start[filled], dtype=kind)
    return found


def _counted(candidate: IdArray, more: FloatArray, candidates: int, cap: int) -> IntArray:
    """The places of those arcs that a candidate's gain counts: as many as it may have followers, the best of them.

    `candidate` must ascend.
    """
    width = np.bincount(candidate, minlength=candidates)
    first = np.cumsum(width) - width
    counts = np.ones(len(candidate), dtype=bool)
    crowded = np.flatnonzero(width > cap)
    # Beside others of about their own width: finding a bar in rows of a matrix is several times faster than sorting.
    size = np.frexp(width[crowded])[1]
    for one in np.unique(size):
        some = crowded[size == one]
        widest = int(width[some].max())
        inside = np.arange(widest) < width[some, None]
        place = np.minimum(first[some, None] + np.arange(widest), len(more) - 1)
        value = np.where(inside, more[place], -np.inf)
        bar = np.partition(value, widest - cap, axis=1)[:, widest - cap, None]
        above, level = value > bar, value == bar
        chosen = above | (level & (np.cumsum(level, axis=1) <= cap - np.count_nonzero(above, axis=1)[:, None]))
        counts[place[inside]] = chosen[inside]
    return np.flatnonzero(counts)
