"""A batch's limits: so many hours of workers, until such a time. At one of them no more jobs are begun; work is kept.

A limit stops a batch as a person's `pause` does: its ready jobs are parked, what runs is finished, and what becomes
ready later is parked too (queue.READY_AGAIN). So a claim needn't know of limits. `enforce` is called by whoever
finished a job, by every worker's reconciler, and by whoever waits for the batch.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from datetime import time as clock
from typing import Literal

from sqlalchemy import Connection, text

from chorus_batch.jobs.errors import ChorusBatchError, UsageError

Stop = Literal["budget", "deadline"]

LONGEST_CHECK = 60.0  # seconds after which a budget is looked at again, however much is left
DEAREST_CHECK = 1 / 20  # of the time is spent on summing up what was spent, at most: a million jobs take a second
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:d|h|min|m|s)\s*)+")


class LimitReached(ChorusBatchError):
    """A batch can't go on: its budget is spent."""

    code = "budget_reached"
    exit_code = 8


class DeadlinePast(LimitReached):
    """A batch can't go on: its deadline is past."""

    code = "past_deadline"
    exit_code = 7


@dataclass(frozen=True)
class Spent:
    """What a batch has cost: seconds of its finished jobs, and so far of the running ones."""

    seconds: float
    running: int

    def until(self, budget: float, workers: int) -> float:
        """Seconds for which a budget can't be spent, with twice as many workers as there are now."""
        return max(0.0, budget - self.seconds) / (2 * max(self.running, workers, 1))


def spent(connection: Connection, batch_id: int) -> Spent:
    """What a batch has cost so far, in seconds of workers."""
    query = """
        SELECT f.seconds + r.seconds AS seconds, r.running
        FROM (SELECT coalesce(sum(g.seconds_total), 0) AS seconds
                FROM jobs j JOIN generations g ON g.job_id = j.id WHERE j.batch_id = :batch) f,
            (SELECT coalesce(sum(extract(epoch FROM clock_timestamp() - a.started_at)), 0)::float8 AS seconds,
                    count(*) AS running
                FROM queue q JOIN attempts a ON (a.job_id, a.attempt) = (q.job_id, q.attempt)
                WHERE q.batch_id = :batch AND q.state = 'running') r
    """
    row = connection.execute(text(query), {"batch": batch_id}).one()
    return Spent(float(row.seconds), int(row.running))


def enforce(connection: Connection) -> dict[int, Stop]:
    """Stop the batches that reached a limit and have jobs left to begin. Returns which, by what.

    Costs one look at a small index where no batch is near a limit.
    """
    due = connection.execute(
        text(
            """
            SELECT id, max_seconds, coalesce(deadline <= clock_timestamp(), false) AS late FROM batches
            WHERE state = 'active' AND (max_seconds IS NOT NULL OR deadline IS NOT NULL)
                AND (deadline <= clock_timestamp() OR max_seconds IS NOT NULL
                    AND coalesce(checked_until <= clock_timestamp(), true))
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
            """
        )
    ).all()
    stopped: dict[int, Stop] = {}
    for batch in due:
        if batch.late:
            why: Stop = "deadline"
        elif _is_spent(connection, batch.id, batch.max_seconds):
            why = "budget"
        else:
            continue
        if _stop(connection, batch.id, why):
            stopped[batch.id] = why
    return stopped


def _is_spent(connection: Connection, batch_id: int, budget: float) -> bool:
    began = time.perf_counter()
    so_far = spent(connection, batch_id)
    took = time.perf_counter() - began
    if so_far.seconds >= budget:
        return True
    workers = connection.execute(text("SELECT count(*) FROM workers WHERE stopped_at IS NULL")).scalar_one()
    pause = max(min(so_far.until(budget, workers), LONGEST_CHECK), took / DEAREST_CHECK)
    update = "UPDATE batches SET checked_until = clock_timestamp() + make_interval(secs => :pause) WHERE id = :batch"
    connection.execute(text(update), {"pause": pause, "batch": batch_id})
    return False


def _stop(connection: Connection, batch_id: int, why: Stop) -> bool:
    """Park what isn't running; a batch whose last jobs run already is left to end by itself."""
    update = """
        UPDATE batches SET state = 'paused', stopped = :why
        WHERE id = :batch AND EXISTS (SELECT FROM queue WHERE batch_id = :batch AND state IN ('ready', 'waiting'))
    """
    if connection.execute(text(update), {"why": why, "batch": batch_id}).rowcount == 0:
        return False
    park = """
        UPDATE queue SET state = 'paused' WHERE job_id IN
            (SELECT job_id FROM queue WHERE batch_id = :batch AND state = 'ready' ORDER BY job_id FOR UPDATE)
    """
    connection.execute(text(park), {"batch": batch_id})
    return True


def refuse_reached(connection: Connection, batch_id: int) -> None:
    """Raise LimitReached if a batch's budget is spent or its deadline past."""
    query = "SELECT max_seconds, deadline, deadline <= clock_timestamp() AS late FROM batches WHERE id = :batch"
    batch = connection.execute(text(query), {"batch": batch_id}).one()
    if batch.late:
        raise DeadlinePast(
            f"batch {batch_id}: its deadline, {batch.deadline.isoformat(timespec='minutes')}, is past",
            hint=f"`chorus-batch resume {batch_id} --deadline T` sets another, `none` takes it away",
        )
    if batch.max_seconds is not None and (so_far := spent(connection, batch_id).seconds) >= batch.max_seconds:
        raise LimitReached(
            f"batch {batch_id}: {so_far / 3600:.4g} of {batch.max_seconds / 3600:.4g} GPU hours are spent",
            hint=f"`chorus-batch resume {batch_id} --max-gpu-hours X` raises them, `none` takes them away",
        )


def parse_budget(given: str) -> float | None:
    """Seconds, from hours as text; None from "none". Raises UsageError for what isn't a positive number."""
    if given.strip() == "none":
        return None
    try:
        hours = float(given)
    except ValueError:
        hours = math.nan
    if not (math.isfinite(hours) and hours > 0):
        raise UsageError(f"--max-gpu-hours {given!r}: not a positive number", hint="give hours, such as 2.5")
    return 3600 * hours


def parse_deadline(given: str, now: datetime | None = None) -> datetime:
    """A time from ISO text (`2026-04-13T06:00`; local where it names no zone; `06:00` is the next one), or a duration
    from now (`90m`, `8h30m`, `2d`). Raises UsageError for one that is neither or past.
    """
    now = now or datetime.now().astimezone()
    told = given.strip()
    try:
        when = now + _duration(told) if _DURATION.fullmatch(told) else _moment(told, now)
    except OverflowError:
        when = None
    if when is None:
        raise UsageError(
            f"--deadline {given!r}: neither a time nor a duration", hint="use 2026-04-13T06:00, 06:00 or 8h"
        )
    if when <= now:
        raise UsageError(f"--deadline {given!r} is past", hint="give a time to come, or a duration such as 8h")
    return when


def parse_age(given: str, now: datetime | None = None) -> datetime:
    """The time that lies a duration such as `7d`, `8h30m` or `0s` back. Raises UsageError."""
    told = given.strip()
    hint = "use a duration such as 7d or 12h"
    if not _DURATION.fullmatch(told):
        raise UsageError(f"{given!r} is no duration", hint=hint)
    try:
        return (now or datetime.now().astimezone()) - _duration(told)
    except OverflowError:
        raise UsageError(f"{given!r} ago there was no time yet", hint=hint) from None


def _duration(told: str) -> timedelta:
    parts = re.findall(r"(\d+(?:\.\d+)?)(d|h|min|m|s)", told)
    return timedelta(seconds=sum(float(count) * _UNITS[unit] for count, unit in parts))


def _moment(told: str, now: datetime) -> datetime | None:
    try:
        at = clock.fromisoformat(told)
    except ValueError:
        try:
            when = datetime.fromisoformat(told)
        except ValueError:
            return None
        return when if when.tzinfo is not None else when.replace(tzinfo=now.tzinfo)
    when = datetime.combine(now.date(), at, at.tzinfo or now.tzinfo)
    return when if when > now else when + timedelta(days=1)
