"""Gathers what a forecast needs: a submission's or a stored batch's rows, what was made before, and what jobs cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, text

from chorus_batch.jobs import costs, memory, plan
from chorus_batch.jobs.auxiliary import auxiliaries
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.jobs.claims import DomainRecord
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.depth import Depths, depths, kept_steps
from chorus_batch.jobs.forecast import Bools, Forecast, Work, forecast
from chorus_batch.jobs.ingest.spool import Spool
from chorus_batch.jobs.kinds import parts
from chorus_batch.jobs.leases import live_workers
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.nearest import IntArray
from chorus_batch.jobs.parameters import Parameters, clean_prompt
from chorus_batch.jobs.requested import Requested
from chorus_batch.jobs.settings import Settings

_LOOK_UP = 10_000  # requests that are looked up at once
STORING = (CacheMode.on, CacheMode.exact)  # modes in which misses are added to the cache


@dataclass(frozen=True)
class Terms:
    """So many workers (None: those that live, or one), what an hour of one costs, and its device's bytes."""

    workers: int | None = None
    gpu_price: float | None = None
    device_memory: int | None = None


@dataclass(frozen=True)
class Planned:
    """Rows with their plan, wherever they come from. `target` and `origin` give a row's prompt and its source's."""

    domains: Sequence[Parameters]
    domain_ids: Sequence[int]
    domain: IntArray
    plan: plan.Plan
    priority: IntArray
    target: Callable[[int], str]
    origin: Callable[[int], str]
    made_before: Bools
    mode: CacheMode


def of_submission(
    settings: Settings,
    engine: Engine,
    card: ModelCard,
    columns: Requested,
    spool: Spool,
    planned: plan.Plan,
    domain_ids: Sequence[int],
    each: Sequence[costs.Costs],
    mode: CacheMode,
    terms: Terms,
) -> Forecast:
    """The forecast of rows that aren't stored yet; `each`: the costs of each domain."""

    def target(row: int) -> str:
        return columns.prompts[columns.prompt[row]]

    with transaction(engine) as connection:
        entries = _entry_prompts(connection, planned.entry[(planned.role == plan.FOLLOWER) & (planned.entry >= 0)])
        before = _made_before(connection, columns, spool, domain_ids, mode)

    def origin(row: int) -> str:
        source = int(planned.source[row])
        return target(source) if source >= 0 else entries[int(planned.entry[row])]

    rows = Planned(
        domains=columns.domains,
        domain_ids=domain_ids,
        domain=np.array(columns.domain, np.int64),
        plan=planned,
        priority=np.array(columns.priority, np.int64),
        target=target,
        origin=origin,
        made_before=before,
        mode=mode,
    )
    return _forecast(settings, engine, [card] * len(columns.domains), each, rows, terms)


def of_batch(settings: Settings, engine: Engine, batch_id: int, terms: Terms) -> Forecast:
    """The forecast of what is left of a stored batch; of no rows if it is over."""
    query = """
        SELECT j.id, j.prompt, j.domain_id, j.role::text, j.source_job_id, j.source_entry_id, j.fallback_job_id,
            j.similarity, j.position, j.priority, coalesce(s.prompt, e.prompt) AS origin,
            b.cache <> 'off' AND EXISTS (SELECT FROM jobs f WHERE f.domain_id = j.domain_id
                AND f.prompt_key = j.prompt_key AND f.seed = j.seed AND f.fps = j.fps AND f.outcome = 'done') AS made
        FROM jobs j JOIN batches b ON b.id = j.batch_id LEFT JOIN jobs s ON s.id = j.source_job_id
            LEFT JOIN cache_entries e ON e.id = j.source_entry_id
        WHERE j.batch_id = :batch AND j.outcome IS NULL ORDER BY j.id
    """
    with transaction(engine) as connection:
        mode = connection.execute(text("SELECT cache::text FROM batches WHERE id = :b"), {"b": batch_id}).scalar_one()
        jobs = connection.execute(text(query), {"batch": batch_id}).all()
        domains = _domains(connection, sorted({job.domain_id for job in jobs}))
    index = {job.id: n for n, job in enumerate(jobs)}
    codes = {domain.id: n for n, domain in enumerate(domains)}
    planned = plan.Plan(
        role=np.array([plan.ROLES.index(job.role) for job in jobs], np.int8),
        source=np.array([index.get(job.source_job_id, -1) for job in jobs], np.int64),
        entry=np.array([job.source_entry_id or -1 for job in jobs], np.int64),
        similarity=np.array([np.nan if job.similarity is None else job.similarity for job in jobs], np.float32),
        fallback=np.array([index.get(job.fallback_job_id, -1) for job in jobs], np.int64),
        position=np.array([job.position for job in jobs], np.int64),
    )
    rows = Planned(
        domains=[_parameters(domain) for domain in domains],
        domain_ids=[domain.id for domain in domains],
        domain=np.array([codes[job.domain_id] for job in jobs], np.int64),
        plan=planned,
        priority=np.array([job.priority for job in jobs], np.int64),
        target=lambda row: clean_prompt(jobs[row].prompt),
        origin=lambda row: clean_prompt(jobs[row].origin),
        made_before=np.array([job.made for job in jobs], np.bool_),
        mode=CacheMode(mode),
    )
    cards = [_card(settings, domain) for domain in domains]
    with transaction(engine) as connection:
        each = costs.of_domains(connection, cards, rows.domain_ids, rows.domains)
    return _forecast(settings, engine, cards, each, rows, terms)


def _card(settings: Settings, domain: DomainRecord) -> ModelCard:
    # A batch of an older card keeps its weights' traces; boundaries are the card's of today, as the workers'.
    mine = load_card(settings.model, settings.models_folder)
    card = mine if mine.name == domain.model else load_card(domain.model, settings.models_folder)
    return replace(card, fingerprint=domain.fingerprint, dtype=domain.dtype)


def _domains(connection: Connection, ids: Sequence[int]) -> list[DomainRecord]:
    found = connection.execute(text("SELECT * FROM domains WHERE id = ANY(:ids) ORDER BY id"), {"ids": list(ids)})
    return [DomainRecord(**row._mapping) for row in found]


def _parameters(domain: DomainRecord) -> Parameters:
    names = ("model", "width", "height", "frames", "steps", "guidance_scale", "shift", "scheduler", "negative_prompt")
    values: dict[str, Any] = {name: getattr(domain, name) for name in (*names, "policy", "step_cache")}
    return Parameters(fps=1, **values)


def _forecast(
    settings: Settings,
    engine: Engine,
    cards: Sequence[ModelCard],
    each: Sequence[costs.Costs],
    rows: Planned,
    terms: Terms,
) -> Forecast:
    steps = np.array([parameters.steps for parameters in rows.domains], np.int64)
    kept = [
        kept_steps(card, parameters) if rows.mode in STORING else 0
        for card, parameters in zip(cards, rows.domains, strict=True)
    ]
    work = Work(
        domain=rows.domain,
        steps=steps[rows.domain] if len(rows.domain) else rows.domain,
        role=rows.plan.role,
        source=rows.plan.source,
        from_entry=rows.plan.entry >= 0,
        fallback=rows.plan.fallback,
        made_before=rows.made_before,
        position=rows.plan.position,
        priority=rows.priority,
        depths=_depths(settings, cards, rows),
        entries=np.array(kept, np.int64)[rows.domain] if len(rows.domain) else rows.domain,
    )
    with transaction(engine) as connection:
        workers = terms.workers or max(1, live_workers(connection, settings.lease))
    found = forecast(work, each, workers=workers, gpu_price=terms.gpu_price)
    others = auxiliaries(settings)
    lines = [
        memory.describe(card.anatomy, parameters, card.max_prompt_tokens, card.dtype, terms.device_memory, others)
        for card, parameters in zip(cards, rows.domains, strict=True)
        if card.anatomy is not None
    ]
    return replace(found, memory=tuple(dict.fromkeys(lines)))


def _depths(settings: Settings, cards: Sequence[ModelCard], rows: Planned) -> Depths:
    """Of each follower; the kinds of difference are asked for where the depth depends on them.

    The range holds the depth that the fallback would give, and reaches as deep as any kind of difference goes: a worker
    starts from whatever bears most steps by then.
    """
    found = Depths.none(len(rows.domain))
    for code, (card, parameters) in enumerate(zip(cards, rows.domains, strict=True)):
        follows = np.flatnonzero((rows.plan.role == plan.FOLLOWER) & (rows.domain == code) & ~rows.made_before)
        second = follows[rows.plan.fallback[follows] >= 0]
        asked = other = None
        if card.kinds and parameters.policy == "chorus" and settings.differ == "lexical":
            pairs = [(rows.origin(row), rows.target(row)) for row in follows.tolist()]
            pairs += [(rows.target(int(rows.plan.fallback[row])), rows.target(row)) for row in second.tolist()]
            told = parts(pairs, card.synonyms)
            asked, other = told[: len(follows)], told[len(follows) :]
        similarity = rows.plan.similarity[follows]
        found.put(follows, depths(card, parameters, similarity, asked))
        found.deepen(follows, depths(card, parameters, similarity))
        found.widen(second, depths(card, parameters, rows.plan.similarity[second], other))
    return found


def _entry_prompts(connection: Connection, ids: IntArray) -> dict[int, str]:
    query = text("SELECT id, prompt FROM cache_entries WHERE id = ANY(:ids)")
    found = connection.execute(query, {"ids": sorted(set(ids.tolist()))})
    return {row.id: clean_prompt(row.prompt) for row in found}


def _made_before(
    connection: Connection, columns: Requested, spool: Spool, domain_ids: Sequence[int], mode: CacheMode
) -> Bools:
    """Which rows' very requests are finished: a worker links them instead of computing them."""
    made = np.zeros(len(columns), np.bool_)
    known = text("SELECT EXISTS (SELECT FROM jobs WHERE domain_id = ANY(:ids) AND outcome = 'done')")
    if mode is CacheMode.off or not connection.execute(known, {"ids": list(domain_ids)}).scalar():
        return made
    query = text(
        """
        SELECT q.n FROM unnest(CAST(:domains AS int[]), CAST(:keys AS bytea[]), CAST(:seeds AS bigint[]),
            CAST(:rates AS int[])) WITH ORDINALITY AS q(domain, key, seed, fps, n)
        WHERE EXISTS (SELECT FROM jobs j WHERE j.domain_id = q.domain AND j.prompt_key = q.key AND j.seed = q.seed
            AND j.fps = q.fps AND j.outcome = 'done')
        """
    )
    start = 0
    for part in _chunks(spool):
        codes = range(start, start + len(part))
        values = {
            "domains": [domain_ids[columns.domain[code]] for code in codes],
            "keys": [columns.prompt_keys[columns.prompt[code]] for code in codes],
            "seeds": [row.seed for row in part],
            "rates": [row.fps for row in part],
        }
        found = connection.execute(query, values).scalars()
        made[[start + n - 1 for n in found]] = True
        start += len(part)
    return made


def _chunks(spool: Spool) -> Iterator[list[Any]]:
    rows = iter(spool)
    while part := list(islice(rows, _LOOK_UP)):
        yield part
