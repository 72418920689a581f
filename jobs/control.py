"""What a person does to a batch after submitting it: cancel, pause, resume, retry."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Engine, text

from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import Conflict
from chorus_batch.jobs.limits import refuse_reached

_CHUNK = 5000


def cancel(engine: Engine, batch_id: int) -> int:
    """Give up a batch's unfinished jobs; running ones stop at their next step. Returns how many.

    A batch that is over stays what it is.
    """
    if not _set_state(engine, batch_id, "cancelled"):
        return 0
    cancelled = 0
    while True:
        with transaction(engine) as connection:
            # Rows that a worker is finishing right now are locked: they're skipped, and looked at again.
            jobs = (
                connection.execute(
                    text(
                        "DELETE FROM queue WHERE job_id IN (SELECT job_id FROM queue WHERE batch_id = :batch"
                        " LIMIT :chunk FOR UPDATE SKIP LOCKED) RETURNING job_id"
                    ),
                    {"batch": batch_id, "chunk": _CHUNK},
                )
                .scalars()
                .all()
            )
            connection.execute(
                text("UPDATE jobs SET outcome = 'cancelled', finished_at = now() WHERE id = ANY(:jobs)"),
                {"jobs": list(jobs)},
            )
            connection.execute(
                text(
                    "UPDATE attempts SET result = 'released', ended_at = now()"
                    " WHERE job_id = ANY(:jobs) AND result IS NULL"
                ),
                {"jobs": list(jobs)},
            )
            left = connection.execute(
                text("SELECT EXISTS (SELECT FROM queue WHERE batch_id = :batch)"), {"batch": batch_id}
            ).scalar()
        cancelled += len(jobs)
        if not left:
            return cancelled
        if not jobs:
            time.sleep(0.01)


def pause(engine: Engine, batch_id: int) -> int:
    """Park a batch's ready jobs; running ones finish. Returns how many were parked."""
    _set_state(engine, batch_id, "paused")
    return _move(engine, batch_id, "ready", "paused")


def resume(engine: Engine, batch_id: int, limits: Mapping[str, Any] | None = None) -> int:
    """Make a paused batch's parked jobs ready again. Returns how many.

    `limits` sets new ones: `max_seconds` (of workers, what was spent included) and `deadline`, None for none. Raises
    LimitReached, and changes nothing, if the batch is at one of its limits.
    """
    update = "UPDATE batches SET {} = :value, checked_until = NULL WHERE id = :batch"
    with transaction(engine) as connection:
        _refuse_cancelled(connection, batch_id)
        for name, value in (limits or {}).items():
            if name not in ("max_seconds", "deadline"):
                raise ValueError(f"{name} is no limit")
            connection.execute(text(update.format(name)), {"value": value, "batch": batch_id})
        refuse_reached(connection, batch_id)
        activate = "UPDATE batches SET state = 'active', stopped = NULL WHERE id = :batch"
        connection.execute(text(activate), {"batch": batch_id})
    return _move(engine, batch_id, "paused", "ready")


def retry(engine: Engine, batch_id: int, code: str | None = None) -> int:
    """Put a batch's failed and quarantined jobs (those with error `code`, if given) back. Returns how many."""
    with transaction(engine) as connection:
        _refuse_cancelled(connection, batch_id)
        restored = connection.execute(
            text(
                """
                WITH failed AS (
                    UPDATE jobs SET outcome = NULL, finished_at = NULL, error_code = NULL, error_message = NULL
                    WHERE batch_id = :batch AND outcome IN ('failed', 'quarantined')
                        AND (CAST(:code AS text) IS NULL OR error_code = :code)
                    RETURNING id, batch_id, source_job_id, priority, position
                )
                INSERT INTO queue (job_id, batch_id, source_job_id, priority, position, state, attempt)
                SELECT id, batch_id, source_job_id, priority, position,
                    (SELECT CASE state WHEN 'paused' THEN 'paused' ELSE 'ready' END FROM batches WHERE id = :batch)
                        ::queue_state,
                    (SELECT max(attempt) FROM attempts a WHERE a.job_id = failed.id)
                FROM failed
                """
            ),
            {"batch": batch_id, "code": code},
        )
        return restored.rowcount


def _set_state(engine: Engine, batch_id: int, state: str) -> bool:
    """Say what is wanted of a batch; False if it is over and there is nothing to cancel."""
    update = """
        UPDATE batches SET state = CAST(:state AS batch_state),
            stopped = CASE WHEN :state = 'paused' THEN stopped END
        WHERE id = :batch AND (:state <> 'cancelled' OR EXISTS (SELECT FROM queue WHERE batch_id = :batch))
    """
    with transaction(engine) as connection:
        _refuse_cancelled(connection, batch_id)
        return connection.execute(text(update), {"state": state, "batch": batch_id}).rowcount == 1


def _refuse_cancelled(connection: Connection, batch_id: int) -> None:
    query = text("SELECT state::text FROM batches WHERE id = :batch FOR UPDATE")
    if connection.execute(query, {"batch": batch_id}).scalar_one() == "cancelled":
        raise Conflict(f"batch {batch_id} was cancelled", hint="submit it again with --new")


def _move(engine: Engine, batch_id: int, before: str, after: str) -> int:
    with transaction(engine) as connection:
        return connection.execute(
            text(
                # Parked jobs were nobody's to claim: they begin to wait anew.
                "UPDATE queue SET state = CAST(:after AS queue_state), ready_since = now() WHERE job_id IN"
                " (SELECT job_id FROM queue WHERE batch_id = :batch AND state = CAST(:before AS queue_state)"
                " ORDER BY job_id FOR UPDATE)"
            ),
            {"batch": batch_id, "before": before, "after": after},
        ).rowcount
