"""What can be read: a batch's progress and jobs, what to compare of it, one job's history, sums over the views."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from sqlalchemy import Connection, text

from chorus_batch.jobs.comparison import Batch, Made
from chorus_batch.jobs.errors import NotFound, UsageError
from chorus_batch.jobs.report import Fact


@dataclass(frozen=True)
class Progress:
    """One batch at one instant. The counts sum to `total`."""

    batch_id: int
    name: str
    state: str  # running, paused, cancelled, finished; "budget reached" or "past deadline": a limit stopped it
    total: int
    queued: int
    running: int
    done: int
    failed: int
    quarantined: int
    cancelled: int
    hits: int
    exact_hits: int
    steps_total: int
    steps_skipped: int
    seconds_compute: float  # of workers, over finished jobs
    elapsed: float  # seconds from submit to the last finish, or to now
    workers: int  # that run its jobs now
    seconds_running: float = 0.0  # of workers, so far, over running jobs
    max_seconds: float | None = None  # of workers: when so many are spent no more jobs are begun
    deadline: datetime | None = None  # from then on no more jobs are begun
    stopped: str | None = None  # budget or deadline: the limit that was reached

    @property
    def finished(self) -> int:
        """Jobs in a terminal state."""
        return self.done + self.failed + self.quarantined + self.cancelled

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, or a limit stopped it and nothing runs any more."""
        return self.finished == self.total or (self.stopped is not None and self.running == 0)


_PROGRESS = """
    SELECT b.id AS batch_id, b.name, b.state::text AS wanted, b.total,
        c.queued, c.running, c.done, c.failed, c.quarantined, c.cancelled,
        g.hits, g.exact_hits, g.steps_total, g.steps_skipped, g.seconds_compute, w.workers, w.seconds_running,
        b.max_seconds, b.deadline, b.stopped,
        extract(epoch FROM coalesce(
            CASE WHEN c.running = 0 AND (c.queued = 0 OR b.stopped IS NOT NULL) THEN c.last END, clock_timestamp()
        ) - b.created_at) AS elapsed
    FROM batches b
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE j.outcome IS NULL AND q.state IS DISTINCT FROM 'running') AS queued,
            count(*) FILTER (WHERE j.outcome IS NULL AND q.state = 'running') AS running,
            count(*) FILTER (WHERE j.outcome = 'done') AS done,
            count(*) FILTER (WHERE j.outcome = 'failed') AS failed,
            count(*) FILTER (WHERE j.outcome = 'quarantined') AS quarantined,
            count(*) FILTER (WHERE j.outcome = 'cancelled') AS cancelled,
            max(j.finished_at) AS last
        FROM jobs j LEFT JOIN queue q ON q.job_id = j.id WHERE j.batch_id = b.id
    ) c
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE g.cache_result <> 'miss') AS hits,
            count(*) FILTER (WHERE g.cache_result = 'exact') AS exact_hits,
            coalesce(sum(g.steps_total), 0) AS steps_total,
            coalesce(sum(g.steps_total - g.steps_computed), 0) AS steps_skipped,
            coalesce(sum(g.seconds_total), 0) AS seconds_compute
        FROM jobs j JOIN generations g ON g.job_id = j.id WHERE j.batch_id = b.id
    ) g
    CROSS JOIN LATERAL (
        SELECT count(DISTINCT q.worker_id) AS workers,
            coalesce(sum(extract(epoch FROM clock_timestamp() - a.started_at)), 0)::float8 AS seconds_running
        FROM queue q LEFT JOIN attempts a ON (a.job_id, a.attempt) = (q.job_id, q.attempt)
        WHERE q.batch_id = b.id AND q.state = 'running'
    ) w
"""


def progress(connection: Connection, batch_id: int) -> Progress:
    """Counts, hits and times of one batch, all of one instant."""
    row = connection.execute(text(_PROGRESS + " WHERE b.id = :id"), {"id": batch_id}).one()
    return _as_progress(row)


def batches(connection: Connection, limit: int = 50) -> list[Progress]:
    """The newest batches first."""
    rows = connection.execute(text(_PROGRESS + " ORDER BY b.id DESC LIMIT :limit"), {"limit": limit})
    return [_as_progress(row) for row in rows]


_STATES = {"active": "running", "paused": "paused", "budget": "budget reached", "deadline": "past deadline"}


def _as_progress(row: Any) -> Progress:
    values = dict(row._mapping)
    wanted = values.pop("wanted")
    over = values["queued"] + values["running"] == 0
    values["state"] = wanted if wanted == "cancelled" else "finished" if over else _STATES[values["stopped"] or wanted]
    values["elapsed"] = float(values["elapsed"])
    for name in ("steps_total", "steps_skipped"):
        values[name] = int(values[name])
    return Progress(**values)


def find_batch(connection: Connection, name: str) -> int:
    """A batch's id from its id or name. Raises NotFound."""
    query = text("SELECT id FROM batches WHERE name = :name OR id = :id ORDER BY (name = :name) DESC LIMIT 1")
    found = connection.execute(query, {"name": name, "id": int(name) if _is_id(name) else -1}).scalar()
    if found is None:
        raise NotFound(f"there is no batch {name!r}", hint="`chorus-batch list` shows the batches")
    return int(found)


def find_job(connection: Connection, name: str) -> int:
    """A job's id from its id, or from BATCH/ROW-ID. Raises NotFound."""
    batch, _, external = name.rpartition("/")
    if batch:
        query = "SELECT id FROM jobs WHERE batch_id = :batch AND external_id = :external"
        values = {"batch": find_batch(connection, batch), "external": external}
        found = connection.execute(text(query), values).scalar()
    else:
        job_id = int(name) if _is_id(name) else -1
        found = connection.execute(text("SELECT id FROM jobs WHERE id = :id"), {"id": job_id}).scalar()
    if found is None:
        raise NotFound(
            f"there is no job {name!r}", hint="use a job's number or BATCH/ID; see `chorus-batch jobs BATCH`"
        )
    return int(found)


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 19


def jobs(
    connection: Connection, batch_id: int, *, state: str | None = None, code: str | None = None
) -> Iterator[dict[str, Any]]:
    """The jobs of a batch in row order, streamed."""
    query = """
        SELECT j.id AS job, j.external_id AS id, j.row, j.line, j.prompt, j.seed, s.state, j.role::text,
            g.cache_result::text, g.similarity, g.entry_id, e.job_id AS source, g.origin_job_id,
            g.steps_total, g.steps_computed, j.error_code, j.error_message, j.extra, j.output_name, j.copy,
            g.video_key, g.video_sha256, g.video_bytes, g.latents_key, g.latents_sha256, g.latents_bytes,
            d.policy::text, d.step_cache, g.k1, g.k2, g.tokens_total, g.tokens_computed,
            g.kind, g.scope, g.details, g.scores
        FROM jobs j JOIN job_states s ON s.job_id = j.id JOIN domains d ON d.id = j.domain_id
            LEFT JOIN generations g ON g.job_id = j.id LEFT JOIN cache_entries e ON e.id = g.entry_id
        WHERE j.batch_id = :batch AND (CAST(:state AS text) IS NULL OR s.state = :state)
            AND (CAST(:code AS text) IS NULL OR j.error_code = :code)
        ORDER BY j.row, j.copy
    """
    rows = connection.execution_options(yield_per=1000).execute(
        text(query), {"batch": batch_id, "state": state, "code": code}
    )
    for row in rows:
        yield dict(row._mapping)


def compared(connection: Connection, batch_id: int) -> Batch:
    """What there is to compare of a batch."""
    name = connection.execute(text("SELECT name FROM batches WHERE id = :id"), {"id": batch_id}).scalar_one()
    query = """
        SELECT j.prompt_key, j.seed, j.fps, d.policy::text, d.step_cache, g.cache_result::text,
            coalesce(g.tokens_computed, 0) AS tokens,
            coalesce((g.seconds->>'denoise')::double precision, 0) AS denoise_seconds, g.scores
        FROM jobs j JOIN domains d ON d.id = j.domain_id LEFT JOIN generations g ON g.job_id = j.id
        WHERE j.batch_id = :batch ORDER BY j.file, j.row, j.copy
    """
    rows = connection.execute(text(query), {"batch": batch_id})
    return Batch(batch_id, name, [Made(**{**row._mapping, "prompt_key": bytes(row.prompt_key)}) for row in rows])


def forecast_and_fact(connection: Connection, batch_id: int) -> tuple[dict[str, Any], Fact]:
    """What was forecast of a batch when it was submitted, as it was stored, and what became of it so far."""
    query = """
        SELECT b.plan, b.id AS batch_id, b.name, b.total, g.*, a.*, coalesce(e.bytes, 0)::bigint AS entry_bytes,
            NOT EXISTS (SELECT FROM queue q WHERE q.batch_id = b.id) AS over
        FROM batches b CROSS JOIN LATERAL (
            SELECT count(*) AS done, count(*) FILTER (WHERE g.cache_result <> 'miss') AS hits,
                coalesce(sum(g.steps_total - g.steps_computed), 0)::bigint AS steps_skipped,
                coalesce(sum(g.tokens_total), 0)::bigint AS tokens_total,
                coalesce(sum(g.tokens_computed), 0)::bigint AS tokens_computed,
                coalesce(sum(g.seconds_total), 0) / 3600 AS gpu_hours,
                coalesce(sum(g.video_bytes) FILTER (WHERE g.cache_result <> 'exact'), 0)::bigint AS video_bytes,
                coalesce(sum(g.latents_bytes) FILTER (WHERE g.cache_result <> 'exact'), 0)::bigint AS latents_bytes
            FROM jobs j JOIN generations g ON g.job_id = j.id WHERE j.batch_id = b.id
        ) g CROSS JOIN LATERAL (
            SELECT count(DISTINCT a.worker_id) AS workers,
                extract(epoch FROM max(a.ended_at) - min(a.started_at))::float8 AS wall_seconds
            FROM jobs j JOIN attempts a ON a.job_id = j.id WHERE j.batch_id = b.id
        ) a CROSS JOIN LATERAL (
            SELECT sum(c.size) AS bytes FROM jobs j JOIN cache_entries c ON c.job_id = j.id WHERE j.batch_id = b.id
        ) e
        WHERE b.id = :batch
    """
    values = dict(connection.execute(text(query), {"batch": batch_id}).one()._mapping)
    return values.pop("plan"), Fact(**values)


def job(connection: Connection, job_id: int) -> dict[str, Any]:
    """One job whole: what was asked, the plan's part, attempts, trace, and where its latents came from."""
    query = """
        SELECT j.*, b.name AS batch, s.state, to_jsonb(d) - 'id' - 'space_id' AS domain, to_jsonb(g) AS generation,
            to_jsonb(e) - 'embedding' - 'prompt_key' AS entry
        FROM jobs j JOIN batches b ON b.id = j.batch_id JOIN domains d ON d.id = j.domain_id
            JOIN job_states s ON s.job_id = j.id
            LEFT JOIN generations g ON g.job_id = j.id LEFT JOIN cache_entries e ON e.id = g.entry_id
        WHERE j.id = :id
    """
    row = dict(connection.execute(text(query), {"id": job_id}).one()._mapping)
    row["prompt_key"] = bytes(row["prompt_key"]).hex()
    attempts = "SELECT *, attempt FROM attempts WHERE job_id = :id ORDER BY attempt"
    row["attempts"] = [dict(a._mapping) for a in connection.execute(text(attempts), {"id": job_id})]
    return row


def totals(connection: Connection, batch_id: int | None = None) -> dict[str, Any]:
    """Sums over the view `cache_hits_by_batch`: of one batch, or of all."""
    query = """
        SELECT count(*) AS batches,
            coalesce(sum(jobs), 0)::bigint AS jobs, coalesce(sum(finished), 0)::bigint AS finished,
            coalesce(sum(hits), 0)::bigint AS hits, coalesce(sum(semantic_hits), 0)::bigint AS semantic_hits,
            coalesce(sum(exact_hits), 0)::bigint AS exact_hits, coalesce(sum(misses), 0)::bigint AS misses,
            sum(hits)::double precision / nullif(sum(finished), 0) AS hit_rate,
            coalesce(sum(steps_total), 0)::bigint AS steps_total,
            coalesce(sum(steps_skipped), 0)::bigint AS steps_skipped,
            sum(steps_skipped)::double precision / nullif(sum(steps_total), 0) AS steps_skipped_share,
            coalesce(sum(seconds), 0) AS seconds,
            coalesce(sum(tokens_total), 0)::bigint AS tokens_total,
            coalesce(sum(tokens_computed), 0)::bigint AS tokens_computed,
            sum(tokens_total - tokens_computed)::double precision / nullif(sum(tokens_total), 0) AS tokens_skipped_share
        FROM cache_hits_by_batch WHERE CAST(:batch AS bigint) IS NULL OR batch_id = :batch
    """
    return dict(connection.execute(text(query), {"batch": batch_id}).one()._mapping)


def seconds_by_phase(connection: Connection, batch_id: int | None = None) -> dict[str, float]:
    """Seconds that workers spent in each phase, over finished jobs."""
    query = """
        SELECT phase, sum(spent::double precision) AS spent
        FROM generations g JOIN jobs j ON j.id = g.job_id, jsonb_each_text(g.seconds) AS phases(phase, spent)
        WHERE CAST(:batch AS bigint) IS NULL OR j.batch_id = :batch
        GROUP BY phase ORDER BY spent DESC
    """
    return {row.phase: row.spent for row in connection.execute(text(query), {"batch": batch_id})}


def cache_totals(connection: Connection) -> dict[str, Any]:
    """Size and use of the cache."""
    query = """
        SELECT count(*) FILTER (WHERE evicted_at IS NULL) AS entries,
            count(*) FILTER (WHERE evicted_at IS NOT NULL) AS evicted,
            coalesce(sum(bytes) FILTER (WHERE evicted_at IS NULL), 0)::bigint AS bytes,
            coalesce(sum(hits), 0)::bigint AS hits, coalesce(sum(steps_skipped), 0)::bigint AS steps_skipped,
            coalesce(sum(tokens_skipped), 0)::bigint AS tokens_skipped,
            count(*) FILTER (WHERE hits = 0 AND evicted_at IS NULL) AS never_used
        FROM savings_by_entry
    """
    return dict(connection.execute(text(query)).one()._mapping)


def entries(connection: Connection, limit: int = 50) -> list[dict[str, Any]]:
    """The live entries that saved most."""
    query = "SELECT * FROM savings_by_entry WHERE evicted_at IS NULL ORDER BY steps_skipped DESC, entry_id LIMIT :limit"
    return [dict(row._mapping) for row in connection.execute(text(query), {"limit": limit})]


# A function of the reader's own, gone with the transaction. Inside one that runs with its owner's rights Postgres lets
# no statement change the role, not even from within a query (`SELECT set_config('role', ..)`).
_RUN_AS_READER = """
    CREATE OR REPLACE FUNCTION pg_temp.chorus_read(query text) RETURNS SETOF record LANGUAGE plpgsql SECURITY DEFINER
    AS $$ BEGIN RETURN QUERY EXECUTE query; END $$
"""


def read_only_query(
    connection: Connection, query: str, timeout: float = 60.0
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run a person's own SQL with the rights of `chorus_reader`, in a read-only transaction: (columns, rows).

    `connection` is for this query alone: its transaction can't write any more. `timeout` in seconds.
    Raises UsageError with Postgres' message (and its position) for a query that fails or writes.
    """
    driver = connection.connection.driver_connection
    assert driver is not None
    is_member = "SELECT FROM pg_roles WHERE rolname = 'chorus_reader' AND pg_has_role(oid, 'MEMBER')"
    has_reader = driver.execute(is_member).fetchone() is not None
    if has_reader:
        driver.execute("SET LOCAL ROLE chorus_reader")
        driver.execute(_RUN_AS_READER)
    driver.execute("SET TRANSACTION READ ONLY")
    driver.execute(f"SET LOCAL statement_timeout = {int(timeout * 1000)}")
    try:
        names, types = _described(driver, query)
        if has_reader:
            columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(types))
            cursor = driver.execute(f"SELECT * FROM pg_temp.chorus_read(%s) AS result({columns})", (query,))
        else:
            cursor = driver.execute(query, prepare=True)
        return names, cursor.fetchall()
    except psycopg.Error as error:
        if driver.closed:
            raise
        position = error.diag.statement_position
        where = f" (at character {position})" if position else ""
        message = error.diag.message_primary or str(error)
        raise UsageError(f"{message}{where}", code="sql", hint=error.diag.message_hint or "") from error


def _described(driver: psycopg.Connection[Any], query: str) -> tuple[list[str], list[str]]:
    """Names and types of a query's columns, without running it. A second statement behind it is a syntax error."""
    try:
        statement = query.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the query isn't text: {error.reason}", code="sql") from error
    prepared = driver.pgconn.prepare(b"", statement)
    if prepared.status == psycopg.pq.ExecStatus.COMMAND_OK:
        prepared = driver.pgconn.describe_prepared(b"")
    if prepared.status != psycopg.pq.ExecStatus.COMMAND_OK:
        raise psycopg.errors.error_from_result(prepared, encoding="utf-8")
    if not prepared.nfields:
        raise UsageError("the statement returns no rows", code="sql", hint="only queries can be run here")
    names = [(prepared.fname(n) or b"").decode() for n in range(prepared.nfields)]
    kinds = [(prepared.ftype(n), prepared.fmod(n)) for n in range(prepared.nfields)]
    types = [driver.execute("SELECT format_type(%s, %s)", kind).fetchone() for kind in kinds]
    return names, [row[0] for row in types if row]
