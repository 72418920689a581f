"""From files to a stored, planned batch: read and validate, embed, plan, store in one transaction."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
import unicodedata
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import psycopg
from psycopg.types.json import Jsonb
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from chorus_batch.jobs import cache, plan
from chorus_batch.jobs.curve import Curve, Domain
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.embed import Embedder, make_embedder
from chorus_batch.jobs.errors import Conflict
from chorus_batch.jobs.graph import AUTO, FORCE, OFF
from chorus_batch.jobs.ingest.rejection import SHOWN, FileRejected
from chorus_batch.jobs.ingest.rows import IngestOptions, Note, Notes, Row, RowError, Source, file_sha256, read_batch
from chorus_batch.jobs.ingest.spool import Spool, SpooledRow
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.parameters import Parameters, domain_key
from chorus_batch.jobs.settings import Settings

_LOOK_UP = 10_000  # prompts whose stored vectors are asked for at once
_REUSE = {"auto": AUTO, "force": FORCE, "off": OFF}


@dataclass(frozen=True)
class SubmitOptions:
    """What a batch is, besides its rows."""

    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    cache: CacheMode = CacheMode.on
    on_invalid: Literal["file", "row"] = "file"
    new: bool = False  # a second batch of files that were submitted before


@dataclass(frozen=True)
class Forecast:
    """What the plan expects, counted in rows and denoising steps."""

    rows: int
    sources: int
    followers: int
    followers_of_cache: int  # of the followers, those that start from an entry of an earlier batch
    duplicates: int
    hit_rate: float
    steps_total: int
    steps_skipped: int


@dataclass(frozen=True)
class Submitted:
    """A batch that was stored, or with `batch_id` None one that would be."""

    batch_id: int | None
    name: str
    forecast: Forecast
    rejected: int  # rows left out
    errors: tuple[RowError, ...]  # the first of them
    notes: tuple[Note, ...]  # what was changed in the rows
    seconds: Mapping[str, float]  # read, embed, plan, store


@dataclass
class _Columns:
    """What planning needs of the rows, compact: about 70 bytes a row, and the text of each different prompt."""

    domains: list[Parameters] = field(default_factory=list)
    domain: array[int] = field(default_factory=lambda: array("i"))
    prompt: array[int] = field(default_factory=lambda: array("q"))
    request: array[int] = field(default_factory=lambda: array("q"))
    reuse: array[int] = field(default_factory=lambda: array("b"))
    priority: array[int] = field(default_factory=lambda: array("q"))
    prompt_keys: list[bytes] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)  # cleaned
    given_ids: Collection[str] = ()  # that rows brought along
    _domain_codes: dict[Parameters, int] = field(default_factory=dict)
    _prompt_codes: dict[bytes, int] = field(default_factory=dict)
    _request_codes: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.domain)

    def add(self, row: Row) -> None:
        domain = self._domain_codes.setdefault(_without_fps(row.parameters), len(self.domains))
        if domain == len(self.domains):
            self.domains.append(_without_fps(row.parameters))
        key = prompt_key(row.cleaned_prompt)
        prompt = self._prompt_codes.setdefault(key, len(self.prompts))
        if prompt == len(self.prompts):
            self.prompts.append(row.cleaned_prompt)
            self.prompt_keys.append(key)
        request = (domain, prompt, row.seed, row.parameters.fps)
        self.domain.append(domain)
        self.prompt.append(prompt)
        self.request.append(self._request_codes.setdefault(request, len(self._request_codes)))
        self.reuse.append(_REUSE[row.reuse])
        self.priority.append(row.priority)


def prompt_key(cleaned_prompt: str) -> bytes:
    """sha256 of a cleaned prompt; equal for equal text in whatever Unicode form."""
    return hashlib.sha256(unicodedata.normalize("NFC", cleaned_prompt).encode()).digest()


def submit(
    settings: Settings,
    engine: Engine,
    sources: Sequence[Source],
    ingest: IngestOptions,
    options: SubmitOptions,
    *,
    dry_run: bool = False,
) -> Submitted:
    """Store the files' rows as one batch, or nothing.

    Raises FileRejected if a file or (unless `on_invalid` is "row") a row isn't valid, and Conflict if the same files
    were submitted before with the same options. `dry_run` stops before anything is stored, vectors of prompts excepted.
    """
    files = [{"name": source.name, "sha256": file_sha256(source.path)} for source in sources]
    key = _submission_key(files, ingest, options)
    _refuse_known(engine, key)
    seconds: dict[str, float] = {}
    with Spool() as spool:
        with _timed(seconds, "read"):
            columns, rejected, errors, notes = _read(sources, ingest, options, spool)
        embedder = make_embedder(settings.embedder)
        with _timed(seconds, "embed"):
            space_id, vectors = _embedded(engine, embedder, columns, options.cache)
        with _timed(seconds, "plan"):
            domain_ids = _domain_ids(engine, space_id, embedder.space, columns.domains, ingest)
            planned = _planned(settings, engine, columns, vectors, domain_ids, ingest, options.cache)
        forecast = _forecast(columns, planned, ingest)
        name = options.name or _default_name(sources)
        batch_id = None
        if not dry_run:
            with _timed(seconds, "store"):
                batch = _Batch(key, files, options, name, domain_ids, columns, spool, planned, forecast)
                batch_id, name = _stored(engine, batch)
    return Submitted(batch_id, name, forecast, rejected, errors, notes, seconds)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - began


def _without_fps(parameters: Parameters) -> Parameters:
    # The frame rate doesn't touch the latents: rows that differ in nothing else may reuse each other.
    return parameters if parameters.fps == 1 else replace(parameters, fps=1)


def _submission_key(files: Sequence[Mapping[str, Any]], ingest: IngestOptions, options: SubmitOptions) -> str:
    asked = {k: v for k, v in asdict(replace(ingest, salt=0)).items() if k != "card"}
    parts = [[f["sha256"] for f in files], asked, ingest.card.name, ingest.card.fingerprint, options.cache.value]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{key}-{secrets.token_hex(8)}" if options.new else key


def _refuse_known(engine: Engine, key: str) -> None:
    with transaction(engine) as connection:
        row = connection.execute(
            text("SELECT id, name FROM batches WHERE submission_key = :key"), {"key": key}
        ).one_or_none()
    if row is not None:
        raise Conflict(
            f"the same files were submitted before with the same options, as batch {row.id} ({row.name})",
            hint=f"`chorus-batch status {row.id}` shows it; --new makes another batch",
        )


def _read(
    sources: Sequence[Source], ingest: IngestOptions, options: SubmitOptions, spool: Spool
) -> tuple[_Columns, int, tuple[RowError, ...], tuple[Note, ...]]:
    columns, notes = _Columns(), Notes()
    errors: list[RowError] = []
    error_count = rejected = 0
    seen: dict[str, int] = {}
    for file, source in enumerate(sources):
        last = 0
        for item in read_batch(source, ingest, notes, seen):
            if isinstance(item, Row):
                columns.add(item)
                spool.add(file, item)
                continue
            error_count += 1
            rejected += item.row != last
            last = item.row
            if len(errors) < SHOWN:
                errors.append(item)
    if error_count and (options.on_invalid == "file" or not len(columns)):
        hint = "correct the rows, or pass --on-invalid row to leave them out"
        raise FileRejected(errors, error_count, hint=hint)
    columns.given_ids = seen
    return columns, rejected, tuple(errors), notes.summary()


def _embedded(engine: Engine, embedder: Embedder, columns: _Columns, mode: CacheMode) -> tuple[int, np.ndarray | None]:
    """The space's id, and a unit vector for each different prompt [n, d]; none is needed if nothing is to be reused."""
    with transaction(engine) as connection:
        space_id = cache.register_space(connection, embedder.space, embedder.dimension)
    if mode is CacheMode.off:
        return space_id, None
    vectors = np.empty((len(columns.prompts), embedder.dimension), np.float32)
    missing: list[int] = []
    for codes in _slices(range(len(columns.prompts))):
        with transaction(engine) as connection:
            stored = cache.stored_vectors(connection, space_id, [columns.prompt_keys[code] for code in codes])
        for code in codes:
            vector = stored.get(columns.prompt_keys[code])
            if vector is None:
                missing.append(code)
            else:
                vectors[code] = vector
    for codes in _slices(missing):
        vectors[codes] = embedder.embed([columns.prompts[code] for code in codes])
        with transaction(engine) as connection:
            keys = [columns.prompt_keys[code] for code in codes]
            cache.store_vectors(connection, space_id, keys, vectors[codes])
    return space_id, vectors


def _slices(codes: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(codes), _LOOK_UP):
        yield list(codes[start : start + _LOOK_UP])


def _domain_ids(
    engine: Engine, space_id: int, space: str, domains: Sequence[Parameters], ingest: IngestOptions
) -> list[int]:
    ids = []
    with transaction(engine) as connection:
        for parameters in domains:
            values = {name: value for name, value in asdict(parameters).items() if name != "fps"}
            values |= {"fingerprint": ingest.card.fingerprint, "dtype": ingest.card.dtype}
            key = domain_key(parameters, ingest.card, space)
            ids.append(cache.register_domain(connection, space_id, key, values))
    return ids


def _planned(
    settings: Settings,
    engine: Engine,
    columns: _Columns,
    vectors: np.ndarray | None,
    domain_ids: Sequence[int],
    ingest: IngestOptions,
    mode: CacheMode,
) -> plan.Plan:
    if vectors is None or mode is CacheMode.exact:
        return plan.unshared(np.array(columns.request), link=mode is CacheMode.exact)
    items = plan.Items(
        domain=np.array(columns.domain, np.int64),
        request=np.array(columns.request, np.int64),
        prompt=np.array(columns.prompt, np.int64),
        embeddings=vectors[np.array(columns.prompt, np.int64)],
        reuse=np.array(columns.reuse, np.int64),
        priority=np.array(columns.priority, np.int64),
    )
    domains = []
    for parameters in columns.domains:
        tau, curve = _curve(ingest, parameters.steps)
        domains.append(Domain(max(tau, settings.min_similarity), curve))
    cached = _cached(settings, engine, columns, domain_ids, vectors.shape[1])
    return plan.plan(items, domains, cached, shared=mode is CacheMode.on)


def _curve(ingest: IngestOptions, steps: int) -> tuple[float, Curve]:
    """tau and c(m) of a domain with so many steps, from the card's table for them or, scaled, from its longest."""
    tables = ingest.card.boundaries
    nearest = steps if steps in tables else max(tables)
    return tables[nearest][0][0], Curve.of_boundaries(tables[nearest], nearest)


def _cached(
    settings: Settings, engine: Engine, columns: _Columns, domain_ids: Sequence[int], dimension: int
) -> plan.Cached:
    codes: dict[bytes, int] = {key: code for code, key in enumerate(columns.prompt_keys)}
    ids, domains, prompts, found = [], [], [], []
    with transaction(engine) as connection:
        for code, domain_id in enumerate(domain_ids):
            for entry_id, key, vector in cache.live_entries(connection, domain_id, settings.exact_search_rows):
                ids.append(entry_id)
                domains.append(code)
                prompts.append(codes.setdefault(key, len(codes)))
                found.append(vector)
    return plan.Cached(
        entry=np.array(ids, np.int64),
        domain=np.array(domains, np.int64),
        prompt=np.array(prompts, np.int64),
        embeddings=np.array(found, np.float32).reshape(-1, dimension),
    )


def _forecast(columns: _Columns, planned: plan.Plan, ingest: IngestOptions) -> Forecast:
    steps = np.array([parameters.steps for parameters in columns.domains], np.int64)[np.array(columns.domain, np.int64)]
    followers = planned.role == plan.FOLLOWER
    duplicates = planned.role == plan.DUPLICATE
    skipped = np.zeros(len(planned))
    skipped[duplicates] = steps[duplicates]
    for code, parameters in enumerate(columns.domains):
        rows = followers & (np.array(columns.domain) == code)
        _, curve = _curve(ingest, parameters.steps)
        skipped[rows] = np.rint((1.0 - curve(planned.similarity[rows])) * parameters.steps)
    return Forecast(
        rows=len(planned),
        sources=int((planned.role == plan.SOURCE).sum()),
        followers=int(followers.sum()),
        followers_of_cache=int((followers & (planned.entry >= 0)).sum()),
        duplicates=int(duplicates.sum()),
        hit_rate=float((followers | duplicates).mean()),
        steps_total=int(steps.sum()),
        steps_skipped=int(skipped.sum()),
    )


def _default_name(sources: Sequence[Source]) -> str:
    stem = "stdin" if sources[0].name == "-" else sources[0].path.stem
    return f"{stem}-{time.strftime('%m%d')}"


@dataclass(frozen=True)
class _Batch:
    key: str
    files: Sequence[Mapping[str, Any]]
    options: SubmitOptions
    name: str
    domain_ids: Sequence[int]
    columns: _Columns
    spool: Spool
    planned: plan.Plan
    forecast: Forecast


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


def _stored(engine: Engine, batch: _Batch) -> tuple[int, str]:
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
            return batch_id, name
        except IntegrityError as error:
            # Another submit was faster: of the same files (then this one is a conflict), or of others under the same
            # name (then the next free one is taken). Either was invisible until it committed.
            _refuse_known(engine, batch.key)
            taken = error.orig.diag.constraint_name if isinstance(error.orig, psycopg.Error) else None
            if taken != "uq_batches_name":
                raise


def _free_name(connection: Connection, batch: _Batch) -> str:
    query = text("SELECT name FROM batches WHERE name = :name OR starts_with(name, :name || '-')")
    taken = set(connection.execute(query, {"name": batch.name}).scalars())
    if batch.name not in taken:
        return batch.name
    if batch.options.name is not None:
        raise Conflict(f"there is a batch named {batch.name!r}", hint="choose another --name")
    return next(name for n in range(2, len(taken) + 3) if (name := f"{batch.name}-{n}") not in taken)


def _insert_batch(connection: Connection, batch: _Batch, name: str) -> int:
    insert = """
        INSERT INTO batches (name, submission_key, cache, files, labels, plan, total)
        VALUES (:name, :key, CAST(:cache AS cache_mode), CAST(:files AS jsonb), CAST(:labels AS jsonb),
            CAST(:plan AS jsonb), :total)
        RETURNING id
    """
    values = {
        "name": name,
        "key": batch.key,
        "cache": batch.options.cache.value,
        "files": json.dumps(list(batch.files)),
        "labels": json.dumps(dict(batch.options.labels)),
        "plan": json.dumps(asdict(batch.forecast)),
        "total": len(batch.columns),
    }
    return int(connection.execute(text(insert), values).scalar_one())


def _copy_jobs(connection: Connection, batch: _Batch, batch_id: int) -> None:
    driver = connection.connection.driver_connection
    assert driver is not None
    with driver.cursor() as cursor:
        cursor.execute(
            "SELECT nextval(pg_get_serial_sequence('jobs', 'id')) FROM generate_series(1, %s)", (len(batch.columns),)
        )
        ids = array("q", (row[0] for row in cursor))
        with cursor.copy(f"COPY jobs ({', '.join(_JOB_COLUMNS)}) FROM STDIN") as copy:
            copy.set_types(list(_JOB_COLUMNS.values()))
            for values in _job_rows(batch, batch_id, ids):
                copy.write_row(values)


def _job_rows(batch: _Batch, batch_id: int, ids: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    columns = batch.columns
    several = len(batch.files) > 1
    for index, (row, part) in enumerate(zip(batch.spool, batch.planned, strict=True)):
        yield (
            ids[index],
            batch_id,
            row.file,
            row.row,
            row.repeat,
            row.line,
            row.external_id or _own_id(row, several, columns.given_ids),
            row.prompt,
            columns.prompt_keys[columns.prompt[index]],
            batch.domain_ids[columns.domain[index]],
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


def _own_id(row: SpooledRow, several_files: bool, given: Collection[str]) -> str:
    """An id for a row whose file gives none, unlike every id that the files give."""
    own = f"file-{row.file + 1}-row-{row.row:06}" if several_files else f"row-{row.row:06}"
    own = f"{own}-{row.repeat + 1}" if row.repeat else own
    while own in given:
        own = f"own-{own}"
    return own
