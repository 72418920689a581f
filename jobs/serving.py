"""A solution of facility location: which facilities are open, and over which arc each row is served."""

from __future__ import annotations

from typing import Self

import numpy as np

from chorus_batch.jobs.curve import FloatArray
from chorus_batch.jobs.graph import NOTHING, DoubleArray, Graph
from chorus_batch.jobs.nearest import IdArray, IntArray
from chorus_batch.jobs.processors import taken

_ROUNDS = 30  # of moving rows to nearer sources


class Serving:
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
        """What all rows together save, in plain generations."""
        served = self.served[self.served >= 0]
        return float(self.graph.saving[served].sum())

    def arcs_of(self, facility: int) -> IdArray:
        """The arcs of those that may follow `facility`."""
        graph = self.graph
        return graph.by_facility[graph.facility_start[facility] : graph.facility_start[facility + 1]]

    def wins(self, facility: int) -> tuple[float, IdArray]:
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

    def take(self, facility: int, arcs: IntArray | IdArray) -> None:
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

    def release(self, clients: IntArray | IdArray) -> None:
        """Clients go without a source."""
        served = self.served[clients]
        served = served[served >= 0]
        np.subtract.at(self.load, self.graph.facility[served], 1)
        self.served[clients] = -1
        self.benefit[clients] = 0.0

    def copy(self) -> Self:
        """Another one of the same graph."""
        other = type(self)(self.graph, self.cap)
        other.open, other.served = self.open.copy(), self.served.copy()
        other.benefit, other.load = self.benefit.copy(), self.load.copy()
        return other

    def settle(self) -> None:
        """Followers move to their nearest open facility, as far as there is room; those that save most go first."""
        graph = self.graph
        # An open row's benefit is infinite, so it never follows.
        arcs = np.flatnonzero(taken(self.open, graph.facility))
        for _ in range(_ROUNDS):
            more = taken(graph.saving, arcs) - taken(self.benefit, taken(graph.client, arcs))
            arcs = arcs[more > NOTHING]
            ready = arcs[taken(self.load, taken(graph.facility, arcs)) < self.cap]
            wanted = ready[best_of_each(graph.client[ready], graph.saving[ready])]
            if not len(wanted):
                return
            facility = graph.facility[wanted]
            accepted = wanted[ranks(facility, graph.saving[wanted]) < self.cap - self.load[facility]]
            self.move(accepted)

    def move(self, arcs: IntArray | IdArray) -> None:
        """Let the arcs' clients, all different, be served over them; the facilities must be open and have room."""
        clients = self.graph.client[arcs]
        self.release(clients)
        self.served[clients] = arcs
        self.benefit[clients] = self.graph.saving[arcs]
        np.add.at(self.load, self.graph.facility[arcs], 1)

    def second(self) -> IntArray:
        """For each follower the nearest row, other than its own source, that will be generated; -1: none."""
        graph = self.graph
        found = np.full(graph.n, -1, np.int64)
        arcs = np.flatnonzero((taken(self.served, graph.client) >= 0) & (graph.facility < graph.n))
        facility = graph.facility[arcs]
        arcs = arcs[(self.served[facility] < 0) & (self.served[graph.client[arcs]] != arcs)]
        arcs = arcs[best_of_each(graph.client[arcs], graph.similarity[arcs])]
        found[graph.client[arcs]] = graph.facility[arcs]
        return found


def best_of_each(group: IntArray | IdArray, value: DoubleArray | FloatArray) -> IntArray:
    """The place of the highest value in each group (the first of them); `group` must ascend."""
    if not len(group):
        return np.zeros(0, np.int64)
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    highest = np.repeat(np.maximum.reduceat(value, starts), np.diff(np.append(starts, len(group))))
    places = np.flatnonzero(value == highest)
    return places[np.unique(group[places], return_index=True)[1]]


def ranks(group: IntArray | IdArray, value: DoubleArray | FloatArray) -> IntArray:
    """The rank of each value (from 0 on, as float32) in its group, the highest first."""
    # One key is sorted several times faster than two: the bits of floats from 0 on ascend as they do.
    bits = np.maximum(value, 0.0).astype(np.float32).view(np.int32).astype(np.int64)
    order = np.argsort((group.astype(np.int64) << 32) | (0x7FFFFFFF - bits))
    ordered = group[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(group) else order
    found = np.empty(len(group), np.int64)
    found[order] = np.arange(len(group)) - np.repeat(first, np.diff(np.append(first, len(group))))
    return found
