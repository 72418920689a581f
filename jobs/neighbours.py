"""The look-up: which cached entries of a job's domain are most like its prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, text

from chorus_batch.jobs.claims import Claim
from chorus_batch.jobs.models import Reuse
from chorus_batch.jobs.storage import StoredObject

COUNT_SECONDS = 60.0  # how long a count of a domain's entries is trusted; it only picks the search method


@dataclass(frozen=True)
class Neighbour:
    """An entry and how similar its prompt is (cosine of the embeddings)."""

    entry_id: int
    job_id: int
    similarity: float
    prompt: str  # as its job's row had it
    steps: Sequence[int]
    object: StoredObject


# The uncast column has no vector index: the domain's rows are found by B-tree and compared exactly. The cast one
# matches the approximate index of its space (cache.register_space). The prompt's vector is a scalar sub-query: an index
# orders by the distance to one value, not to the column of a joined table.
_QUERY = """
    SELECT e.id, e.job_id, e.prompt, e.steps, e.object_key, e.sha256, e.size,
        1 - (e.embedding{cast} <=> {vector}{cast}) AS m
    FROM cache_entries e
    WHERE e.domain_id = :domain AND e.space_id = {space} AND e.evicted_at IS NULL{planned}
        AND (:same_prompt OR e.prompt_key <> :prompt_key) AND NOT (e.prompt_key = :prompt_key AND e.seed = :seed)
    ORDER BY e.embedding{cast} <=> {vector}{cast}
    LIMIT :count
"""
_PLANNED = " AND (e.job_id = :planned_job OR e.id = :planned_entry)"
_VECTOR = "(SELECT embedding FROM embeddings WHERE space_id = :space AND prompt_key = :prompt_key)"


@dataclass
class NeighbourSearch:
    """Nearest entries inside a domain: exact up to `exact_rows` entries, through the space's HNSW index above."""

    exact_rows: int
    _counts: dict[int, tuple[float, int]] = field(default_factory=dict)

    def nearest(self, connection: Connection, claim: Claim, min_similarity: float, count: int) -> list[Neighbour]:
        """The `count` most similar live entries with similarity >= `min_similarity`, and the planned one, best first.

        The same prompt with another seed is no neighbour (README, "Method"), unless the row asks for it.
        """
        approximate = self._entries(connection, claim.domain.id) > self.exact_rows
        found = self._found(connection, claim, count, approximate=approximate)
        if (claim.planned_job_id or claim.source_entry_id) and not any(is_planned(claim, each) for each in found):
            found += self._found(connection, claim, 1, planned=True)
        return [each for each in found if each.similarity >= min_similarity]

    def _found(
        self, connection: Connection, claim: Claim, count: int, *, approximate: bool = False, planned: bool = False
    ) -> list[Neighbour]:
        space = claim.domain.space_id
        cast = ""
        if approximate:
            dimension = connection.execute(
                text("SELECT dimension FROM embedding_spaces WHERE id = :space"), {"space": space}
            ).scalar_one()
            cast = f"::vector({int(dimension)})"
            # The domain filter is selective: without iteration a filtered HNSW scan comes back empty.
            connection.execute(text("SET LOCAL hnsw.iterative_scan = strict_order"))
            connection.execute(text("SET LOCAL hnsw.ef_search = 100"))
        # The space is written out: a partial index is only matched by a constant.
        query = _QUERY.format(cast=cast, space=int(space), vector=_VECTOR, planned=_PLANNED if planned else "")
        values = {
            "space": space,
            "domain": claim.domain.id,
            "prompt_key": claim.prompt_key,
            "seed": claim.seed,
            "same_prompt": claim.reuse is Reuse.force,
            "count": count,
            "planned_job": claim.planned_job_id,
            "planned_entry": claim.source_entry_id,
        }
        rows = connection.execute(text(query.replace("::", r"\:\:")), values)
        return [_neighbour(row) for row in rows if row.m is not None]

    def _entries(self, connection: Connection, domain_id: int) -> int:
        counted_at, count = self._counts.get(domain_id, (-COUNT_SECONDS, 0))
        if time.monotonic() - counted_at > COUNT_SECONDS:
            query = "SELECT count(*) FROM cache_entries WHERE domain_id = :domain AND evicted_at IS NULL"
            count = connection.execute(text(query), {"domain": domain_id}).scalar_one()
            self._counts[domain_id] = (time.monotonic(), count)
        return count


def _neighbour(row: Row[Any]) -> Neighbour:
    stored = StoredObject(row.object_key, row.size, row.sha256)
    return Neighbour(row.id, row.job_id, row.m, row.prompt, tuple(row.steps), stored)


def is_planned(claim: Claim, neighbour: Neighbour) -> bool:
    """Whether the plan had the claim start from this one."""
    return neighbour.job_id == claim.planned_job_id or neighbour.entry_id == claim.source_entry_id
