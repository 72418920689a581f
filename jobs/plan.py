"""Which rows of a batch become sources, which follow them, and in what order they are handed out.

Everything here is a pure function of arrays. The problem is facility location: a row that is generated plainly (a
source) costs 1; a row that starts from a source's latents (a follower, similarity m >= tau) costs c(m) < 1; a source
saves nothing itself but may serve many. Entries of the cache are sources that are already paid for.

Exact duplicates are linked; in each domain the graph of pairs with similarity >= tau is computed (graph.py), exactly up
to 50,000 rows, nearly so above; then sources are chosen (facility.py), with a cap on followers per source.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import ROUNDING, Domain, FloatArray, PlanInputError
from chorus_batch.jobs.dispatch_order import positions
from chorus_batch.jobs.embed import UnusableVector, unit_rows
from chorus_batch.jobs.facility import located
from chorus_batch.jobs.graph import AUTO, FORCE, OFF, Graph, Limits, Members, saved
from chorus_batch.jobs.nearest import STRIP, IntArray, Points
from chorus_batch.jobs.templates import Slots

Role: TypeAlias = Literal["source", "follower", "duplicate"]

SOURCE, FOLLOWER, DUPLICATE = 0, 1, 2  # Plan.role
_AT_ONCE = 50_000  # vectors checked at once
ROLES: tuple[Role, ...] = ("source", "follower", "duplicate")


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
    slots: Slots | None = None

    def __len__(self) -> int:
        return len(self.domain)


@dataclass(frozen=True)
class Cached:
    """Entries of the cache that the rows may follow; codes as in Items. `entry`: the entries' ids.

    With `request`, rows that ask for exactly what an entry already is become its duplicates. `slots`: of the templates
    that the rows' slots name.
    """

    entry: IntArray
    domain: IntArray
    prompt: IntArray
    embeddings: FloatArray
    request: IntArray | None = None
    slots: Slots | None = None

    def __len__(self) -> int:
        return len(self.entry)


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
class GraphReport:
    """On what a domain's part of the plan stands: how many pairs were weighed, and how many were overlooked.

    `recall`: share of sampled rows whose nearest neighbor was found, 1 where all pairs were compared; None where no
    sampled row has one.
    """

    domain: int
    rows: int
    entries: int
    arcs: int
    recall: float | None


@dataclass(frozen=True)
class Plan(Sequence[Assignment]):
    """One Assignment for each row, in the rows' order, kept as columns: -1 and NaN where an Assignment has None."""

    role: NDArray[np.int8]
    source: IntArray
    entry: IntArray
    similarity: FloatArray
    fallback: IntArray
    position: IntArray
    graphs: tuple[GraphReport, ...] = ()  # of the domains that have one

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
    zero or NaN vector, and PlanInputError for arrays that don't fit together. Time: O(n^2 d) for each domain up to
    `limits.exact` rows, O(n^1.5 d) above; memory: 64 MB of similarities at a time, and about 100 arcs a row.
    """
    limits = limits or Limits()
    vectors, entries, entry_vectors = _checked(items, domains, cached)
    n = len(items)
    graphs: list[GraphReport] = []
    role = np.zeros(n, np.int8)
    source, entry, fallback = (np.full(n, -1, np.int64) for _ in range(3))
    similarity = np.full(n, np.nan, np.float32)
    cost = np.ones(n, np.float32)

    duplicate = _link_duplicates(items, entries, source, entry)
    role[duplicate] = DUPLICATE
    similarity[duplicate] = 1.0
    cost[duplicate] = 0.0
    for code, domain in enumerate(domains):
        if not domain.semantic:
            continue
        rows = np.flatnonzero((items.domain == code) & ~duplicate)
        ids = np.flatnonzero(entries.domain == code)
        if not len(rows):
            continue
        members = Members(
            Points(_part(vectors, rows), items.prompt[rows]),
            items.reuse[rows],
            Points(_part(entry_vectors, ids), entries.prompt[ids]),
            shared,
            _slots(items, entries, rows, ids),
        )
        graph = Graph.build(domain, members, limits)
        served, second = located(graph, limits)
        graphs.append(GraphReport(code, len(rows), len(ids), len(graph.client), graph.recall))
        follows = served >= 0
        role[rows[follows]] = FOLLOWER
        similarity[rows[follows]] = graph.similarity[served[follows]]
        cost[rows[follows]] = np.maximum(1.0 - graph.saving[served[follows]], 0.0)
        facility = graph.facility[served[follows]]
        row_served = facility < len(rows)
        source[rows[follows][row_served]] = rows[facility[row_served]]
        entry[rows[follows][~row_served]] = entries.entry[ids[facility[~row_served] - len(rows)]]
        fallback[rows[second >= 0]] = rows[second[second >= 0]]
    position = positions(source, entry, cost, items.priority)
    return Plan(role, source, entry, similarity, fallback, position, tuple(graphs))


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


def plan_cost(plan: Plan, items: Items, domains: Sequence[Domain], cached: Cached | None = None) -> float:
    """Total cost of a plan, in plain generations: a source 1, a follower 1 less what it saves, a duplicate nothing."""
    total = float(np.count_nonzero(plan.role == SOURCE))
    facility, slots = plan.source, items.slots
    if cached is not None and len(cached):
        order = np.argsort(cached.entry)
        place = order[np.searchsorted(cached.entry, plan.entry, sorter=order) % len(cached)]
        facility = np.where(plan.entry >= 0, len(items) + place, plan.source)
        slots = _slots(items, cached, np.arange(len(items)), np.arange(len(cached)))
    for code, domain in enumerate(domains):
        client = np.flatnonzero((plan.role == FOLLOWER) & (items.domain == code))
        saving = saved(domain, slots, client, facility[client], plan.similarity[client])
        total += float((1.0 - saving).sum(dtype=np.float64))
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
        if not domain.semantic:
            total += len(rows)
            continue
        ids = np.flatnonzero(entries.domain == code)
        pool = np.concatenate([entry_vectors[ids], vectors[rows]]) if len(ids) else vectors[rows]
        prompts = np.concatenate([entries.prompt[ids], items.prompt[rows]])
        is_source = np.zeros(len(pool), dtype=bool)
        is_source[: len(ids)] = True
        best: list[float] = []
        step = max(1, STRIP // max(1, len(pool)))
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
    vectors = _units(items.embeddings)
    if cached is None:
        empty = np.zeros(0, np.int64)
        return vectors, Cached(empty, empty, empty, vectors[:0]), vectors[:0]
    for name in ("domain", "prompt", "embeddings"):
        if len(getattr(cached, name)) != len(cached):
            raise PlanInputError(f"cached.{name} has {len(getattr(cached, name))} rows, cached.entry {len(cached)}")
    if len(cached) and cached.embeddings.shape[1:] != items.embeddings.shape[1:]:
        raise PlanInputError("cached.embeddings and items.embeddings differ in dimension: another embedding space")
    return vectors, cached, _units(cached.embeddings) if len(cached) else vectors[:0]


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


def _units(vectors: FloatArray) -> FloatArray:
    """The rows as unit vectors; no copy of those that are, since a million of them take 1.5 GB."""
    units = np.asarray(vectors, dtype=np.float32)
    for start in range(0, len(vectors), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        try:
            block = unit_rows(vectors[part])
        except UnusableVector as error:
            raise UnusableVector(start + error.index, str(error).partition(": ")[2]) from error
        if np.abs(block - units[part]).max() > 1e-6:
            if np.shares_memory(units, vectors):
                units = units.copy()
            units[part] = block
    return units


def _slots(items: Items, entries: Cached, rows: IntArray, ids: IntArray) -> Slots | None:
    """Of these rows, then of these entries."""
    if items.slots is None:
        return None
    if entries.slots is not None:
        return items.slots[rows] + entries.slots[ids]
    none = np.full(len(ids), -1, np.int32)
    filling = np.full((len(ids), items.slots.filling.shape[1]), -1, np.int32)
    return items.slots[rows] + replace(items.slots, template=none, filling=filling)


def _part(vectors: FloatArray, rows: IntArray) -> FloatArray:
    """The rows' vectors; no copy if these are all of them."""
    return vectors if len(rows) == len(vectors) else vectors[rows]
