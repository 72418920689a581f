"""The views that people's own SQL may rely on: names, columns and meaning are a contract (README, "SQL")."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# One row for each finished job, with what the cache gave it: the ground of the four views.
COUNTS = """
    count(*) AS finished,
    count(*) FILTER (WHERE g.cache_result <> 'miss') AS hits,
    count(*) FILTER (WHERE g.cache_result = 'semantic') AS semantic_hits,
    count(*) FILTER (WHERE g.cache_result = 'exact') AS exact_hits,
    count(*) FILTER (WHERE g.cache_result = 'miss') AS misses,
    (count(*) FILTER (WHERE g.cache_result <> 'miss'))::double precision / nullif(count(*), 0) AS hit_rate,
    coalesce(sum(g.steps_total), 0) AS steps_total,
    coalesce(sum(g.steps_total - g.steps_computed), 0) AS steps_skipped,
    coalesce(sum(g.steps_total - g.steps_computed), 0)::double precision / nullif(sum(g.steps_total), 0)
        AS steps_skipped_share,
    coalesce(sum(g.seconds_total), 0) AS seconds
"""

VIEWS = {
    "cache_hits_by_batch": f"""
        SELECT b.id AS batch_id, b.name AS batch, b.total AS jobs, c.*
        FROM batches b
        CROSS JOIN LATERAL (
            SELECT {COUNTS} FROM jobs j JOIN generations g ON g.job_id = j.id WHERE j.batch_id = b.id
        ) c
    """,
    "cache_hits_by_day": f"""
        SELECT (j.finished_at AT TIME ZONE 'UTC')::date AS day, {COUNTS}
        FROM jobs j JOIN generations g ON g.job_id = j.id
        GROUP BY 1
    """,
    # Chorus figure 9: hit rate over every 100 consecutive finished jobs; the last block may hold fewer.
    "hit_rate_per_100": """
        SELECT
            n / 100 AS block,
            min(finished_at) AS first_finished_at,
            max(finished_at) AS last_finished_at,
            count(*) AS jobs,
            count(*) FILTER (WHERE cache_result <> 'miss') AS hits,
            (count(*) FILTER (WHERE cache_result <> 'miss'))::double precision / count(*) AS hit_rate
        FROM (
            SELECT j.finished_at, g.cache_result, row_number() OVER (ORDER BY j.finished_at, j.id) - 1 AS n
            FROM jobs j JOIN generations g ON g.job_id = j.id
        ) numbered
        GROUP BY n / 100
    """,
    "savings_by_entry": """
        SELECT
            e.id AS entry_id, e.prompt, d.model, e.job_id AS source_job_id, e.size AS bytes, e.created_at, e.evicted_at,
            count(g.job_id) AS hits,
            coalesce(sum(g.steps_total - g.steps_computed), 0) AS steps_skipped,
            max(j.finished_at) AS last_hit_at
        FROM cache_entries e
        JOIN domains d ON d.id = e.domain_id
        LEFT JOIN generations g ON g.entry_id = e.id
        LEFT JOIN jobs j ON j.id = g.job_id
        GROUP BY e.id, d.model
    """,
    # Not one of the statistics: what a person means by a job's state.
    "job_states": """
        SELECT j.id AS job_id, j.batch_id, coalesce(j.outcome::text, q.state::text) AS state
        FROM jobs j LEFT JOIN queue q ON q.job_id = j.id
    """,
}


def upgrade() -> None:
    for name, query in VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    for name in VIEWS:
        op.execute(f"DROP VIEW {name}")
