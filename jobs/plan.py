"""Which rows of a batch become sources, which follow them, and in what order they are handed out.

Everything here is a pure function of arrays. The problem is facility location: a row that is generated plainly (a
source) costs 1; a row that starts from a source's latents (a follower, similarity m >= tau) costs c(m) < 1; a source
saves nothing itself but may serve many. Entries of the cache are sources that are already paid for.

This is a first version: exact duplicates are linked; in each domain the graph of pairs with similarity >= tau is
computed exactly, each row keeping its 64 nearest; then lazy add-greedy with a cap on followers per source; up to 5,000
rows also local search. A domain of more than 50,000 rows is cut into blocks of similar rows, each planned by itself,
which loses the pairs that a cut separates (inverted-file tables are to take its place).
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.embed import unit_rows
from chorus_batch.jobs.errors import ChorusBatchError

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]
Role: TypeAlias = Literal["source", "follower", "duplicate"]

AUTO, FORCE, OFF = 0, 1, 2  # Items.reuse
SOURCE, FOLLOWER, DUPLICATE = 0, 1, 2  # Plan.role
ROLES: tuple[Role, ...] = ("source", "follower", "duplicate")

# Dot products of unit vectors in float32 are off by up to about this much: a pair this close below tau counts as tau.
ROUNDING = 1e-6
_NOTHING = 1e-9  # savings up to this are rounding
_STRIP = 16_000_000  # similarities held at once (64 MB)
_ARCS = 8_000_000  # arcs gathered before they are cut down to the nearest of each row


class PlanInputError(ChorusBatchError):
    """What the planner was given doesn't fit together; the message names the argument."""

    code = "plan_input"


@dataclass(frozen=True)
class Curve:
    """c(m): the cost of a follower at similarity m, where a plain generation costs 1.

    `points` (m, cost), m rising, cost not rising, in 0..1. Between two points the cost is interpolated, or, if
    `stepwise`, the lower point's (as the engine's table of boundaries has it). Outside it is the nearest point's.
    """

    points: tuple[tuple[float, float], ...]
    stepwise: bool = False

    def __post_init__(self) -> None:
        m, costs = np.array(self.points, dtype=np.float64).reshape(-1, 2).T
        ordered = np.all(np.diff(m) > 0) and np.all(np.diff(costs) <= 0)
        if not (m.size and np.all(np.isfinite(m)) and ordered and np.all((costs >= 0) & (costs <= 1))):
            raise PlanInputError(f"cost curve {self.points}: similarities must rise, costs fall between 1 and 0")

    @classmethod
    def linear(cls, tau: float, at_tau: float = 0.8, at_one: float = 0.625) -> Curve:
        """Linear from c(tau) to c(1). The defaults are the study's curve for 4 steps; 50 steps: 0.556, 0.286."""
        return cls(((tau, at_tau), (1.0, at_one)) if tau < 1.0 else ((1.0, at_one),))

    @classmethod
    def of_boundaries(cls, rows: Sequence[Sequence[float]], steps: int, region: float = 1.0) -> Curve:
        """From the engine's table: rows (m_from, k1, k2). The first k1 steps are free, up to k2 they cost `region`.

        `region` is a region step's cost, where a full step's is 1; the paper measured 0.67 at half the tokens.
        """
        points = tuple((float(m), 1.0 - (k1 + (1.0 - region) * (k2 - k1)) / steps) for m, k1, k2 in rows)
        return cls(points, stepwise=True)

    def __call__(self, m: NDArray[np.floating]) -> FloatArray:
        """Costs, float32, of the similarities `m`, any shape."""
        at, costs = np.array(self.points, dtype=np.float64).T
        if self.stepwise:
            found = costs[np.maximum(np.searchsorted(at, np.asarray(m) + ROUNDING, side="right") - 1, 0)]
        else:
            found = np.interp(m, at, costs)
        return np.asarray(found, dtype=np.float32)


@dataclass(frozen=True)
class Domain:
    """What reuse means inside one domain: pairs of similarity >= `tau` (0..1), at cost `curve`(m)."""

    tau: float
    curve: Curve

    def __post_init__(self) -> None:
        if not 0.0 <= self.tau <= 1.0:
            raise PlanInputError(f"tau is {self.tau}; it must lie between 0 and 1")


@dataclass(frozen=True)
class Items:
    """The rows to plan, as columns of length n in arrival order. Codes are any integers; equal code, equal thing.

    domain: index into the sequence of domains. request: prompt, seed and domain. prompt: the prompt's identity (rows of
    the same prompt and another seed don't follow each other unless the follower says FORCE). embeddings: float32
    [n, d]. reuse: AUTO, FORCE or OFF (never a follower or a duplicate, but may serve others). priority: higher first.
    """

    domain: IntArray
    request: IntArray
    prompt: IntArray
    embeddings: FloatArray
    reuse: IntArray
    priority: IntArray

    def __len__(self) -> int:
        return len(self.domain)


@dataclass(frozen=True)
class Cached:
    """Entries of the cache that the rows may follow; codes as in Items. `entry`: the entries' ids.

    With `request`, rows that ask for exactly what an entry already is become its duplicates.
    """

    entry: IntArray
    domain: IntArray
    prompt: IntArray
    embeddings: FloatArray
    request: IntArray | None = None

    def __len__(self) -> int:
        return len(self.entry)


@dataclass(frozen=True)
class Limits:
    """How much of the problem is looked at."""

    followers: int = 64  # of one source: one bad source must not spoil a whole batch
    arcs: int = 64  # nearest neighbors kept for each row
    exact: int = 50_000  # rows of a domain up to which every pair is compared
    block: int = 10_000  # rows of a block of a larger domain
    search: int = 5_000  # rows of a block up to which local search is worth its time
    passes: int = 3  # of local search


@dataclass(frozen=True)
class Assignment:
    """What is to happen with row `index`.

    A source is generated plainly. A follower starts from row `source`, or from cache entry `entry`, at `similarity`;
    `fallback` is the row of the second-nearest source, if there is one. A duplicate gets the result of row `source`
    (which may be a source or a follower), or of `entry`. `position`: order of dispatch, 0 first, all different.
    """

    index: int
    role: Role
    source: int | None
    entry: int | None
    similarity: float | None
    fallback: int | None
    position: int


@dataclass(frozen=True)
class Plan(Sequence[Assignment]):
    """One Assignment for each row, in the rows' order, kept as columns: -1 and NaN where an Assignment has None."""

    role: NDArray[np.int8]
    source: IntArray
    entry: IntArray
    similarity: FloatArray
    fallback: IntArray
    position: IntArray

    def __len__(self) -> int:
        return len(self.role)

    def __iter__(self) -> Iterator[Assignment]:
        columns = zip(
            self.role.tolist(),
            self.source.tolist(),
            self.entry.tolist(),
            self.similarity.tolist(),
            self.fallback.tolist(),
            self.position.tolist(),
            strict=True,
        )
        for index, (role, source, entry, similarity, fallback, position) in enumerate(columns):
            yield Assignment(
                index=index,
                role=ROLES[role],
                source=source if source >= 0 else None,
                entry=entry if entry >= 0 else None,
                similarity=None if math.isnan(similarity) else similarity,
                fallback=fallback if fallback >= 0 else None,
                position=position,
            )

    @overload
    def __getitem__(self, index: int) -> Assignment: ...
    @overload
    def __getitem__(self, index: slice) -> list[Assignment]: ...
    def __getitem__(self, index: int | slice) -> Assignment | list[Assignment]:
        if isinstance(index, slice):
            return list(self)[index]
        index = range(len(self))[index]
        part = slice(index, index + 1)
        (one,) = Plan(
            self.role[part],
            self.source[part],
            self.entry[part],
            self.similarity[part],
            self.fallback[part],
            self.position[part],
        )
        return replace(one, index=index)


def number(keys: Iterable[Hashable], known: dict[Hashable, int]) -> IntArray:
    """Codes for keys (hashes, prompts): the same key, the same code, through all calls that share `known`."""
    return np.fromiter((known.setdefault(key, len(known)) for key in keys), dtype=np.int64)


def plan(
    items: Items,
    domains: Sequence[Domain],
    cached: Cached | None = None,
    limits: Limits | None = None,
    *,
    shared: bool = True,
) -> Plan:
    """The plan of a batch. Deterministic.

    Without `shared` rows follow entries of the cache only, not each other. Raises UnusableVector, with the row, for a
    zero or NaN vector, and PlanInputError for arrays that don't fit together. Time: O(n^2 d) for each domain or block;
    memory: 64 MB of similarities at a time, and about 100 arcs a row.
    """
    limits = limits or Limits()
    vectors, entries, entry_vectors = _checked(items, domains, cached)
    n = len(items)
    role = np.zeros(n, np.int8)
    source, entry, fallback = (np.full(n, -1, np.int64) for _ in range(3))
    similarity = np.full(n, np.nan, np.float32)

    duplicate = _link_duplicates(items, entries, source, entry)
    role[duplicate] = DUPLICATE
    similarity[duplicate] = 1.0
    for code, domain in enumerate(domains):
        rows = np.flatnonzero((items.domain == code) & ~duplicate)
        ids = np.flatnonzero(entries.domain == code)
        for block, block_ids in _blocks(vectors, rows, entry_vectors, ids, limits):
            members = _Members(
                vectors[block],
                items.prompt[block],
                items.reuse[block],
                entry_vectors[block_ids],
                entries.prompt[block_ids],
                shared,
            )
            graph = _Graph.build(domain, members, limits.arcs)
            served, second = _located(graph, limits)
            follows = served >= 0
            role[block[follows]] = FOLLOWER
            similarity[block[follows]] = graph.similarity[served[follows]]
            facility = graph.facility[served[follows]]
            row_served = facility < len(block)
            source[block[follows][row_served]] = block[facility[row_served]]
            entry[block[follows][~row_served]] = entries.entry[block_ids[facility[~row_served] - len(block)]]
            fallback[block[second >= 0]] = block[second[second >= 0]]
    position = _positions(role, source, entry, items.priority)
    return Plan(role, source, entry, similarity, fallback, position)


def unshared(request: IntArray, *, link: bool) -> Plan:
    """The plan that reuses no latents: every row is a source, except, with `link`, repetitions of a request."""
    n = len(request)
    index = np.arange(n)
    first, inverse = np.unique(request, return_index=True, return_inverse=True)[1:]
    original = first[inverse]
    duplicate = (original != index) & link
    return Plan(
        role=np.where(duplicate, DUPLICATE, SOURCE).astype(np.int8),
        source=np.where(duplicate, original, -1),
        entry=np.full(n, -1, np.int64),
        similarity=np.where(duplicate, 1.0, np.nan).astype(np.float32),
        fallback=np.full(n, -1, np.int64),
        position=index,
    )


def plan_cost(plan: Plan, items: Items, domains: Sequence[Domain]) -> float:
    """Total cost of a plan, in plain generations: a source 1, a follower c(m), a duplicate nothing."""
    total = float(np.count_nonzero(plan.role == SOURCE))
    for code, domain in enumerate(domains):
        follows = (plan.role == FOLLOWER) & (items.domain == code)
        total += float(domain.curve(plan.similarity[follows]).sum(dtype=np.float64))
    return total


def online_cost(items: Items, domains: Sequence[Domain], cached: Cached | None = None) -> float:
    """Total cost in arrival order under the serving rule: a row follows its nearest earlier source, else becomes one.

    One worker (with several, neighbors run side by side and miss each other, so the rule costs more). Exact; no cap on
    followers. O(n^2 d) time.
    """
    vectors, entries, entry_vectors = _checked(items, domains, cached)
    scratch = np.full(len(items), -1, np.int64)
    duplicate = _link_duplicates(items, entries, scratch, scratch.copy())
    total = 0.0
    for code, domain in enumerate(domains):
        rows = np.flatnonzero((items.domain == code) & ~duplicate)
        ids = np.flatnonzero(entries.domain == code)
        pool = np.concatenate([entry_vectors[ids], vectors[rows]]) if len(ids) else vectors[rows]
        prompts = np.concatenate([entries.prompt[ids], items.prompt[rows]])
        is_source = np.zeros(len(pool), dtype=bool)
        is_source[: len(ids)] = True
        best: list[float] = []
        step = max(1, _STRIP // max(1, len(pool)))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            near = vectors[part] @ pool[: len(ids) + start + len(part)].T
            for offset, row in enumerate(part):
                end = len(ids) + start + offset
                legal = is_source[:end].copy()
                if items.reuse[row] != FORCE:
                    legal &= prompts[:end] != items.prompt[row]
                m = float(np.max(near[offset, :end], initial=-2.0, where=legal))
                if items.reuse[row] == OFF or m < domain.tau - ROUNDING:
                    is_source[end] = True
                    total += 1.0
                else:
                    best.append(m)
        total += float(domain.curve(np.clip(np.array(best), domain.tau, 1.0)).sum(dtype=np.float64))
    return total


def _checked(items: Items, domains: Sequence[Domain], cached: Cached | None) -> tuple[FloatArray, Cached, FloatArray]:
    """The rows' unit vectors, the entries (none: an empty Cached) and their unit vectors."""
    n = len(items)
    if items.embeddings.ndim != 2:
        raise PlanInputError(f"items.embeddings has the shape {items.embeddings.shape}; it must be [n, d]")
    for name in ("request", "prompt", "embeddings", "reuse", "priority"):
        if len(getattr(items, name)) != n:
            raise PlanInputError(f"items.{name} has {len(getattr(items, name))} rows, items.domain {n}")
    if n and not (int(items.domain.min()) >= 0 and int(items.domain.max()) < len(domains)):
        raise PlanInputError(f"items.domain must index into the {len(domains)} domains")
    if not np.isin(items.reuse, (AUTO, FORCE, OFF)).all():
        raise PlanInputError("items.reuse must be AUTO, FORCE or OFF")
    vectors = unit_rows(items.embeddings)
    if cached is None:
        empty = np.zeros(0, np.int64)
        return vectors, Cached(empty, empty, empty, vectors[:0]), vectors[:0]
    for name in ("domain", "prompt", "embeddings"):
        if len(getattr(cached, name)) != len(cached):
            raise PlanInputError(f"cached.{name} has {len(getattr(cached, name))} rows, cached.entry {len(cached)}")
    if len(cached) and cached.embeddings.shape[1:] != items.embeddings.shape[1:]:
        raise PlanInputError("cached.embeddings and items.embeddings differ in dimension: another embedding space")
    return vectors, cached, unit_rows(cached.embeddings) if len(cached) else vectors[:0]


def _link_duplicates(items: Items, entries: Cached, source: IntArray, entry: IntArray) -> NDArray[np.bool_]:
    """Fill `source` or `entry` of rows that repeat an earlier row or an entry; say which rows these are."""
    keys: dict[tuple[int, int], int] = {}
    if entries.request is not None:
        requests = zip(entries.domain.tolist(), entries.request.tolist(), strict=True)
        stored = dict(zip(requests, entries.entry.tolist(), strict=True))
    else:
        stored = {}
    wanted = zip(items.domain.tolist(), items.request.tolist(), (items.reuse == OFF).tolist(), strict=True)
    for index, (domain, request, off) in enumerate(wanted):
        key = (domain, request)
        if not off and key in stored:
            entry[index] = stored[key]
        elif keys.setdefault(key, index) != index and not off:
            source[index] = keys[key]
    return (source >= 0) | (entry >= 0)


def _blocks(
    vectors: FloatArray, rows: IntArray, entry_vectors: FloatArray, ids: IntArray, limits: Limits
) -> Iterator[tuple[IntArray, IntArray]]:
    """The rows and entries of one domain, whole or cut into blocks of similar ones (each entry in one block)."""
    if not len(rows):
        return
    if len(rows) <= limits.exact:
        yield rows, ids
        return
    rng = np.random.default_rng(len(rows))
    centers = vectors[rng.choice(rows, size=256, replace=False)]
    # A chain from center to nearest unvisited center, so that neighbors among the groups mostly share a block.
    near = centers @ centers.T
    chain = [0]
    free = np.ones(len(centers), dtype=bool)
    while len(chain) < len(centers):
        free[chain[-1]] = False
        chain.append(int(np.argmax(np.where(free, near[chain[-1]], -2.0))))
    place = np.empty(len(centers), np.int64)
    place[chain] = np.arange(len(centers))
    groups = place[_nearest(vectors[rows], centers)]
    order = np.argsort(groups, kind="stable")
    entry_groups = place[_nearest(entry_vectors[ids], centers)]
    cuts = np.linspace(0, len(rows), -(-len(rows) // limits.block) + 1).astype(np.int64)
    firsts = np.searchsorted(groups[order][cuts[1:-1]], entry_groups, side="left")
    for block, (start, end) in enumerate(pairwise(cuts)):
        yield np.sort(rows[order[start:end]]), ids[firsts == block]


def _nearest(vectors: FloatArray, centers: FloatArray) -> IntArray:
    step = max(1, _STRIP // len(centers))
    parts = [(vectors[i : i + step] @ centers.T).argmax(axis=1) for i in range(0, len(vectors), step)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Members:
    """The rows of a block, n of them, and the cache's entries beside them."""

    vectors: FloatArray
    prompt: IntArray
    reuse: IntArray
    entry_vectors: FloatArray
    entry_prompt: IntArray
    shared: bool


@dataclass(frozen=True)
class _Graph:
    """Who may follow whom: arcs sorted by client; facilities n.. are entries of the cache.

    `start`: arcs of client i are start[i]:start[i + 1]. `by_facility`, `facility_start`: the arcs of a facility.
    `saving` is 1 - c(similarity), in double so that sums don't depend on their order.
    """

    n: int
    facilities: int
    off: NDArray[np.bool_]
    client: IntArray
    facility: IntArray
    similarity: FloatArray
    saving: NDArray[np.float64]
    start: IntArray
    by_facility: IntArray
    facility_start: IntArray

    @classmethod
    def build(cls, domain: Domain, members: _Members, keep: int) -> _Graph:
        n, facilities = len(members.vectors), len(members.vectors) + len(members.entry_vectors)
        prompts, reuse = np.concatenate([members.prompt, members.entry_prompt]), members.reuse
        clients, others, m = _pairs(domain.tau, members, prompts, keep)
        legal = (reuse[clients] == FORCE) | (prompts[clients] != prompts[others])
        legal &= reuse[clients] != OFF
        clients, others = clients[legal].astype(np.int64), others[legal].astype(np.int64)
        m = np.clip(m[legal], np.float32(domain.tau), np.float32(1.0))
        saving = 1.0 - domain.curve(m).astype(np.float64)
        # Among sources at the same cost (a step of the curve) the nearest is the best: it looks better.
        saving = np.where(saving > _NOTHING, saving + 1e-6 * m, 0.0)
        by_facility = np.argsort(others * n + clients)
        return cls(
            n=n,
            facilities=facilities,
            off=reuse == OFF,
            client=clients,
            facility=others,
            similarity=m,
            saving=saving,
            start=np.searchsorted(clients, np.arange(n + 1)),
            by_facility=by_facility,
            facility_start=np.searchsorted(others[by_facility], np.arange(facilities + 1)),
        )


_Arcs: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32], FloatArray]


def _pairs(tau: float, members: _Members, prompts: IntArray, keep: int) -> _Arcs:
    """Pairs (client, facility, similarity) >= tau: each client's `keep` nearest and their reversals, sorted by client.

    Pairs of one prompt are left out unless one of the two may be forced, so that they don't use up the `keep`.
    """
    vectors = members.vectors
    n = len(vectors)
    everything = np.concatenate([vectors, members.entry_vectors])
    repeated = len(np.unique(prompts)) < len(prompts)
    force = np.zeros(len(everything), dtype=bool)
    force[:n] = members.reuse == FORCE
    gathered: list[_Arcs] = []
    count = 0
    start = 0
    while start < n:
        # Pairs are compared once: the rows of the strip with everything that comes later.
        first = start if members.shared else n
        end = min(n, start + max(64, _STRIP // max(1, len(everything) - first)))
        near = vectors[start:end] @ everything[first:].T
        if members.shared:
            near[:, : end - start][np.tril_indices(end - start)] = -2.0
        if repeated:
            same = prompts[start:end, None] == prompts[None, first:]
            if force.any():
                same &= ~(force[start:end, None] | force[None, first:])
            near[same] = -2.0
        ahead, back = _strip_arcs(near, tau, n - first, keep)
        gathered.append((ahead[0] + np.int32(start), ahead[1] + np.int32(first), ahead[2]))
        gathered.append((back[0] + np.int32(first), back[1] + np.int32(start), back[2]))
        count += len(ahead[2]) + len(back[2])
        if count > _ARCS:
            gathered = [_nearest_arcs(gathered, keep)]
            count = len(gathered[0][2])
        start = end
    clients, facilities, m = _nearest_arcs(gathered, keep)
    # A near row may have no room for this one among its own nearest; it can follow this one all the same.
    rows = facilities < n
    both = (
        np.concatenate([clients, facilities[rows]]),
        np.concatenate([facilities, clients[rows]]),
        np.concatenate([m, m[rows]]),
    )
    key = both[0].astype(np.int64) * len(everything) + both[1]
    _, chosen = np.unique(key, return_index=True)
    return both[0][chosen], both[1][chosen], both[2][chosen]


def _strip_arcs(near: FloatArray, tau: float, rows: int, keep: int) -> tuple[_Arcs, _Arcs]:
    """The arcs of a strip of similarities, rows as clients, then columns as clients (only the first `rows` can be)."""
    found = near >= np.float32(tau - ROUNDING)
    flat = np.flatnonzero(found)
    i, j = np.divmod(flat, near.shape[1])
    m = near.ravel()[flat]
    return (
        _thinned(i, j, m, near, keep),
        _thinned(j[j < rows], i[j < rows], m[j < rows], near.T, keep),
    )


def _thinned(clients: IntArray, facilities: IntArray, m: FloatArray, near: FloatArray, keep: int) -> _Arcs:
    """The arcs, those of dense clients cut down to the nearest: a giant cluster's would not fit into memory."""
    dense = np.bincount(clients, minlength=near.shape[0]) > 4 * keep
    if dense.any():
        which = np.flatnonzero(dense)
        part = np.ascontiguousarray(near[which])
        top = np.argpartition(part, part.shape[1] - keep, axis=1)[:, part.shape[1] - keep :]
        sparse = ~dense[clients]
        clients = np.concatenate([clients[sparse], np.repeat(which, keep)])
        facilities = np.concatenate([facilities[sparse], top.ravel()])
        m = np.concatenate([m[sparse], np.take_along_axis(part, top, axis=1).ravel()])
    return clients.astype(np.int32), facilities.astype(np.int32), m


def _nearest_arcs(gathered: Sequence[_Arcs], keep: int) -> _Arcs:
    """Each client's `keep` nearest arcs (ties: lower facility), sorted by client."""
    if not gathered:
        return np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    clients, facilities, m = (np.concatenate(column) for column in zip(*gathered, strict=True))
    if not len(m) or np.bincount(clients).max() <= keep:
        order = np.argsort(clients, kind="stable")
    else:
        order = np.lexsort((facilities, -m, clients))
        rank = np.arange(len(order)) - np.searchsorted(clients[order], clients[order])
        order = order[rank < keep]
    return clients[order], facilities[order], m[order]


def _located(graph: _Graph, limits: Limits) -> tuple[IntArray, IntArray]:
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

    def __init__(self, graph: _Graph, cap: int) -> None:
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
        better = more > _NOTHING
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
        heap = [(-value, facility) for facility, value in enumerate(bound.tolist()) if value > _NOTHING]
        heapq.heapify(heap)
        while heap:
            _, facility = heap[0]
            value, arcs = self.wins(facility)
            if value <= _NOTHING:
                heapq.heappop(heap)
            elif len(heap) > 1 and value < -min(heap[1:3])[0] - _NOTHING:
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
        best, best_gain = _KEEP, _NOTHING
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
        usable = self.open[graph.facility] & (graph.saving > self.benefit[graph.client] + _NOTHING)
        arcs = np.flatnonzero(usable)
        for arc in arcs[np.argsort(-graph.saving[arcs], kind="stable")].tolist():
            client, facility = int(graph.client[arc]), int(graph.facility[arc])
            if self.load[facility] < self.cap and graph.saving[arc] > self.benefit[client] + _NOTHING:
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


def _positions(role: NDArray[np.int8], source: IntArray, entry: IntArray, priority: IntArray) -> IntArray:
    """The order of dispatch: high priority first, then clusters with many followers, the source before them.

    A source inherits the highest priority of those that wait for it. This is a preference only: what is ready and who
    is free decide at run time.
    """
    n = len(role)
    index = np.arange(n)
    head = np.where(source >= 0, source, index)  # a duplicate's original may itself follow
    head = np.where(source[head] >= 0, source[head], head)
    urgent = priority.copy()
    np.maximum.at(urgent, head, priority)
    direct = source >= 0
    np.maximum.at(urgent, source[direct], priority[direct])
    # Followers of one entry of the cache are a cluster too.
    at_entry = entry[head] >= 0
    cluster = head.copy()
    if at_entry.any():
        _, first, inverse = np.unique(entry[head][at_entry], return_index=True, return_inverse=True)
        cluster[at_entry] = index[at_entry][first][inverse]
    size = np.bincount(cluster[role == FOLLOWER], minlength=n)
    order = np.lexsort((index, role, cluster, -size[cluster], -urgent))
    position = np.empty(n, np.int64)
    position[order] = index
    return position
