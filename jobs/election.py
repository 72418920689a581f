"""Add-greedy for many rows at once: an election in rounds.

Every facility that isn't open yet says what opening it would save. Each row votes for the one that says most among
those that would serve it better than now. A facility that holds nearly all of its own gain in votes is opened, together
with all the others that do: their voters differ, so that their gains add up. The next round starts from there. The
facility with the largest gain always wins, so that this ends; in the limit it is add-greedy, in a few dozen passes over
the arcs instead of one step of a heap for each facility.
"""

from __future__ import annotations

import numpy as np

from chorus_batch.jobs.graph import NOTHING
from chorus_batch.jobs.serving import Serving, ranks

_MAJORITY = 0.9  # of a facility's gain; lower: fewer rounds, less like add-greedy


def elect(serving: Serving) -> None:
    """Open facilities until none saves anything."""
    graph, cap = serving.graph, serving.cap
    n, facilities = graph.n, graph.facilities
    arcs = graph.by_facility
    client, facility, saving = graph.client[arcs], graph.facility[arcs], graph.saving[arcs]
    while True:
        more = saving - serving.benefit[client]
        live = more > NOTHING
        live &= serving.load[facility] < cap
        arcs, client, facility = arcs[live], client[live], facility[live]
        saving, more = saving[live], more[live]
        room = cap - serving.load
        crowded = np.bincount(facility, minlength=facilities) > room
        counted = np.arange(len(arcs))
        if crowded.any():
            places = np.flatnonzero(crowded[facility])
            over = ranks(facility[places], more[places]) >= room[facility[places]]
            counted = np.delete(counted, places[over])
        some_client, some_facility, some_more = client[counted], facility[counted], more[counted]
        lost = np.zeros(facilities)
        lost[:n] = np.where(serving.open[:n], 0.0, serving.benefit)
        gain = np.bincount(some_facility, some_more, facilities) - lost
        good = gain > NOTHING
        if not good.any():
            return
        rank = np.full(facilities, facilities, np.int32)
        order = np.argsort(-gain, kind="stable")[: np.count_nonzero(good)]
        rank[order] = np.arange(len(order))
        vote = np.where(serving.open[:n], np.int32(facilities), rank[:n])  # one's own opening counts as well
        np.minimum.at(vote, some_client, rank[some_facility])
        won = vote[some_client] == rank[some_facility]
        won &= good[some_facility]
        votes = np.bincount(some_facility[won], some_more[won], facilities) - lost
        elected = good & (votes >= _MAJORITY * gain)
        elected[:n] &= serving.open[:n] | (vote == rank[:n])
        new = np.flatnonzero(elected[:n] & ~serving.open[:n])
        serving.release(new)
        serving.benefit[new] = np.inf
        serving.open[new] = True
        serving.move(arcs[counted[won & elected[some_facility]]])
