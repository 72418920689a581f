"""Tables and states. Wrong states are made impossible here, by constraints, before any code avoids them.

The wide tables (`jobs`, `attempts`, `generations`) are history: written once, read by people's own SQL. What changes
often lives in two narrow tables, `queue` (one row for every unfinished job) and `workers` (one heartbeat each), so that
dead rows of a busy queue never slow down a claim.
"""

from __future__ import annotations

import enum
from datetime import datetime
from typing import Any

from pgvector.sqlalchemy import Vector
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Double,
    Enum,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class BatchState(enum.Enum):
    """What is wanted of a batch. Written by the command line and by limits.py; progress is counted from its jobs."""

    active = "active"  # its jobs may be claimed
    paused = "paused"  # its ready jobs are parked, by a person or by one of its limits (`stopped`)
    cancelled = "cancelled"  # its unfinished jobs were given up


class Policy(enum.Enum):
    """What of a similar request's latents a request uses: part of its domain. Written at ingest."""

    none = "none"  # nothing: every step is computed in full
    nirvana = "nirvana"  # the first steps, as they are; the rest is computed in full
    chorus = "chorus"  # the first steps, then the regions in which the prompts agree; the rest in full


class Reuse(enum.Enum):
    """What a row allows. Written at ingest."""

    auto = "auto"  # other prompts of its domain
    force = "force"  # the same prompt with another seed, too
    off = "off"  # nothing but its own exact result


class CacheMode(enum.Enum):
    """What a batch may do with the cache. Written at ingest."""

    on = "on"  # exact and semantic hits; misses are added
    exact = "exact"  # exact hits only; misses are added
    readonly = "readonly"  # exact and semantic hits; nothing is added
    off = "off"  # every row is computed in full; nothing is added


class Role(enum.Enum):
    """A job's part in the plan. Written at ingest, never changed: facts of the run stand in `generations`."""

    source = "source"  # computed in full, others may reuse it
    follower = "follower"  # reuses a source of this batch or an entry of the cache
    duplicate = "duplicate"  # the same request as an earlier row: linked, not computed


class QueueState(enum.Enum):
    """Where an unfinished job stands."""

    waiting = "waiting"  # for its source; freed by whoever finishes the source
    ready = "ready"  # may be claimed (from `not_before` on)
    paused = "paused"  # parked by `pause`
    running = "running"  # claimed by `worker_id` under the fencing token `attempt`


class Outcome(enum.Enum):
    """How a job ended; NULL while it has a row in `queue`."""

    done = "done"  # its objects exist and were verified
    failed = "failed"  # a coded error that another try would not mend, or too many tries
    quarantined = "quarantined"  # workers died under it too often
    cancelled = "cancelled"  # a person gave it up


class AttemptResult(enum.Enum):
    """How one claim ended; NULL while it runs."""

    done = "done"
    failed = "failed"  # an error, see `error_code`
    released = "released"  # the worker was told to stop and gave the job back
    lost = "lost"  # the worker died or lost its lease


class CacheResult(enum.Enum):
    """What the cache gave a job."""

    miss = "miss"  # nothing: computed in full
    exact = "exact"  # the same request's finished objects
    semantic = "semantic"  # a similar request's latents: the first steps were skipped


def _enum(kind: type[enum.Enum], name: str) -> Enum:
    return Enum(kind, name=name, values_callable=lambda members: [m.value for m in members])


class Model(DeclarativeBase):
    """Root of all tables; names of constraints follow one convention so that migrations can name them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        datetime: DateTime(timezone=True),
        str: Text,
        float: Double,
        bytes: LargeBinary,
        dict[str, Any]: JSONB,
        list[Any]: JSONB,
        list[int]: ARRAY(Integer),
        BatchState: _enum(BatchState, "batch_state"),
        Policy: _enum(Policy, "policy"),
        Reuse: _enum(Reuse, "reuse"),
        CacheMode: _enum(CacheMode, "cache_mode"),
        Role: _enum(Role, "role"),
        QueueState: _enum(QueueState, "queue_state"),
        Outcome: _enum(Outcome, "outcome"),
        AttemptResult: _enum(AttemptResult, "attempt_result"),
        CacheResult: _enum(CacheResult, "cache_result"),
    }


class EmbeddingSpace(Model):
    """One embedder in one version: similarities across spaces mean nothing."""

    __tablename__ = "embedding_spaces"

    id: Mapped[int] = mapped_column(Integer, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    dimension: Mapped[int]


class Embedding(Model):
    """The vector of one cleaned prompt in one space; a nightly list pays for its new rows only."""

    __tablename__ = "embeddings"

    space_id: Mapped[int] = mapped_column(ForeignKey("embedding_spaces.id"), primary_key=True)
    prompt_key: Mapped[bytes] = mapped_column(primary_key=True)  # sha256 of the cleaned prompt
    embedding: Mapped[Any] = mapped_column(Vector())


class Domain(Model):
    """Everything that must be equal for reuse to be legal (`key` hashes all of it)."""

    __tablename__ = "domains"
    __table_args__ = (
        UniqueConstraint("id", "space_id"),
        CheckConstraint("steps > 0 AND width > 0 AND height > 0 AND frames > 0", name="positive"),
    )

    id: Mapped[int] = mapped_column(Integer, Identity(), primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)
    space_id: Mapped[int] = mapped_column(ForeignKey("embedding_spaces.id"))
    model: Mapped[str]
    fingerprint: Mapped[str]  # sha256 of the weights
    dtype: Mapped[str]
    width: Mapped[int]
    height: Mapped[int]
    frames: Mapped[int]
    steps: Mapped[int]
    guidance_scale: Mapped[float]
    shift: Mapped[float]
    scheduler: Mapped[str]
    negative_prompt: Mapped[str]
    policy: Mapped[Policy] = mapped_column(server_default="chorus")
    step_cache: Mapped[str] = mapped_column(server_default="none")


class Batch(Model):
    """One submit."""

    __tablename__ = "batches"
    __table_args__ = (
        CheckConstraint("max_seconds >= 0", name="budget_not_negative"),
        CheckConstraint(
            "stopped IS NULL OR (stopped IN ('budget', 'deadline') AND state = 'paused')", name="stopped_by_a_limit"
        ),
        Index(
            "ix_batches_limited",
            "id",
            postgresql_where=text("state = 'active' AND (max_seconds IS NOT NULL OR deadline IS NOT NULL)"),
        ),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    # Hash of the files' bytes and the options: the same submit twice is a conflict, not a second batch.
    submission_key: Mapped[str] = mapped_column(unique=True)
    state: Mapped[BatchState] = mapped_column(server_default="active")
    cache: Mapped[CacheMode]
    files: Mapped[list[Any]]  # [{"name", "sha256", "rows"}]
    labels: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    plan: Mapped[dict[str, Any]]  # what the planner expected: sources, followers, duplicates, cost
    total: Mapped[int]
    max_seconds: Mapped[float | None]  # of workers: when its jobs have taken so many, no more are begun
    deadline: Mapped[datetime | None]  # from then on no more are begun
    stopped: Mapped[str | None]  # which limit paused it
    checked_until: Mapped[datetime | None]  # its budget can't be spent before
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Job(Model):
    """One row of a batch: what was asked for, its part in the plan, and how it ended."""

    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("batch_id", "file", "row", "copy"),
        UniqueConstraint("batch_id", "external_id"),
        CheckConstraint("(outcome IS NULL) = (finished_at IS NULL)", name="finished_with_outcome"),
        CheckConstraint(
            "(error_code IS NOT NULL) = (outcome IN ('failed', 'quarantined') IS TRUE)", name="error_coded"
        ),
        CheckConstraint(
            "CASE role WHEN 'source' THEN num_nonnulls(source_job_id, source_entry_id) = 0"
            " WHEN 'follower' THEN num_nonnulls(source_job_id, source_entry_id) = 1 AND similarity IS NOT NULL"
            " ELSE source_job_id IS NOT NULL AND source_entry_id IS NULL END",
            name="role_has_source",
        ),
        CheckConstraint("source_job_id <> id", name="not_own_source"),
        # The same request, finished before: exact hits.
        Index("ix_jobs_request", "domain_id", "prompt_key", "seed", postgresql_where=text("outcome = 'done'")),
        Index("ix_jobs_finished", "finished_at", "id", postgresql_where=text("outcome = 'done'")),
        Index("ix_jobs_source_job_id", "source_job_id", postgresql_where=text("source_job_id IS NOT NULL")),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    batch_id: Mapped[int] = mapped_column(ForeignKey("batches.id", ondelete="CASCADE"))
    file: Mapped[int] = mapped_column(SmallInteger, server_default="0")  # 0-based, in the order of the submit
    row: Mapped[int]  # 1-based data row of the file
    copy: Mapped[int] = mapped_column(SmallInteger, server_default="0")  # of a row that asks for several videos
    line: Mapped[int]  # 1-based physical line on which the row starts
    external_id: Mapped[str]
    prompt: Mapped[str]  # as the person wrote it
    prompt_key: Mapped[bytes]  # sha256 of the cleaned prompt
    domain_id: Mapped[int] = mapped_column(ForeignKey("domains.id"))
    seed: Mapped[int] = mapped_column(BigInteger)
    fps: Mapped[int] = mapped_column(SmallInteger)
    reuse: Mapped[Reuse]
    priority: Mapped[int]
    output_name: Mapped[str | None]
    extra: Mapped[dict[str, Any] | None]  # the columns that the program doesn't know
    role: Mapped[Role]
    source_job_id: Mapped[int | None] = mapped_column(ForeignKey("jobs.id"))
    source_entry_id: Mapped[int | None] = mapped_column(ForeignKey("cache_entries.id"))
    fallback_job_id: Mapped[int | None] = mapped_column(BigInteger)  # the second-best source
    similarity: Mapped[float | None]  # to the planned source
    position: Mapped[int]  # in the plan's order of work
    outcome: Mapped[Outcome | None]
    finished_at: Mapped[datetime | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]


class QueueItem(Model):
    """An unfinished job. The narrow table that claims work on; rows go when the job ends."""

    __tablename__ = "queue"
    __table_args__ = (
        CheckConstraint("(state = 'running') = (worker_id IS NOT NULL)", name="running_has_worker"),
        CheckConstraint("state <> 'waiting' OR source_job_id IS NOT NULL", name="waiting_has_source"),
        Index(
            "ix_queue_ready",
            text("priority DESC"),
            "batch_id",
            "position",
            postgresql_where=text("state = 'ready'"),
        ),
        Index("ix_queue_source", "source_job_id", postgresql_where=text("state IN ('waiting', 'ready')")),
        Index("ix_queue_worker", "worker_id", postgresql_where=text("state = 'running'")),
        Index("ix_queue_batch", "batch_id"),
        {"postgresql_with": {"fillfactor": 70, "autovacuum_vacuum_scale_factor": 0.02}},
    )

    job_id: Mapped[int] = mapped_column(
        ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    batch_id: Mapped[int] = mapped_column(BigInteger)
    source_job_id: Mapped[int | None] = mapped_column(BigInteger)  # for waiting, and for locality once ready
    priority: Mapped[int]
    position: Mapped[int]
    state: Mapped[QueueState]
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"))
    attempt: Mapped[int] = mapped_column(server_default="0")  # the fencing token: counts claims
    failures: Mapped[int] = mapped_column(SmallInteger, server_default="0")  # errors worth another try
    deaths: Mapped[int] = mapped_column(SmallInteger, server_default="0")  # workers lost under it
    not_before: Mapped[datetime | None]  # back-off after an error
    ready_since: Mapped[datetime] = mapped_column(server_default=func.now())  # could be claimed, but for that back-off
    # {"key", "size", "sha256"} of what a stopped worker had computed so far; the next claim goes on from there.
    checkpoint: Mapped[dict[str, Any] | None]


class Worker(Model):
    """One process on one device. A heartbeat touches this row alone."""

    __tablename__ = "workers"
    __table_args__ = ({"postgresql_with": {"fillfactor": 50}},)

    id: Mapped[str] = mapped_column(primary_key=True)
    slot: Mapped[str]  # host, supervisor and device: a successor in the same slot proves this one dead
    host: Mapped[str]
    pid: Mapped[int]
    device: Mapped[str]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())
    stopped_at: Mapped[datetime | None]  # it left, or was declared dead: its claims are void


class Attempt(Model):
    """One claim of one job."""

    __tablename__ = "attempts"
    __table_args__ = (
        CheckConstraint("(result IS NULL) = (ended_at IS NULL)", name="ended_with_result"),
        CheckConstraint("(error_code IS NOT NULL) = (result = 'failed' IS TRUE)", name="error_coded"),
    )

    job_id: Mapped[int] = mapped_column(
        ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )
    attempt: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id"))
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]
    result: Mapped[AttemptResult | None]
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]


class Generation(Model):
    """The trace of a finished job: what was reused, what was computed, what came out. Counted, never estimated."""

    __tablename__ = "generations"
    __table_args__ = (
        ForeignKeyConstraint(["job_id", "attempt"], ["attempts.job_id", "attempts.attempt"], ondelete="CASCADE"),
        CheckConstraint("0 <= k1 AND k1 <= k2 AND k2 <= steps_total", name="boundaries"),
        CheckConstraint("0 <= steps_computed AND steps_computed <= steps_total", name="steps"),
        CheckConstraint(
            "CASE cache_result WHEN 'miss' THEN entry_id IS NULL AND k1 = 0 AND steps_computed = steps_total"
            " WHEN 'semantic' THEN entry_id IS NOT NULL AND similarity IS NOT NULL"
            " ELSE origin_job_id IS NOT NULL AND steps_computed = 0 END",
            name="result_has_origin",
        ),
        Index("ix_generations_entry_id", "entry_id", postgresql_where=text("entry_id IS NOT NULL")),
    )

    job_id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    attempt: Mapped[int]
    cache_result: Mapped[CacheResult]
    entry_id: Mapped[int | None] = mapped_column(ForeignKey("cache_entries.id"))  # whose latents were reused
    origin_job_id: Mapped[int | None] = mapped_column(BigInteger)  # whose objects an exact hit links
    similarity: Mapped[float | None]
    k1: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    k2: Mapped[int] = mapped_column(SmallInteger, server_default="0")
    steps_total: Mapped[int] = mapped_column(SmallInteger)
    steps_computed: Mapped[int] = mapped_column(SmallInteger)
    forward_passes: Mapped[int]
    tokens_computed: Mapped[int] = mapped_column(BigInteger)  # over all forward passes
    tokens_total: Mapped[int] = mapped_column(BigInteger)  # what a plain generation would have computed
    flops: Mapped[float]
    seconds: Mapped[dict[str, Any]]  # by phase
    seconds_total: Mapped[float]  # claim to commit
    peak_memory: Mapped[int] = mapped_column(BigInteger)  # bytes
    backend: Mapped[dict[str, Any]]
    notes: Mapped[list[Any]] = mapped_column(server_default=text("'[]'"))  # fallbacks taken and why
    video_key: Mapped[str]
    video_sha256: Mapped[str]
    video_bytes: Mapped[int] = mapped_column(BigInteger)
    latents_key: Mapped[str]
    latents_sha256: Mapped[str]
    latents_bytes: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str | None]  # of the difference between the two prompts; NULL where none was looked for
    scope: Mapped[str | None]  # where in the picture that difference lies
    details: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))  # see claims.GenerationRecord
    scores: Mapped[dict[str, Any] | None]  # attribute -> whether the video shows it; NULL where nobody can tell


class CacheEntry(Model):
    """What a miss leaves behind: the latents that later requests of its domain may start from."""

    __tablename__ = "cache_entries"
    __table_args__ = (
        ForeignKeyConstraint(["domain_id", "space_id"], ["domains.id", "domains.space_id"]),
        CheckConstraint("(evicted_at IS NULL) = (evicted_reason IS NULL)", name="evicted_with_reason"),
        Index(
            "uq_cache_entries_live",
            "domain_id",
            "prompt_key",
            "seed",
            unique=True,
            postgresql_where=text("evicted_at IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    domain_id: Mapped[int] = mapped_column(Integer)
    space_id: Mapped[int] = mapped_column(Integer)
    job_id: Mapped[int] = mapped_column(BigInteger)  # whose run it is; kept when the job's batch is deleted
    prompt: Mapped[str]
    prompt_key: Mapped[bytes]
    seed: Mapped[int] = mapped_column(BigInteger)
    embedding: Mapped[Any] = mapped_column(Vector())
    steps: Mapped[list[int]]  # the k whose x[k] are stored
    object_key: Mapped[str] = mapped_column(unique=True)
    sha256: Mapped[str]
    size: Mapped[int] = mapped_column(BigInteger)  # bytes
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    evicted_at: Mapped[datetime | None]
    evicted_reason: Mapped[str | None]
