"""Who may follow whom: the pairs of a block's rows (and the cache's entries) that are similar enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from chorus_batch.jobs.curve import ROUNDING, Domain, FloatArray

IntArray: TypeAlias = NDArray[np.int64]

AUTO, FORCE, OFF = 0, 1, 2  # what a row allows

STRIP = 16_000_000  # similarities held at once (64 MB)
NOTHING = 1e-9  # savings up to this are rounding
GATHERED = 8_000_000  # arcs gathered before they are cut down to the nearest of each row


@dataclass(frozen=True)
class Members:
    """The rows of a block, n of them, and the cache's entries beside them."""

    vectors: FloatArray
    prompt: IntArray
    reuse: IntArray
    entry_vectors: FloatArray
    entry_prompt: IntArray
    shared: bool


@dataclass(frozen=True)
class Graph:
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
    def build(cls, domain: Domain, members: Members, keep: int) -> Graph:
        """The arcs that are legal in the domain; each row keeps its `keep` nearest."""
        n, facilities = len(members.vectors), len(members.vectors) + len(members.entry_vectors)
        prompts, reuse = np.concatenate([members.prompt, members.entry_prompt]), members.reuse
        clients, others, m = _pairs(domain.tau, members, prompts, keep)
        legal = (reuse[clients] == FORCE) | (prompts[clients] != prompts[others])
        legal &= reuse[clients] != OFF
        clients, others = clients[legal].astype(np.int64), others[legal].astype(np.int64)
        m = np.clip(m[legal], np.float32(domain.tau), np.float32(1.0))
        saving = 1.0 - domain.curve(m).astype(np.float64)
        # Among sources at the same cost (a step of the curve) the nearest is the best: it looks better.
        saving = np.where(saving > NOTHING, saving + 1e-6 * m, 0.0)
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


Arcs: TypeAlias = tuple[NDArray[np.int32], NDArray[np.int32], FloatArray]


def _pairs(tau: float, members: Members, prompts: IntArray, keep: int) -> Arcs:
    """Pairs (client, facility, similarity) >= tau: each client's `keep` nearest and their reversals, sorted by client.

    Pairs of one prompt are left out unless one of the two may be forced, so that they don't use up the `keep`.
    """
    vectors = members.vectors
    n = len(vectors)
    everything = np.concatenate([vectors, members.entry_vectors])
    repeated = len(np.unique(prompts)) < len(prompts)
    force = np.zeros(len(everything), dtype=bool)
    force[:n] = members.reuse == FORCE
    gathered: list[Arcs] = []
    count = 0
    start = 0
    while start < n:
        # Pairs are compared once: the rows of the strip with everything that comes later.
        first = start if members.shared else n
        end = min(n, start + max(64, STRIP // max(1, len(everything) - first)))
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
        if count > GATHERED:
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


def _strip_arcs(near: FloatArray, tau: float, rows: int, keep: int) -> tuple[Arcs, Arcs]:
    """The arcs of a strip of similarities, rows as clients, then columns as clients (only the first `rows` can be)."""
    found = near >= np.float32(tau - ROUNDING)
    flat = np.flatnonzero(found)
    i, j = np.divmod(flat, near.shape[1])
    m = near.ravel()[flat]
    return (
        _thinned(i, j, m, near, keep),
        _thinned(j[j < rows], i[j < rows], m[j < rows], near.T, keep),
    )


def _thinned(clients: IntArray, facilities: IntArray, m: FloatArray, near: FloatArray, keep: int) -> Arcs:
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


def _nearest_arcs(gathered: Sequence[Arcs], keep: int) -> Arcs:
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
