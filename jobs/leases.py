"""Leases: who is alive, and what becomes of the jobs of those who aren't.

A worker that stays silent for longer than the lease is declared dead, once and for all: its claims are void, and if it
wakes up again its heartbeat tells it so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, text

from chorus_batch.jobs.models import Outcome
from chorus_batch.jobs.queue import READY_AGAIN, give_up


@dataclass(frozen=True)
class Reaped:
    """What one pass of the reaper did, in jobs."""

    requeued: int
    quarantined: int


def register(connection: Connection, worker_id: str, *, slot: str, host: str, pid: int, device: str) -> None:
    """A worker enters. Whoever was in its slot before is dead: a slot holds one process at a time."""
    connection.execute(
        text("UPDATE workers SET stopped_at = now() WHERE slot = :slot AND stopped_at IS NULL"), {"slot": slot}
    )
    connection.execute(
        text("INSERT INTO workers (id, slot, host, pid, device) VALUES (:id, :slot, :host, :pid, :device)"),
        {"id": worker_id, "slot": slot, "host": host, "pid": pid, "device": device},
    )


def heartbeat(connection: Connection, worker_id: str) -> set[tuple[int, int]] | None:
    """Tell that the worker lives. Returns its claims as (job, attempt), or None if it was declared dead."""
    beat = "UPDATE workers SET heartbeat_at = clock_timestamp() WHERE id = :id AND stopped_at IS NULL"
    if connection.execute(text(beat), {"id": worker_id}).rowcount == 0:
        return None
    claims = "SELECT job_id, attempt FROM queue WHERE state = 'running' AND worker_id = :id"
    return {(row.job_id, row.attempt) for row in connection.execute(text(claims), {"id": worker_id})}


def give_back(connection: Connection, worker_id: str, claims: Iterable[tuple[int, int]]) -> int:
    """Put a living worker's claims, as (job, attempt), back into the queue; costs no tries. Returns how many it had."""
    given = 0
    for job_id, attempt in sorted(claims):
        requeue = (
            f"UPDATE queue SET state = {READY_AGAIN}, worker_id = NULL"
            " WHERE job_id = :job AND attempt = :attempt AND worker_id = :worker"
        )
        fence = {"job": job_id, "attempt": attempt, "worker": worker_id}
        if connection.execute(text(requeue), fence).rowcount == 1:
            _end_attempt(connection, job_id, attempt, "released")
            given += 1
    return given


def leave(connection: Connection, worker_id: str) -> None:
    """A worker goes in good order."""
    connection.execute(
        text("UPDATE workers SET stopped_at = now() WHERE id = :id AND stopped_at IS NULL"), {"id": worker_id}
    )


def reap(connection: Connection, *, lease: float, max_deaths: int) -> Reaped:
    """Take back the jobs of dead workers; a job under which `max_deaths` workers died is quarantined.

    `lease` in seconds. Safe to run from any number of workers at once.
    """
    connection.execute(
        text(
            "UPDATE workers SET stopped_at = now()"
            " WHERE stopped_at IS NULL AND heartbeat_at < now() - make_interval(secs => :lease)"
        ),
        {"lease": lease},
    )
    orphans = connection.execute(
        text(
            """
            SELECT q.job_id, q.attempt, q.deaths FROM queue q JOIN workers w ON w.id = q.worker_id
            WHERE q.state = 'running' AND w.stopped_at IS NOT NULL
            ORDER BY q.job_id FOR UPDATE OF q SKIP LOCKED
            """
        )
    ).all()
    quarantined = 0
    for orphan in orphans:
        _end_attempt(connection, orphan.job_id, orphan.attempt, "lost")
        if orphan.deaths + 1 >= max_deaths:
            message = f"{orphan.deaths + 1} workers died while they ran it"
            give_up(connection, orphan.job_id, Outcome.quarantined, "worker_died", message)
            quarantined += 1
        else:
            requeue = (
                f"UPDATE queue SET state = {READY_AGAIN}, worker_id = NULL, deaths = deaths + 1 WHERE job_id = :job"
            )
            connection.execute(text(requeue), {"job": orphan.job_id})
    return Reaped(requeued=len(orphans) - quarantined, quarantined=quarantined)


def _end_attempt(connection: Connection, job_id: int, attempt: int, result: str) -> None:
    update = (
        "UPDATE attempts SET result = CAST(:result AS attempt_result), ended_at = clock_timestamp()"
        " WHERE job_id = :job AND attempt = :attempt AND result IS NULL"
    )
    connection.execute(text(update), {"result": result, "job": job_id, "attempt": attempt})


def live_workers(connection: Connection, lease: float) -> int:
    """How many workers gave a sign of life within the lease (seconds)."""
    query = (
        "SELECT count(*) FROM workers"
        " WHERE stopped_at IS NULL AND heartbeat_at >= now() - make_interval(secs => :lease)"
    )
    return int(connection.execute(text(query), {"lease": lease}).scalar_one())


def workers(connection: Connection, lease: float) -> list[dict[str, Any]]:
    """The workers that gave a sign of life within the lease (seconds), and what they run and ran."""
    query = """
        SELECT w.id, w.host, w.pid, w.device, w.started_at, w.heartbeat_at,
            (SELECT count(*) FROM queue q WHERE q.worker_id = w.id AND q.state = 'running') AS running,
            (SELECT count(*) FROM attempts a WHERE a.worker_id = w.id AND a.result = 'done') AS finished
        FROM workers w
        WHERE w.stopped_at IS NULL AND w.heartbeat_at >= now() - make_interval(secs => :lease)
        ORDER BY w.started_at
    """
    return [dict(row._mapping) for row in connection.execute(text(query), {"lease": lease})]
