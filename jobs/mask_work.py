"""Which regions will be asked for: followers that may be claimed, and the entries that the plan has them start from."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

from chorus_batch.jobs.claims import DomainRecord

# A source that was linked to the same request of an earlier batch has that one's entry: so it is found by the request,
# for which there is an index.
_FOLLOWERS = """
    SELECT j.id AS job_id, j.prompt, j.similarity, j.fps, j.domain_id, q.priority, q.batch_id, q.position,
        e.job_id AS source_job_id, e.prompt AS source_prompt, e.sha256 AS entry
    FROM queue q JOIN jobs j ON j.id = q.job_id JOIN batches b ON b.id = q.batch_id
        JOIN domains d ON d.id = j.domain_id
        CROSS JOIN LATERAL (
            SELECT c.* FROM cache_entries c WHERE c.id = j.source_entry_id AND c.evicted_at IS NULL
            UNION ALL
            SELECT c.* FROM jobs s JOIN cache_entries c
                ON c.domain_id = s.domain_id AND c.prompt_key = s.prompt_key AND c.seed = s.seed
                    AND c.evicted_at IS NULL
            WHERE s.id = j.source_job_id
        ) e
    WHERE q.state = 'ready' AND j.role = 'follower' AND j.reuse <> 'off' AND d.policy = 'chorus'
        AND b.cache IN ('on', 'readonly')
"""


@dataclass(frozen=True)
class Asking:
    """A follower that may be claimed, and the entry that it will most likely start from."""

    job_id: int
    prompt: str
    similarity: float
    fps: int
    domain: DomainRecord
    source_job_id: int
    source_prompt: str
    entry: str  # sha256 (hex) of its object


def upcoming(connection: Connection, limit: int) -> list[Asking]:
    """The next followers, in the order in which they will be claimed."""
    query = f"""
        SELECT f.*, to_jsonb(d) AS domain FROM (
            {_FOLLOWERS} ORDER BY q.priority DESC, q.batch_id, q.position LIMIT :limit
        ) f JOIN domains d ON d.id = f.domain_id
        ORDER BY f.priority DESC, f.batch_id, f.position
    """
    return [
        Asking(
            row.job_id,
            row.prompt,
            row.similarity,
            row.fps,
            DomainRecord(**row.domain),
            row.source_job_id,
            row.source_prompt,
            row.entry,
        )
        for row in connection.execute(text(query), {"limit": limit})
    ]


def any_upcoming(connection: Connection) -> bool:
    """Whether there is any."""
    return bool(connection.execute(text(f"SELECT EXISTS ({_FOLLOWERS})")).scalar())
