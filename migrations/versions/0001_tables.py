"""The tables: batches, jobs, the queue, workers, attempts, generations, cache entries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from pgvector.sqlalchemy import VECTOR
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("CREATE EXTENSION IF NOT EXISTS vector")
    op.create_table(
        "batches",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("submission_key", sa.Text(), nullable=False),
        sa.Column(
            "state",
            sa.Enum("active", "paused", "cancelled", name="batch_state"),
            server_default="active",
            nullable=False,
        ),
        sa.Column("cache", sa.Enum("on", "exact", "readonly", "off", name="cache_mode"), nullable=False),
        sa.Column("files", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("plan", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_batches")),
        sa.UniqueConstraint("name", name=op.f("uq_batches_name")),
        sa.UniqueConstraint("submission_key", name=op.f("uq_batches_submission_key")),
    )
    op.create_table(
        "embedding_spaces",
        sa.Column("id", sa.Integer(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("dimension", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_embedding_spaces")),
        sa.UniqueConstraint("name", name=op.f("uq_embedding_spaces_name")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("slot", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("stopped_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
        postgresql_with={"fillfactor": 50},
    )
    op.create_table(
        "domains",
        sa.Column("id", sa.Integer(), sa.Identity(always=False), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("space_id", sa.Integer(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("height", sa.Integer(), nullable=False),
        sa.Column("frames", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("guidance_scale", sa.Double(), nullable=False),
        sa.Column("shift", sa.Double(), nullable=False),
        sa.Column("scheduler", sa.Text(), nullable=False),
        sa.Column("negative_prompt", sa.Text(), nullable=False),
        sa.CheckConstraint("steps > 0 AND width > 0 AND height > 0 AND frames > 0", name=op.f("ck_domains_positive")),
        sa.ForeignKeyConstraint(["space_id"], ["embedding_spaces.id"], name=op.f("fk_domains_space_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_domains")),
        sa.UniqueConstraint("id", "space_id", name=op.f("uq_domains_id_space_id")),
        sa.UniqueConstraint("key", name=op.f("uq_domains_key")),
    )
    op.create_table(
        "embeddings",
        sa.Column("space_id", sa.Integer(), nullable=False),
        sa.Column("prompt_key", sa.LargeBinary(), nullable=False),
        sa.Column("embedding", VECTOR(), nullable=False),
        sa.ForeignKeyConstraint(["space_id"], ["embedding_spaces.id"], name=op.f("fk_embeddings_space_id")),
        sa.PrimaryKeyConstraint("space_id", "prompt_key", name=op.f("pk_embeddings")),
    )
    op.create_table(
        "cache_entries",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("domain_id", sa.Integer(), nullable=False),
        sa.Column("space_id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.BigInteger(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("prompt_key", sa.LargeBinary(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("embedding", VECTOR(), nullable=False),
        sa.Column("steps", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("evicted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("evicted_reason", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(evicted_at IS NULL) = (evicted_reason IS NULL)", name=op.f("ck_cache_entries_evicted_with_reason")
        ),
        sa.ForeignKeyConstraint(
            ["domain_id", "space_id"],
            ["domains.id", "domains.space_id"],
            name=op.f("fk_cache_entries_domain_id_space_id"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cache_entries")),
        sa.UniqueConstraint("object_key", name=op.f("uq_cache_entries_object_key")),
    )
    op.create_index(
        "uq_cache_entries_live",
        "cache_entries",
        ["domain_id", "prompt_key", "seed"],
        unique=True,
        postgresql_where=sa.text("evicted_at IS NULL"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("file", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("row", sa.Integer(), nullable=False),
        sa.Column("copy", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("prompt_key", sa.LargeBinary(), nullable=False),
        sa.Column("domain_id", sa.Integer(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("fps", sa.SmallInteger(), nullable=False),
        sa.Column("reuse", sa.Enum("auto", "force", "off", name="reuse"), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("output_name", sa.Text(), nullable=True),
        sa.Column("extra", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("role", sa.Enum("source", "follower", "duplicate", name="role"), nullable=False),
        sa.Column("source_job_id", sa.BigInteger(), nullable=True),
        sa.Column("source_entry_id", sa.BigInteger(), nullable=True),
        sa.Column("fallback_job_id", sa.BigInteger(), nullable=True),
        sa.Column("similarity", sa.Double(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.Enum("done", "failed", "quarantined", "cancelled", name="outcome"), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(error_code IS NOT NULL) = (outcome IN ('failed', 'quarantined') IS TRUE)",
            name=op.f("ck_jobs_error_coded"),
        ),
        sa.CheckConstraint(
            "CASE role WHEN 'source' THEN num_nonnulls(source_job_id, source_entry_id) = 0 WHEN 'follower' THEN num_nonnulls(source_job_id, source_entry_id) = 1 AND similarity IS NOT NULL ELSE source_job_id IS NOT NULL AND source_entry_id IS NULL END",
            name=op.f("ck_jobs_role_has_source"),
        ),
        sa.CheckConstraint("(outcome IS NULL) = (finished_at IS NULL)", name=op.f("ck_jobs_finished_with_outcome")),
        sa.CheckConstraint("source_job_id <> id", name=op.f("ck_jobs_not_own_source")),
        sa.ForeignKeyConstraint(["batch_id"], ["batches.id"], name=op.f("fk_jobs_batch_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["domain_id"], ["domains.id"], name=op.f("fk_jobs_domain_id")),
        sa.ForeignKeyConstraint(["source_entry_id"], ["cache_entries.id"], name=op.f("fk_jobs_source_entry_id")),
        sa.ForeignKeyConstraint(["source_job_id"], ["jobs.id"], name=op.f("fk_jobs_source_job_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("batch_id", "external_id", name=op.f("uq_jobs_batch_id_external_id")),
        sa.UniqueConstraint("batch_id", "file", "row", "copy", name=op.f("uq_jobs_batch_id_file_row_copy")),
    )
    op.create_index(
        "ix_jobs_finished", "jobs", ["finished_at", "id"], unique=False, postgresql_where=sa.text("outcome = 'done'")
    )
    op.create_index(
        "ix_jobs_request",
        "jobs",
        ["domain_id", "prompt_key", "seed"],
        unique=False,
        postgresql_where=sa.text("outcome = 'done'"),
    )
    op.create_index(
        "ix_jobs_source_job_id",
        "jobs",
        ["source_job_id"],
        unique=False,
        postgresql_where=sa.text("source_job_id IS NOT NULL"),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("result", sa.Enum("done", "failed", "released", "lost", name="attempt_result"), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.CheckConstraint(
            "(error_code IS NOT NULL) = (result = 'failed' IS TRUE)", name=op.f("ck_attempts_error_coded")
        ),
        sa.CheckConstraint("(result IS NULL) = (ended_at IS NULL)", name=op.f("ck_attempts_ended_with_result")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_attempts_worker_id")),
        sa.PrimaryKeyConstraint("job_id", "attempt", name=op.f("pk_attempts")),
    )
    op.create_table(
        "queue",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=False),
        sa.Column("source_job_id", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("state", sa.Enum("waiting", "ready", "paused", "running", name="queue_state"), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("failures", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("deaths", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("not_before", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'running') = (worker_id IS NOT NULL)", name=op.f("ck_queue_running_has_worker")),
        sa.CheckConstraint("state <> 'waiting' OR source_job_id IS NOT NULL", name=op.f("ck_queue_waiting_has_source")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_queue_job_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_queue_worker_id")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_queue")),
        postgresql_with={"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.02},
    )
    op.create_index("ix_queue_batch", "queue", ["batch_id"], unique=False)
    op.create_index(
        "ix_queue_ready",
        "queue",
        [sa.literal_column("priority DESC"), "batch_id", "position"],
        unique=False,
        postgresql_where=sa.text("state = 'ready'"),
    )
    op.create_index(
        "ix_queue_source",
        "queue",
        ["source_job_id"],
        unique=False,
        postgresql_where=sa.text("state IN ('waiting', 'ready')"),
    )
    op.create_index(
        "ix_queue_worker", "queue", ["worker_id"], unique=False, postgresql_where=sa.text("state = 'running'")
    )
    op.create_table(
        "generations",
        sa.Column("job_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("cache_result", sa.Enum("miss", "exact", "semantic", name="cache_result"), nullable=False),
        sa.Column("entry_id", sa.BigInteger(), nullable=True),
        sa.Column("origin_job_id", sa.BigInteger(), nullable=True),
        sa.Column("similarity", sa.Double(), nullable=True),
        sa.Column("k1", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("k2", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("steps_total", sa.SmallInteger(), nullable=False),
        sa.Column("steps_computed", sa.SmallInteger(), nullable=False),
        sa.Column("forward_passes", sa.Integer(), nullable=False),
        sa.Column("tokens_computed", sa.BigInteger(), nullable=False),
        sa.Column("tokens_total", sa.BigInteger(), nullable=False),
        sa.Column("flops", sa.Double(), nullable=False),
        sa.Column("seconds", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("seconds_total", sa.Double(), nullable=False),
        sa.Column("peak_memory", sa.BigInteger(), nullable=False),
        sa.Column("backend", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("notes", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'[]'"), nullable=False),
        sa.Column("video_key", sa.Text(), nullable=False),
        sa.Column("video_sha256", sa.Text(), nullable=False),
        sa.Column("video_bytes", sa.BigInteger(), nullable=False),
        sa.Column("latents_key", sa.Text(), nullable=False),
        sa.Column("latents_sha256", sa.Text(), nullable=False),
        sa.Column("latents_bytes", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "CASE cache_result WHEN 'miss' THEN entry_id IS NULL AND k1 = 0 AND steps_computed = steps_total WHEN 'semantic' THEN entry_id IS NOT NULL AND similarity IS NOT NULL ELSE origin_job_id IS NOT NULL AND steps_computed = 0 END",
            name=op.f("ck_generations_result_has_origin"),
        ),
        sa.CheckConstraint("0 <= k1 AND k1 <= k2 AND k2 <= steps_total", name=op.f("ck_generations_boundaries")),
        sa.CheckConstraint("0 <= steps_computed AND steps_computed <= steps_total", name=op.f("ck_generations_steps")),
        sa.ForeignKeyConstraint(["entry_id"], ["cache_entries.id"], name=op.f("fk_generations_entry_id")),
        sa.ForeignKeyConstraint(
            ["job_id", "attempt"],
            ["attempts.job_id", "attempts.attempt"],
            name=op.f("fk_generations_job_id_attempt"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_generations")),
    )
    op.create_index(
        "ix_generations_entry_id",
        "generations",
        ["entry_id"],
        unique=False,
        postgresql_where=sa.text("entry_id IS NOT NULL"),
    )


def downgrade() -> None:
    for table in ("generations", "queue", "attempts", "jobs", "cache_entries", "embeddings", "domains", "workers"):
        op.drop_table(table)
    for table in ("embedding_spaces", "batches"):
        op.drop_table(table)
    for kind in (
        "batch_state",
        "cache_mode",
        "reuse",
        "role",
        "outcome",
        "attempt_result",
        "queue_state",
        "cache_result",
    ):
        op.execute(f"DROP TYPE {kind}")
    # The extension stays: others in this database may use it.
