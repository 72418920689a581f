"""A new batch, and how it is stored: whole or not at all."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import Conflict
from chorus_batch.jobs.ingest.spool import Spool, SpooledRow
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.plan import Plan
from chorus_batch.jobs.requested import Requested


@dataclass(frozen=True)
class NewBatch:
    """A planned batch that isn't stored yet."""

    key: str  # hash of what was submitted
    files: Sequence[Mapping[str, Any]]
    name: str
    named: bool  # by a person; else the next free name of its kind will do
    labels: Mapping[str, str]
    cache: CacheMode
    domain_ids: Sequence[int]  # of the domain codes in `requested`
    requested: Requested
    spool: Spool
    planned: Plan
    forecast: Mapping[str, Any]
    max_seconds: float | None = None  # of workers, for all its jobs together
    deadline: datetime | None = None


_JOB_COLUMNS = {
    "id": "int8",
    "batch_id": "int8",
    "file": "int2",
    "row": "int4",
    "copy": "int2",
    "line": "int4",
    "external_id": "text",
    "prompt": "text",
    "prompt_key": "bytea",
    "domain_id": "int4",
    "seed": "int8",
    "fps": "int2",
    "reuse": "text",
    "priority": "int4",
    "output_name": "text",
    "extra": "jsonb",
    "role": "text",
    "source_job_id": "int8",
    "source_entry_id": "int8",
    "fallback_job_id": "int8",
    "similarity": "float8",
    "position": "int4",
}


def store(engine: Engine, batch: NewBatch) -> tuple[int, str]:
    """Everything in one transaction: the batch is there whole or not at all."""
    while True:
        try:
            with transaction(engine) as connection:
                name = _free_name(connection, batch)
                batch_id = _insert_batch(connection, batch, name)
                _copy_jobs(connection, batch, batch_id)
                connection.execute(
                    text(
                        """
                        INSERT INTO queue (job_id, batch_id, source_job_id, priority, position, state)
                        SELECT id, batch_id, source_job_id, priority, position,
                            (CASE WHEN source_job_id IS NULL THEN 'ready' ELSE 'waiting' END)::queue_state
                        FROM jobs WHERE batch_id = :batch
                        """
                    ),
                    {"batch": batch_id},
                )
                if len(set(batch.requested.priority)) > 1:
                    _hurry_sources(connection, batch_id)
            return batch_id, name
        except IntegrityError as error:
            # Another submit was faster: of the same files (then this one is a conflict), or of others under the same
            # name (then the next free one is taken). Either was invisible until it committed.
            refuse_known(engine, batch.key)
            taken = error.orig.diag.constraint_name if isinstance(error.orig, psycopg.Error) else None
            if taken != "uq_batches_name":
                raise


def _free_name(connection: Connection, batch: NewBatch) -> str:
    query = text("SELECT name FROM batches WHERE name = :name OR starts_with(name, :name || '-')")
    taken = set(connection.execute(query, {"name": batch.name}).scalars())
    if batch.name not in taken:
        return batch.name
    if batch.named:
        raise Conflict(f"there is a batch named {batch.name!r}", hint="choose another --name")
    return next(name for n in range(2, len(taken) + 3) if (name := f"{batch.name}-{n}") not in taken)


def _insert_batch(connection: Connection, batch: NewBatch, name: str) -> int:
    insert = """
        INSERT INTO batches (name, submission_key, cache, files, labels, plan, total, max_seconds, deadline)
        VALUES (:name, :key, CAST(:cache AS cache_mode), CAST(:files AS jsonb), CAST(:labels AS jsonb),
            CAST(:plan AS jsonb), :total, :max_seconds, :deadline)
        RETURNING id
    """
    values = {
        "name": name,
        "key": batch.key,
        "cache": batch.cache.value,
        "files": json.dumps(list(batch.files)),
        "labels": json.dumps(dict(batch.labels)),
        "plan": json.dumps(batch.forecast),
        "total": len(batch.requested),
        "max_seconds": batch.max_seconds,
        "deadline": batch.deadline,
    }
    return int(connection.execute(text(insert), values).scalar_one())


def _copy_jobs(connection: Connection, batch: NewBatch, batch_id: int) -> None:
    driver = connection.connection.driver_connection
    assert driver is not None
    with driver.cursor() as cursor:
        cursor.execute(
            "SELECT nextval(pg_get_serial_sequence('jobs', 'id')) FROM generate_series(1, %s)", (len(batch.requested),)
        )
        ids = array("q", (row[0] for row in cursor))
        with cursor.copy(f"COPY jobs ({', '.join(_JOB_COLUMNS)}) FROM STDIN") as copy:
            copy.set_types(list(_JOB_COLUMNS.values()))
            for values in _job_rows(batch, batch_id, ids):
                copy.write_row(values)


def _job_rows(batch: NewBatch, batch_id: int, ids: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    requested = batch.requested
    several = len(batch.files) > 1
    for index, (row, part) in enumerate(zip(batch.spool, batch.planned, strict=True)):
        yield (
            ids[index],
            batch_id,
            row.file,
            row.row,
            row.repeat,
            row.line,
            row.external_id or _own_id(row, several, requested.given_ids),
            row.prompt,
            requested.prompt_keys[requested.prompt[index]],
            batch.domain_ids[requested.domain[index]],
            row.seed,
            row.fps,
            row.reuse,
            row.priority,
            row.output_name,
            Jsonb(row.extra) if row.extra else None,
            part.role,
            None if part.source is None else ids[part.source],
            part.entry,
            None if part.fallback is None else ids[part.fallback],
            part.similarity,
            part.position,
        )


def _hurry_sources(connection: Connection, batch_id: int) -> None:
    """Claims go by priority: a source that an urgent row waits for is as urgent. `jobs` keeps what the file said."""
    update = """
        UPDATE queue SET priority = waiting.priority
        FROM (
            SELECT source_job_id, max(priority) AS priority FROM queue
            WHERE batch_id = :batch AND state = 'waiting' GROUP BY source_job_id
        ) waiting
        WHERE queue.job_id = waiting.source_job_id AND queue.priority < waiting.priority
    """
    # Again for those that wait for one that waits: a duplicate for a follower for its source.
    while connection.execute(text(update), {"batch": batch_id}).rowcount:
        pass


def _own_id(row: SpooledRow, several_files: bool, given: Collection[str]) -> str:
    """An id for a row whose file gives none, unlike every id that the files give."""
    own = f"file-{row.file + 1}-row-{row.row:06}" if several_files else f"row-{row.row:06}"
    own = f"{own}-{row.repeat + 1}" if row.repeat else own
    while own in given:
        own = f"own-{own}"
    return own


def refuse_known(engine: Engine, key: str) -> None:
    """Raise Conflict if a batch of that key is stored."""
    with transaction(engine) as connection:
        row = connection.execute(
            text("SELECT id, name FROM batches WHERE submission_key = :key"), {"key": key}
        ).one_or_none()
    if row is not None:
        raise Conflict(
            f"the same files were submitted before with the same options, as batch {row.id} ({row.name})",
            hint=f"`chorus-batch status {row.id}` shows it; --new makes another batch",
        )
