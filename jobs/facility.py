"""Facility location: which rows of a graph become sources, and whom they serve.

Lazy add-greedy with a cap on followers, then local search; never worse than serving in arrival order would be.
"""

from __future__ import annotations

import copy
import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.graph import NOTHING, Graph, IntArray


@dataclass(frozen=True)
class Limits:
    """How much of the problem is looked at."""

    followers: int = 64  # of one source: one bad source must not spoil a whole batch
    arcs: int = 64  # nearest neighbors kept for each row
    exact: int = 50_000  # rows of a domain up to which every pair is compared
    block: int = 10_000  # rows of a block of a larger domain
    search: int = 5_000  # rows of a block up to which local search is worth its time
    passes: int = 3  # of local search


def located(graph: Graph, limits: Limits) -> tuple[IntArray, IntArray]:
    """For each row the arc over which it is served (-1: a source) and the row of its fallback source (-1: none)."""
    best = _State(graph, limits.followers)
    best.add_greedily()
    if graph.n <= limits.search:
        state = copy.deepcopy(best, {id(graph): graph})
        for _ in range(limits.passes):
            if not state.improve():
                break
            state.add_greedily()
        # Never worse than serving in arrival order (larger lists are a few percent better than that anyway).
        online = _State(graph, limits.followers)
        online.arrive()
        online.add_greedily()
        best = max(best, state, online, key=_State.saved)
    best.settle()
    return best.served, best.second()


_KEEP, _CLOSE = -2, -1  # what to do with a source, besides replacing it by another row


class _State:
    """A solution that is being improved: which facilities are open, and each client's arc.

    A row that is not served is generated anyway, so it counts as open as soon as another one wants to follow it.
    """

    def __init__(self, graph: Graph, cap: int) -> None:
        self.graph = graph
        self.cap = cap
        self.open = np.zeros(graph.facilities, dtype=bool)
        self.open[graph.n :] = True
        self.open[: graph.n] = graph.off
        self.served = np.full(graph.n, -1, np.int64)
        self.benefit = np.zeros(graph.n)  # what each row saves now; infinite for an open one: nobody serves it
        self.benefit[graph.off] = np.inf
        self.load = np.zeros(graph.facilities, np.int64)

    def saved(self) -> float:
        served = self.served[self.served >= 0]
        return float(self.graph.saving[served].sum())

    def arcs_of(self, facility: int) -> IntArray:
        """The arcs of those that may follow `facility`."""
        graph = self.graph
        return graph.by_facility[graph.facility_start[facility] : graph.facility_start[facility + 1]]

    def wins(self, facility: int) -> tuple[float, IntArray]:
        """What opening (or filling up) a facility would save at once, and the arcs it would take over."""
        graph = self.graph
        arcs = self.arcs_of(facility)
        more = graph.saving[arcs] - self.benefit[graph.client[arcs]]
        better = more > NOTHING
        arcs, more = arcs[better], more[better]
        room = self.cap - int(self.load[facility])
        if len(arcs) > room:
            best = np.argsort(-more, kind="stable")[: max(room, 0)]
            arcs, more = arcs[best], more[best]
        lost = 0.0
        if facility < graph.n and not self.open[facility]:
            lost = float(self.benefit[facility])
        return float(more.sum()) - lost, arcs

    def take(self, facility: int, arcs: IntArray) -> None:
        """Open the facility and let it serve the arcs' clients."""
        graph = self.graph
        if facility < graph.n and not self.open[facility]:
            self.release(np.array([facility]))
            self.benefit[facility] = np.inf
        self.open[facility] = True
        clients = graph.client[arcs]
        self.release(clients)
        self.served[clients] = arcs
        self.benefit[clients] = graph.saving[arcs]
        self.load[facility] += len(arcs)

    def release(self, clients: IntArray) -> None:
        """Clients go without a source."""
        served = self.served[clients]
        served = served[served >= 0]
        np.subtract.at(self.load, self.graph.facility[served], 1)
        self.served[clients] = -1
        self.benefit[clients] = 0.0

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

    def improve(self, candidates: int = 16) -> bool:
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

    def settle(self) -> None:
        """Every follower moves to its nearest open facility, as far as there is room; those that save most go first."""
        graph = self.graph
        # An open row's benefit is infinite, so it never follows.
        usable = self.open[graph.facility] & (graph.saving > self.benefit[graph.client] + NOTHING)
        arcs = np.flatnonzero(usable)
        for arc in arcs[np.argsort(-graph.saving[arcs], kind="stable")].tolist():
            client, facility = int(graph.client[arc]), int(graph.facility[arc])
            if self.load[facility] < self.cap and graph.saving[arc] > self.benefit[client] + NOTHING:
                self.take(facility, np.array([arc]))

    def second(self) -> IntArray:
        """For each follower the nearest row, other than its own source, that will be generated; -1: none."""
        graph = self.graph
        found = np.full(graph.n, -1, np.int64)
        arcs = np.flatnonzero(graph.facility < graph.n)
        client, facility = graph.client[arcs], graph.facility[arcs]
        served = self.served[client]
        usable = (served >= 0) & (self.served[facility] < 0) & (served != arcs)
        arcs, client = arcs[usable], client[usable]
        order = np.lexsort((arcs, -graph.similarity[arcs], client))
        first = np.unique(client[order], return_index=True)[1]
        found[client[order][first]] = graph.facility[arcs[order][first]]
        return found
