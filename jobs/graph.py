"""Who may follow whom: the pairs of rows, or of rows and entries of the cache, that are similar enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import ROUNDING, Domain, FloatArray
from chorus_batch.jobs.nearest import Hunt, IdArray, IntArray, Links, Nearest, Places, Points, ascending, exact
from chorus_batch.jobs.neighbour_tables import Effort, approximate, recall
from chorus_batch.jobs.processors import side_by_side, taken
from chorus_batch.jobs.templates import Slots

AUTO, FORCE, OFF = 0, 1, 2  # what a row allows

NOTHING = 1e-9  # savings up to this are rounding
DoubleArray: TypeAlias = NDArray[np.float64]
AnyArray: TypeAlias = NDArray[Any]
_CLIENTS = 20_000  # whose arcs are sorted together


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
        links: list[Links] = []
        found: float | None = 1.0
        if members.shared and n > 1:
            repeated = len(np.unique(members.rows.prompt)) < n
            hunt = Hunt(
                members.rows, forced, members.rows, True, domain.lowest - ROUNDING, keep, limits.followers, repeated
            )
            nearest = exact(hunt) if whole else approximate(hunt, limits.effort)
            found = 1.0 if whole else recall(hunt, nearest)
            client, point, m = _own(nearest)
            # A near row may have no room for this one among its own nearest; it can follow this one all the same.
            links += [(client, point, m), _by_client(point, client, m)]
            if nearest.hubs:
                client, point, m = (np.concatenate(column) for column in zip(*nearest.hubs, strict=True))
                links.append(_by_client(client, point, m))
            del nearest
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
            links.append((client, point + np.int32(n), m))
        return cls._of(domain, members, facilities, links, found)

    @classmethod
    def _of(cls, domain: Domain, members: Members, facilities: int, links: list[Links], found: float | None) -> Graph:
        """From links sorted by client, some of which may stand in several lists."""
        n = len(members.rows)
        starts = range(0, n, _CLIENTS)
        columns: tuple[dict[int, AnyArray], ...] = ({}, {}, {}, {})

        def collect(start: int) -> None:
            found = _arcs(domain, members, facilities, _between(links, start, start + _CLIENTS))
            for column, part in zip(columns, found, strict=True):
                column[start] = part

        side_by_side(collect, starts)
        links.clear()
        client, facility, m, saving = (_joined(column) for column in columns)
        by_facility = ascending(facility).astype(np.int32)
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


def _between(links: list[Links], first: int, last: int) -> Links:
    """Those of clients first..last-1, joined."""
    spans = [slice(*np.searchsorted(link[0], np.array([first, last], np.int32)).tolist()) for link in links]
    none = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
    parts = [none, *(tuple(column[span] for column in link) for link, span in zip(links, spans, strict=True))]
    client, facility, m = (np.concatenate(column) for column in zip(*parts, strict=True))
    return client, facility, m


def _arcs(
    domain: Domain, members: Members, facilities: int, links: Links
) -> tuple[IdArray, IdArray, FloatArray, FloatArray]:
    """The legal ones among the links, each once, sorted by client and facility, with what they save."""
    client, facility, m = links
    legal = _legal(members, client, facility)
    client, facility, m = client[legal], facility[legal], m[legal]
    key = client.astype(np.int64) * facilities + facility
    order = np.argsort(key, kind="stable")
    key = key[order]
    order = order[np.concatenate([[True], key[1:] != key[:-1]])] if len(key) else order
    client, facility, m = client[order], facility[order], m[order]
    m = np.clip(m, np.float32(domain.lowest), np.float32(1.0))
    saving = saved(domain, members.slots, client, facility, m)
    # Among sources at the same cost (a step of the curve) the nearest is the best: it looks better.
    saving = np.where(saving > NOTHING, saving + np.float32(1e-6) * m, np.float32(0.0))
    if members.slots is not None:
        worth = saving > 0.0
        client, facility, m, saving = client[worth], facility[worth], m[worth], saving[worth]
    return client, facility, m, saving


def _joined(parts: dict[int, AnyArray]) -> AnyArray:
    """In the order of their keys. Empties `parts`: the arcs of a million rows needn't be there twice."""
    found = np.concatenate([parts[key] for key in sorted(parts)]) if parts else np.zeros(0, np.int32)
    parts.clear()
    return found


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


def _by_client(client: IdArray, facility: IdArray, m: FloatArray) -> Links:
    order = ascending(client)
    return taken(client, order), taken(facility, order), taken(m, order)
