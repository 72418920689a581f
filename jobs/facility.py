"""Facility location: which rows of a graph become sources, and whom they serve.

Add-greedy with a cap on followers, in rounds (see election.py); for short lists then local search from several starts,
never worse than serving in arrival order would be.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.election import elect
from chorus_batch.jobs.graph import NOTHING, Graph, Limits
from chorus_batch.jobs.nearest import IntArray
from chorus_batch.jobs.serving import Serving


def located(graph: Graph, limits: Limits) -> tuple[IntArray, IntArray]:
    """For each row the arc over which it is served (-1: a source) and the row of its fallback source (-1: none)."""
    best = _Search(graph, limits.followers)
    if graph.n > limits.search:
        elect(best)
    else:
        best.add_greedily()
        # Never worse than serving in arrival order, which is a start of its own.
        online = _Search(graph, limits.followers)
        online.arrive()
        online.add_greedily()
        starts = [best, online, best.copy(), online.copy()]
        candidates = min(limits.candidates, max(_FEW, _WEIGHED // max(1, len(graph.client))))
        for state in starts[2:]:
            state.search(limits.passes, candidates)
        best = max(starts, key=_Search.saved)
        if len(graph.client) <= _SPARSE:
            rng = np.random.default_rng(0)
            # The sparser, the more local optima, and the cheaper a start.
            for _ in range(limits.kicks * (2 if len(graph.client) <= _SPARSE // 10 else 1)):
                state = best.copy()
                state.kick(rng)
                state.search(limits.passes, candidates)
                best = max(best, state, key=_Search.saved)
    best.settle()
    return best.served, best.second()


# Where rows have very many neighbors a candidate takes long, and matters less: the next one is nearly as good.
_FEW, _WEIGHED = 8, 3_000_000
_SPARSE = 100_000  # arcs up to which the search is begun again from solutions that were disturbed
_DISTURBED = 0.1  # of the sources
_KEEP, _CLOSE = -2, -1  # what to do with a source, besides replacing it by another row


class _Search(Serving):
    """A solution that is being improved, one facility after the other."""

    def add_greedily(self) -> None:
        """Open the facility that saves most, until none saves anything.

        Savings only fall as others open, so an old value is a bound and only the top of the heap is computed anew.
        """
        graph = self.graph
        more = np.maximum(graph.saving - self.benefit[graph.client], 0.0)
        bound = np.bincount(graph.facility, weights=more, minlength=graph.facilities).astype(np.float64)  # none: int
        bound[: graph.n] -= np.where(self.open[: graph.n], 0.0, self.benefit)
        heap = [(-value, facility) for facility, value in enumerate(bound.tolist()) if value > NOTHING]
        heapq.heapify(heap)
        while heap:
            _, facility = heap[0]
            value, arcs = self.wins(facility)
            if value <= NOTHING:
                heapq.heappop(heap)
            elif len(heap) > 1 and value < -min(heap[1:3])[0] - NOTHING:
                heapq.heapreplace(heap, (-value, facility))
            else:
                heapq.heappop(heap)
                self.take(facility, arcs)

    def arrive(self) -> None:
        """The serving rule: row after row follows its nearest earlier source that has room, else becomes one."""
        graph = self.graph
        for row in range(graph.n):
            if graph.off[row]:
                continue
            arcs = np.arange(graph.start[row], graph.start[row + 1])
            facilities = graph.facility[arcs]
            usable = self.open[facilities] & (self.load[facilities] < self.cap)
            usable &= (facilities < row) | (facilities >= graph.n)
            if usable.any():
                arc = int(arcs[usable][np.argmax(graph.saving[arcs[usable]])])
                self.take(int(graph.facility[arc]), np.array([arc]))
            else:
                self.open[row] = True
                self.benefit[row] = np.inf

    def search(self, passes: int, candidates: int) -> None:
        """Local search until nothing gets better."""
        for _ in range(passes):
            if not self.improve(candidates):
                return
            self.add_greedily()

    def kick(self, rng: np.random.Generator) -> None:
        """Close some sources, at random, and open what is best then: out of a local optimum."""
        graph = self.graph
        followed = np.unique(graph.facility[self.served[self.served >= 0]])
        followed = followed[(followed < graph.n)]
        followed = followed[~graph.off[followed]]
        for j in followed[rng.random(len(followed)) < _DISTURBED].tolist():
            arcs = self.arcs_of(j)
            self.release(graph.client[arcs[self.served[graph.client[arcs]] == arcs]])
            self.open[j] = False
            self.benefit[j] = 0.0
        self.add_greedily()

    def improve(self, candidates: int) -> bool:
        """One pass of local search: close a source, or replace it by one of its nearest, where that saves more."""
        graph = self.graph
        changed = False
        order = np.flatnonzero(self.open[: graph.n] & ~graph.off)
        for j in order.tolist():
            arcs = np.arange(graph.start[j], graph.start[j + 1])
            others = graph.facility[arcs]
            near = np.argsort(-graph.saving[arcs], kind="stable")
            swaps = [int(others[a]) for a in near if others[a] < graph.n and not self.open[others[a]]][:candidates]
            changed |= self._replace(j, swaps)
        return changed

    def _replace(self, j: int, swaps: list[int]) -> bool:
        """Close source j (its followers and itself go to what else is open), alone or for one of `swaps`."""
        graph = self.graph
        mine = self.arcs_of(j)
        mine = mine[self.served[graph.client[mine]] == mine]
        left = np.append(graph.client[mine], j)  # those that need another source
        now = np.append(graph.saving[mine], 0.0)
        other, other_saving = self._elsewhere(left, j)
        best, best_gain = _KEEP, NOTHING
        gain = float(np.sum(other_saving - now))
        if gain > best_gain:
            best, best_gain = _CLOSE, gain
        alone = dict(zip(left.tolist(), other_saving.tolist(), strict=True))
        for k in swaps:
            arcs = self.arcs_of(k)
            clients = graph.client[arcs]
            base = self.benefit[clients].copy()
            for place, client in enumerate(clients.tolist()):
                if client in alone:
                    base[place] = alone[client]
            more = np.sort(np.maximum(graph.saving[arcs] - base, 0.0))[::-1][: self.cap]
            # k itself stops being served.
            lost = alone[k] if k in alone else float(self.benefit[k])
            value = gain + float(more.sum()) - lost
            if value > best_gain:
                best, best_gain = k, value
        if best == _KEEP:
            return False
        self.release(left[:-1])
        self.open[j] = False
        self.benefit[j] = 0.0
        for arc in other.tolist():
            facility = int(graph.facility[arc])
            if arc >= 0 and self.load[facility] < self.cap:
                self.take(facility, np.array([arc]))
        if best >= 0:
            _, arcs = self.wins(best)
            self.take(best, arcs)
        return True

    def _elsewhere(self, clients: IntArray, j: int) -> tuple[IntArray, NDArray[np.float64]]:
        """For each client the best arc to an open facility with room other than j (-1: none), and what it saves."""
        graph = self.graph
        arcs = np.full(len(clients), -1, np.int64)
        saving = np.zeros(len(clients))
        for place, client in enumerate(clients.tolist()):
            start, end = graph.start[client], graph.start[client + 1]
            facilities = graph.facility[start:end]
            usable = self.open[facilities] & (self.load[facilities] < self.cap) & (facilities != j)
            worth = np.where(usable, graph.saving[start:end], 0.0)
            if len(worth) and worth.max() > 0.0:
                arcs[place] = start + int(worth.argmax())
                saving[place] = worth.max()
        return arcs, saving
