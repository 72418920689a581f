"""Three stages: the policy is part of the domain, traces say what was reused where, stopped jobs leave a checkpoint."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

JSONB = postgresql.JSONB(astext_type=sa.Text())
POLICY = postgresql.ENUM("none", "nirvana", "chorus", name="policy", create_type=False)

# As in 0002.
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
# A step that is computed in a region only is no skipped step: what it saves shows in tokens.
TOKENS = """
    coalesce(sum(g.tokens_total), 0)::bigint AS tokens_total,
    coalesce(sum(g.tokens_computed), 0)::bigint AS tokens_computed,
    sum(g.tokens_total - g.tokens_computed)::double precision / nullif(sum(g.tokens_total), 0) AS tokens_skipped_share
"""
TOKENS_SKIPPED = "coalesce(sum(g.tokens_total - g.tokens_computed), 0)::bigint AS tokens_skipped"


def views(counts: str, saved: str) -> dict[str, str]:
    """The views that count, by name."""
    return {
        "cache_hits_by_batch": f"""
            SELECT b.id AS batch_id, b.name AS batch, b.total AS jobs, c.*
            FROM batches b
            CROSS JOIN LATERAL (
                SELECT {counts} FROM jobs j JOIN generations g ON g.job_id = j.id WHERE j.batch_id = b.id
            ) c
        """,
        "cache_hits_by_day": f"""
            SELECT (j.finished_at AT TIME ZONE 'UTC')::date AS day, {counts}
            FROM jobs j JOIN generations g ON g.job_id = j.id
            GROUP BY 1
        """,
        "savings_by_entry": f"""
            SELECT
                e.id AS entry_id, e.prompt, d.model, e.job_id AS source_job_id, e.size AS bytes, e.created_at,
                e.evicted_at, count(g.job_id) AS hits,
                coalesce(sum(g.steps_total - g.steps_computed), 0) AS steps_skipped,
                max(j.finished_at) AS last_hit_at{saved}
            FROM cache_entries e
            JOIN domains d ON d.id = e.domain_id
            LEFT JOIN generations g ON g.entry_id = e.id
            LEFT JOIN jobs j ON j.id = g.job_id
            GROUP BY e.id, d.model
        """,
    }


def upgrade() -> None:
    op.execute("CREATE TYPE policy AS ENUM ('none', 'nirvana', 'chorus')")
    # What is there was made by an engine that knew the first stage only.
    op.add_column("domains", sa.Column("policy", POLICY, server_default="nirvana", nullable=False))
    op.alter_column("domains", "policy", server_default="chorus")
    op.add_column("domains", sa.Column("step_cache", sa.Text(), server_default="none", nullable=False))
    op.add_column("generations", sa.Column("kind", sa.Text(), nullable=True))
    op.add_column("generations", sa.Column("scope", sa.Text(), nullable=True))
    op.add_column("generations", sa.Column("details", JSONB, server_default=sa.text("'{}'"), nullable=False))
    op.add_column("generations", sa.Column("scores", JSONB, nullable=True))
    op.add_column("queue", sa.Column("checkpoint", JSONB, nullable=True))
    for name, query in views(f"{COUNTS}, {TOKENS}", f", {TOKENS_SKIPPED}").items():
        op.execute(f"CREATE OR REPLACE VIEW {name} AS {query}")


def downgrade() -> None:
    for name, query in views(COUNTS, "").items():
        # A view can be given columns, but not lose any. Rights to read come with the defaults that 0003 set.
        op.execute(f"DROP VIEW {name}")
        op.execute(f"CREATE VIEW {name} AS {query}")
    op.drop_column("queue", "checkpoint")
    for column in ("kind", "scope", "details", "scores"):
        op.drop_column("generations", column)
    for column in ("policy", "step_cache"):
        op.drop_column("domains", column)
    op.execute("DROP TYPE policy")
