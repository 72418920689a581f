"""Who may follow whom: the pairs of rows, or of rows and entries of the cache, that are similar enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import ROUNDING, Domain, FloatArray
from chorus_batch.jobs.nearest import Hunt, IdArray, IntArray, Nearest, Places, Points, exact
from chorus_batch.jobs.neighbour_tables import Effort, approximate, recall
from chorus_batch.jobs.templates import Slots

AUTO, FORCE, OFF = 0, 1, 2  # what a row allows

NOTHING = 1e-9  # savings up to this are rounding
DoubleArray: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Limits:
    """How much of the problem is looked at."""

    followers: int = 64  # of one source: one bad source must not spoil a whole batch
    arcs: int = 64  # nearest neighbors kept for each row where every pair is compared
    few_arcs: int = 640_000  # of a short list all are kept, up to about so many
    entry_arcs: int = 16  # nearest entries of the cache kept for each row
    exact: int = 50_000  # rows of a domain up to which every pair is compared
    large_arcs: int = 32  # nearest neighbors kept for each row of a larger domain
    effort: Effort = field(default_factory=Effort)  # for a larger domain
    search: int = 2_500  # rows of a domain up to which local search is worth its time
    passes: int = 20  # of local search
    kicks: int = 12  # times that it is begun again from a disturbed solution
    candidates: int = 48  # rows that a source may be replaced by, in local search


@dataclass(frozen=True)
class Members:
    """The rows of a domain, n of them, and the cache's entries beside them."""

    rows: Points
    reuse: IntArray
    entries: Points
    shared: bool
    slots: Slots | None = None  # of the rows, then of the entries


@dataclass(frozen=True)
class Graph:
    """Who may follow whom: arcs sorted by client; facilities n.. are entries of the cache.

    `start`: arcs of client i are start[i]:start[i + 1]. `by_facility`, `facility_start`: the arcs of a facility.
    `saving` is 1 - c(similarity). `recall`: of the nearest neighbors, the share that was found (1: all pairs were
    compared), None if no sampled row has one.
    """

    n: int
    facilities: int
    off: NDArray[np.bool_]
    client: IdArray
    facility: IdArray
    similarity: FloatArray
    saving: DoubleArray | FloatArray
    start: IntArray
    by_facility: IdArray
    facility_start: IntArray
    recall: float | None

    @classmethod
    def build(cls, domain: Domain, members: Members, limits: Limits) -> Graph:
        """The arcs that are legal in the domain: each row's nearest, their reversals, and hubs."""
        n, facilities = len(members.rows), len(members.rows) + len(members.entries)
        whole = n <= limits.exact
        keep = max(limits.arcs, limits.few_arcs // max(1, n)) if whole else limits.large_arcs
        forced = members.reuse == FORCE
        parts: list[tuple[IdArray, IdArray, FloatArray]] = []
        found: float | None = 1.0
        if members.shared and n > 1:
            repeated = len(np.unique(members.rows.prompt)) < n
            hunt = Hunt(
                members.rows, forced, members.rows, True, domain.lowest - ROUNDING, keep, limits.followers, repeated
            )
            nearest = exact(hunt) if whole else approximate(hunt, limits.effort)
            found = 1.0 if whole else recall(hunt, nearest)
            parts += _both_ways(nearest)
            parts += nearest.hubs
        if len(members.entries):
            hunt = Hunt(
                members.rows,
                forced,
                members.entries,
                False,
                domain.lowest - ROUNDING,
                limits.entry_arcs,
                limits.followers,
                True,
            )
            few = n * len(members.entries) <= limits.exact**2
            nearest = exact(hunt) if few else approximate(hunt, limits.effort)
            client, point, m = _own(nearest)
            parts.append((client, point + np.int32(n), m))
        return cls._of(domain, members, facilities, parts, found)

    @classmethod
    def _of(
        cls,
        domain: Domain,
        members: Members,
        facilities: int,
        parts: list[tuple[IdArray, IdArray, FloatArray]],
        found: float | None,
    ) -> Graph:
        n = len(members.rows)
        client = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0, np.int32)
        facility = np.concatenate([part[1] for part in parts]) if parts else np.zeros(0, np.int32)
        m = np.concatenate([part[2] for part in parts]) if parts else np.zeros(0, np.float32)
        parts.clear()
        legal = _legal(members, client, facility)
        client, facility, m = client[legal], facility[legal], m[legal]
        key = client.astype(np.int64) * facilities + facility
        order = np.argsort(key, kind="stable")
        key = key[order]
        order = order[np.concatenate([[True], key[1:] != key[:-1]])] if len(key) else order
        del key
        client, facility, m = client[order], facility[order], m[order]
        m = np.clip(m, np.float32(domain.lowest), np.float32(1.0))
        saving = saved(domain, members.slots, client, facility, m)
        # Among sources at the same cost (a step of the curve) the nearest is the best: it looks better.
        saving = np.where(saving > NOTHING, saving + np.float32(1e-6) * m, np.float32(0.0))
        if members.slots is not None:
            worth = saving > 0.0
            client, facility, m, saving = client[worth], facility[worth], m[worth], saving[worth]
        by_facility = np.argsort(facility, kind="stable").astype(np.int32)
        return cls(
            n=n,
            facilities=facilities,
            off=members.reuse == OFF,
            client=client,
            facility=facility,
            similarity=m,
            saving=saving,
            start=np.searchsorted(client, np.arange(n + 1, dtype=np.int32)),
            by_facility=by_facility,
            facility_start=np.append(0, np.cumsum(np.bincount(facility, minlength=facilities))),
            recall=found,
        )


def saved(domain: Domain, slots: Slots | None, client: Places, facility: Places, m: FloatArray) -> FloatArray:
    """What each client saves, in plain generations, by following its facility at similarity `m`; 0: no reuse."""
    if slots is None:
        return domain.savings(m, np.zeros(len(m), np.uint16))
    kinds = slots.kinds(client, facility) if domain.kinds else np.zeros(len(m), np.uint16)
    enough = (kinds > 0) | (m >= slots.least(client, facility))
    return np.where(enough, domain.savings(m, kinds), np.float32(0.0)).astype(np.float32)


def _legal(members: Members, client: IdArray, facility: IdArray) -> NDArray[np.bool_]:
    prompts = np.concatenate([members.rows.prompt, members.entries.prompt])
    legal = prompts[client] != prompts[facility]
    legal |= members.reuse[client] == FORCE
    legal &= members.reuse[client] != OFF
    return np.asarray(legal, dtype=np.bool_)


def _own(nearest: Nearest) -> tuple[IdArray, IdArray, FloatArray]:
    row, rank = np.nonzero(nearest.point >= 0)
    return row.astype(np.int32), nearest.point[row, rank], nearest.similarity[row, rank]


def _both_ways(nearest: Nearest) -> list[tuple[IdArray, IdArray, FloatArray]]:
    """A near row may have no room for this one among its own nearest; it can follow this one all the same."""
    client, point, m = _own(nearest)
    alone = np.ones(len(client), dtype=bool)
    step = 1_000_000
    for start in range(0, len(client), step):
        part = slice(start, start + step)
        alone[part] = (nearest.point[point[part]] != client[part][:, None]).all(axis=1)
    return [(client, point, m), (point[alone], client[alone], m[alone])]
