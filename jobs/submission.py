"""From files to a stored, planned batch: read and validate, embed, plan, store in one transaction."""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

import numpy as np
from sqlalchemy import Engine

from chorus_batch.jobs import cache, costs, plan, reuse
from chorus_batch.jobs.batch import NewBatch, refuse_known, store
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.embed import Embedder, make_embedder
from chorus_batch.jobs.forecast import Forecast
from chorus_batch.jobs.ingest.rejection import SHOWN, FileRejected
from chorus_batch.jobs.ingest.rows import IngestOptions, Note, Notes, Row, RowError, Source, file_sha256, read_batch
from chorus_batch.jobs.ingest.spool import Spool
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.outlook import Terms, of_submission
from chorus_batch.jobs.parameters import Parameters, domain_key
from chorus_batch.jobs.requested import Requested
from chorus_batch.jobs.settings import Settings

_LOOK_UP = 10_000  # prompts whose stored vectors are asked for at once


@dataclass(frozen=True)
class SubmitOptions:
    """What a batch is, besides its rows."""

    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    cache: CacheMode = CacheMode.on
    on_invalid: Literal["file", "row"] = "file"
    new: bool = False  # a second batch of files that were submitted before
    max_seconds: float | None = None  # of workers, for all its jobs together: then no more are begun
    deadline: datetime | None = None  # from then on no more are begun


@dataclass(frozen=True)
class Submitted:
    """A batch that was stored, or with `batch_id` None one that would be."""

    batch_id: int | None
    name: str
    forecast: Forecast
    rejected: int  # rows left out
    errors: tuple[RowError, ...]  # the first of them
    notes: tuple[Note, ...]  # what was changed in the rows
    seconds: Mapping[str, float]  # read, embed, plan, forecast, store


def submit(
    settings: Settings,
    engine: Engine,
    sources: Sequence[Source],
    ingest: IngestOptions,
    options: SubmitOptions,
    *,
    dry_run: bool = False,
    terms: Terms | None = None,
) -> Submitted:
    """Store the files' rows as one batch, or nothing.

    Raises FileRejected if a file or (unless `on_invalid` is "row") a row isn't valid, and Conflict if the same files
    were submitted before with the same options. `dry_run` stops before anything is stored, vectors of prompts excepted.
    `terms`: for whom the forecast is.
    """
    files = [{"name": source.name, "sha256": file_sha256(source.path)} for source in sources]
    key = _submission_key(files, ingest, options)
    refuse_known(engine, key)
    seconds: dict[str, float] = {}
    with Spool() as spool:
        with _timed(seconds, "read"):
            columns, rejected, errors, notes = _read(sources, ingest, options, spool)
        embedder = make_embedder(settings.embedder)
        with _timed(seconds, "embed"):
            space_id, vectors = _embedded(engine, embedder, columns, options.cache)
        with _timed(seconds, "plan"):
            domain_ids = _domain_ids(engine, space_id, embedder.space, columns.domains, ingest)
            with transaction(engine) as connection:
                cards = [ingest.card] * len(columns.domains)
                each = costs.of_domains(connection, cards, domain_ids, columns.domains)
            planned, found = _planned(settings, engine, columns, vectors, domain_ids, each, ingest, options.cache)
            notes += found
        with _timed(seconds, "forecast"):
            forecast = of_submission(
                settings,
                engine,
                ingest.card,
                columns,
                spool,
                planned,
                domain_ids,
                each,
                options.cache,
                terms or Terms(),
            )
        name = options.name or _default_name(sources)
        batch_id = None
        if not dry_run:
            with _timed(seconds, "store"):
                batch = NewBatch(
                    key=key,
                    files=files,
                    name=name,
                    named=options.name is not None,
                    labels=options.labels,
                    cache=options.cache,
                    domain_ids=domain_ids,
                    requested=columns,
                    spool=spool,
                    planned=planned,
                    forecast=asdict(forecast) | {"planner": reuse.reported(planned)},
                    max_seconds=options.max_seconds,
                    deadline=options.deadline,
                )
                batch_id, name = store(engine, batch)
    return Submitted(batch_id, name, forecast, rejected, errors, notes, seconds)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - began


def _submission_key(files: Sequence[Mapping[str, Any]], ingest: IngestOptions, options: SubmitOptions) -> str:
    asked = {k: v for k, v in asdict(replace(ingest, salt=0)).items() if k not in ("card", "policy")}
    asked["defaults"] = asdict(ingest.own_card.defaults)  # the policy is one of them, named or not
    parts = [[f["sha256"] for f in files], asked, ingest.card.name, ingest.card.fingerprint, options.cache.value]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
    return f"{key}-{secrets.token_hex(8)}" if options.new else key


def _read(
    sources: Sequence[Source], ingest: IngestOptions, options: SubmitOptions, spool: Spool
) -> tuple[Requested, int, tuple[RowError, ...], tuple[Note, ...]]:
    columns, notes = Requested(), Notes()
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


def _embedded(engine: Engine, embedder: Embedder, columns: Requested, mode: CacheMode) -> tuple[int, np.ndarray | None]:
    """The space's id, and a unit vector for each different prompt [n, d]; none is needed if nothing is to be reused."""
    with transaction(engine) as connection:
        space_id = cache.register_space(connection, embedder.space, embedder.dimension)
    if mode is CacheMode.off or not any(map(_is_semantic, columns.domains)):
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
    columns: Requested,
    vectors: np.ndarray | None,
    domain_ids: Sequence[int],
    each: Sequence[costs.Costs],
    ingest: IngestOptions,
    mode: CacheMode,
) -> tuple[plan.Plan, tuple[Note, ...]]:
    """The plan, and notes on what it rests on."""
    if vectors is None or mode is CacheMode.exact:
        return plan.unshared(np.array(columns.request), link=mode is not CacheMode.off), ()
    cached, texts = _cached(settings, engine, columns, domain_ids, vectors.shape[1])
    slots, notes = reuse.slots_of(ingest.card, columns.prompts, vectors, columns.domains, texts)
    prompt = np.array(columns.prompt, np.int64)
    if slots is not None:
        cached = replace(cached, slots=slots[np.arange(len(columns.prompts), len(slots.template))])
    items = plan.Items(
        domain=np.array(columns.domain, np.int64),
        request=np.array(columns.request, np.int64),
        prompt=prompt,
        embeddings=vectors[prompt],
        reuse=np.array(columns.reuse, np.int64),
        priority=np.array(columns.priority, np.int64),
        slots=None if slots is None else slots[prompt],
    )
    domains = [
        reuse.domain_of(ingest.card, parameters, settings.min_similarity, reuse.price_of(cost))
        for parameters, cost in zip(columns.domains, each, strict=True)
    ]
    notes += reuse.embedder_notes(ingest.card, settings.embedder)
    return plan.plan(items, domains, cached, shared=mode is CacheMode.on), notes


def _is_semantic(domain: Parameters) -> bool:
    return domain.policy != "none"


def _cached(
    settings: Settings, engine: Engine, columns: Requested, domain_ids: Sequence[int], dimension: int
) -> tuple[plan.Cached, list[str]]:
    """The domains' entries, and their prompts."""
    codes: dict[bytes, int] = {key: code for code, key in enumerate(columns.prompt_keys)}
    ids, domains, prompts, found, texts = [], [], [], [], []
    with transaction(engine) as connection:
        for code, domain_id in enumerate(domain_ids):
            if not _is_semantic(columns.domains[code]):
                continue
            for entry_id, key, prompt, vector in cache.live_entries(connection, domain_id, settings.exact_search_rows):
                ids.append(entry_id)
                texts.append(prompt)
                domains.append(code)
                prompts.append(codes.setdefault(key, len(codes)))
                found.append(vector)
    cached = plan.Cached(
        entry=np.array(ids, np.int64),
        domain=np.array(domains, np.int64),
        prompt=np.array(prompts, np.int64),
        embeddings=np.array(found, np.float32).reshape(-1, dimension),
    )
    return cached, texts


def _default_name(sources: Sequence[Source]) -> str:
    stem = "stdin" if sources[0].name == "-" else sources[0].path.stem
    return f"{stem}-{time.strftime('%m%d')}"
