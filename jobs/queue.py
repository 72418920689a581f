"""The queue: claim, finish, fail, release. Every write after the claim is fenced by the claim's attempt number.

A Celery message only wakes a worker; which job is whose is decided here, in Postgres.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, Row, text

from chorus_batch.jobs.claims import Claim, DomainRecord, EntryRecord, GenerationRecord
from chorus_batch.jobs.errors import ClaimLost
from chorus_batch.jobs.models import CacheMode, CacheResult, Outcome, Reuse, Role
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import StoredObject

# A job that becomes claimable again goes back to `ready`, unless its batch was paused meanwhile.
READY_AGAIN = """(CASE (SELECT b.state FROM batches b WHERE b.id = queue.batch_id)
    WHEN 'paused' THEN 'paused' ELSE 'ready' END)::queue_state"""

# The candidates, each found by one index: the best job whose source this worker holds in memory, and the best job of
# all. Within one priority the held one wins over a follower of another source, until that has been ready for longer
# than `max_wait`. It never wins over a job that waited for nobody: the plan starts sources just early enough that no
# worker is left without followers, and a worker that went on with its own cluster would undo that. `batch_id + 0` keeps
# the planner from walking the whole queue in order in search of a held source's follower when there is none: it has to
# come from the sources' index.
# A share of the claims (`fair`) looks at the lowest priority first, and takes what has been ready there for longer than
# `max_wait`: whatever keeps coming in above it, it moves.
# The commit isn't waited for on disk: a claim that a crash of the server forgets is a job that is ready again, and the
# worker that had it is stopped by its fence.
_CLAIM = """
    WITH held AS MATERIALIZED (
        SELECT job_id, priority FROM queue
        WHERE state = 'ready'{fit} AND source_job_id = ANY(CAST(:held AS bigint[]))
            AND (not_before IS NULL OR not_before <= now())
        ORDER BY priority DESC, batch_id + 0, position LIMIT 1 FOR UPDATE SKIP LOCKED
    ), head AS MATERIALIZED (
        SELECT job_id, priority, source_job_id IS NULL OR ready_since < now() - make_interval(secs => :max_wait) AS due
        FROM queue
        WHERE state = 'ready'{fit} AND (not_before IS NULL OR not_before <= now())
        ORDER BY priority DESC, batch_id, position LIMIT 1 FOR UPDATE SKIP LOCKED
    ), lowest AS MATERIALIZED (
        SELECT job_id, ready_since FROM queue
        WHERE CAST(:fair AS boolean) AND state = 'ready'{fit} AND (not_before IS NULL OR not_before <= now())
            AND priority = (SELECT priority FROM queue WHERE state = 'ready'{fit}
                ORDER BY priority, batch_id DESC, position DESC LIMIT 1)
        ORDER BY batch_id, position LIMIT 1 FOR UPDATE SKIP LOCKED
    ), candidates AS (
        SELECT job_id, priority, 1 AS rank FROM held
        UNION ALL
        SELECT job_id, priority, CASE WHEN due THEN 2 ELSE 0 END FROM head
        UNION ALL
        SELECT job_id, 2147483647, 3 FROM lowest WHERE ready_since < now() - make_interval(secs => :max_wait)
    ), chosen AS (
        SELECT job_id FROM candidates ORDER BY priority DESC, rank DESC LIMIT 1
    ), claimed AS (
        UPDATE queue SET state = 'running', worker_id = :worker, attempt = attempt + 1, not_before = NULL
        FROM chosen WHERE queue.job_id = chosen.job_id
        RETURNING queue.job_id, queue.attempt, queue.failures, queue.checkpoint, queue.source_job_id
    ), recorded AS (
        INSERT INTO attempts (job_id, attempt, worker_id) SELECT job_id, attempt, :worker FROM claimed
    )
    SELECT c.attempt, c.failures, c.checkpoint, j.id AS job_id, j.batch_id, j.prompt, j.prompt_key, j.seed, j.fps,
        j.reuse::text, j.role::text, c.source_job_id, j.source_job_id AS planned_job_id, j.source_entry_id,
        j.fallback_job_id, j.similarity, b.cache::text,
        to_jsonb(d) AS domain, set_config('synchronous_commit', 'off', true)
    FROM claimed c JOIN jobs j ON j.id = c.job_id JOIN domains d ON d.id = j.domain_id
        JOIN batches b ON b.id = j.batch_id
    """
CLAIM = text(_CLAIM.format(fit=""))
# For a worker that can't run some models: of their batches, each of which has one model, it takes no job.
CLAIM_FIT = text(
    _CLAIM.format(
        fit="""
            AND batch_id <> ALL (ARRAY(
                SELECT b.id FROM batches b CROSS JOIN LATERAL (
                    SELECT j.domain_id FROM queue q JOIN jobs j ON j.id = q.job_id WHERE q.batch_id = b.id LIMIT 1
                ) one JOIN domains d ON d.id = one.domain_id
                WHERE d.model = ANY(CAST(:unfit AS text[]))
            ))"""
    )
)

_DOCUMENTS = ("seconds", "backend", "notes", "details", "scores")  # of a generation: its JSON columns


# Of the claims: how many look for what has waited too long below the highest priority, as long as there is any.
# Few, for such a claim takes longer.
FAIR_SHARE = 1 / 128


def claim(
    connection: Connection,
    worker_id: str,
    held: Sequence[int] = (),
    *,
    max_wait: float = Settings.max_wait,
    fair_share: float = FAIR_SHARE,
    unfit: Sequence[str] = (),
) -> Claim | None:
    """Take the best ready job, or None: of the highest priority, the first in the plan's order.

    `held`: source jobs whose latents this worker has in memory; their followers go before those of other sources. But
    what has been ready for longer than `max_wait` seconds goes before what is held; and before a higher priority in
    `fair_share` (0..1) of the claims. Jobs of the models `unfit` are left to others.
    """
    # As text: a list's type on the wire depends on its numbers, and each type would be planned anew.
    sources = "{" + ",".join(map(str, held)) + "}"
    fair = random.random() < fair_share  # noqa: S311 - no secret
    values = {"worker": worker_id, "held": sources, "max_wait": max_wait, "fair": fair}
    if unfit:
        row = connection.execute(CLAIM_FIT, {**values, "unfit": list(unfit)}).one_or_none()
    else:
        row = connection.execute(CLAIM, values).one_or_none()
    if row is None:
        return None
    return Claim(
        job_id=row.job_id,
        attempt=row.attempt,
        worker_id=worker_id,
        batch_id=row.batch_id,
        prompt=row.prompt,
        prompt_key=bytes(row.prompt_key),
        seed=row.seed,
        fps=row.fps,
        reuse=Reuse(row.reuse),
        cache=CacheMode(row.cache),
        role=Role(row.role),
        source_job_id=row.source_job_id,
        planned_job_id=row.planned_job_id,
        fallback_job_id=row.fallback_job_id,
        source_entry_id=row.source_entry_id,
        similarity=row.similarity,
        failures=row.failures,
        domain=DomainRecord(**row.domain),
        checkpoint=StoredObject(**row.checkpoint) if row.checkpoint else None,
    )


def ready_exists(connection: Connection) -> bool:
    """Whether any job could be claimed now."""
    query = "SELECT EXISTS (SELECT FROM queue WHERE state = 'ready' AND (not_before IS NULL OR not_before <= now()))"
    return bool(connection.execute(text(query)).scalar())


def finish(connection: Connection, claim: Claim, generation: GenerationRecord, entry: EntryRecord | None = None) -> int:
    """Publish a result: trace, cache entry and outcome become visible together. Returns how many jobs it freed.

    Raises ClaimLost if the claim was taken back; nothing is written then. Calling it again after a commit whose answer
    was lost is harmless.
    """
    linked = claim.role is Role.source and generation.cache_result is CacheResult.exact
    if linked:
        _lock_fallbacks(connection, claim.job_id)
    if not _take_out(connection, claim):
        if _already_finished(connection, claim):
            return 0
        raise ClaimLost(f"job {claim.job_id}: attempt {claim.attempt} is not this worker's any more")
    _end_attempt(connection, claim, "done")
    _insert_generation(connection, claim, generation)
    if entry is not None:
        _insert_entry(connection, claim, entry)
    _end_job(connection, claim.job_id, Outcome.done)
    freed = 0
    if linked and not _has_entry(connection, claim):
        # Its video is there, but nothing that a follower could start from.
        freed = _redirect_followers(connection, claim.job_id)
    return freed + _free_dependants(connection, claim.job_id)


def fail(
    connection: Connection, claim: Claim, code: str, message: str, *, retry: bool, max_failures: int, delay: float = 1.0
) -> bool:
    """Record an error. Back to the queue after a delay that doubles (seconds) if `retry` and tries are left.

    Returns whether the job will be tried again, from its beginning: what was computed so far may be what failed. When
    it won't, its followers turn to their fallback.
    """
    again = retry and claim.failures + 1 < max_failures
    if again:
        changed = _try_again(connection, claim, delay)
    else:
        _lock_fallbacks(connection, claim.job_id)
        changed = _take_out(connection, claim)
    if not changed:
        raise ClaimLost(f"job {claim.job_id}: attempt {claim.attempt} is not this worker's any more")
    _end_attempt(connection, claim, "failed", code, message)
    if not again:
        _end_job(connection, claim.job_id, Outcome.failed, code, message)
        _without_source(connection, claim.job_id)
    return again


def release(connection: Connection, claim: Claim, checkpoint: StoredObject | None = None) -> None:
    """Give a job back unfinished (the worker was told to stop). Costs none of its tries.

    The next claim gets `checkpoint` to go on from; without one it gets the checkpoint that this claim had, if any.
    """
    update = f"""
        UPDATE queue SET state = {READY_AGAIN}, worker_id = NULL,
            checkpoint = coalesce(CAST(:checkpoint AS jsonb), checkpoint)
        WHERE job_id = :job AND attempt = :attempt AND worker_id = :worker
    """
    stored = None if checkpoint is None else json.dumps(asdict(checkpoint))
    if connection.execute(text(update), {**_fence(claim), "checkpoint": stored}).rowcount == 1:
        _end_attempt(connection, claim, "released")


def defer(connection: Connection, claim: Claim) -> bool:
    """Give back a follower whose source turned out to be nowhere, to wait for its fallback; costs none of its tries.

    False, and nothing is changed, if the fallback isn't to come any more, or was waited for already.
    """
    # A fallback that ends at this moment ends either before (then it isn't found) or after (then it frees this job).
    update = """
        WITH fallback AS MATERIALIZED (
            SELECT f.job_id FROM jobs j JOIN queue f ON f.job_id = j.fallback_job_id
            WHERE j.id = :job FOR SHARE OF f
        )
        UPDATE queue SET state = 'waiting', worker_id = NULL, source_job_id = fallback.job_id
        FROM fallback
        WHERE queue.job_id = :job AND queue.attempt = :attempt AND queue.worker_id = :worker
            AND queue.source_job_id IS DISTINCT FROM fallback.job_id
    """
    if claim.fallback_job_id is None or connection.execute(text(update), _fence(claim)).rowcount == 0:
        return False
    _end_attempt(connection, claim, "released")
    return True


def give_up(connection: Connection, job_id: int, outcome: Outcome, code: str | None, message: str | None) -> None:
    """End a job that nobody runs: quarantined by the reaper. Its followers turn to their fallback."""
    _lock_fallbacks(connection, job_id)
    connection.execute(text("DELETE FROM queue WHERE job_id = :job"), {"job": job_id})
    _end_job(connection, job_id, outcome, code, message)
    _without_source(connection, job_id)


def _fence(claim: Claim) -> dict[str, Any]:
    return {"job": claim.job_id, "attempt": claim.attempt, "worker": claim.worker_id}


def _try_again(connection: Connection, claim: Claim, delay: float) -> bool:
    update = f"""
        UPDATE queue SET state = {READY_AGAIN}, worker_id = NULL, failures = failures + 1, checkpoint = NULL,
            not_before = now() + make_interval(secs => :delay)
        WHERE job_id = :job AND attempt = :attempt AND worker_id = :worker
    """
    seconds = delay * 2**claim.failures
    return connection.execute(text(update), {**_fence(claim), "delay": seconds}).rowcount == 1


def _take_out(connection: Connection, claim: Claim) -> bool:
    delete = "DELETE FROM queue WHERE job_id = :job AND attempt = :attempt AND worker_id = :worker"
    return connection.execute(text(delete), _fence(claim)).rowcount == 1


def _already_finished(connection: Connection, claim: Claim) -> bool:
    query = "SELECT EXISTS (SELECT FROM generations WHERE job_id = :job AND attempt = :attempt)"
    return bool(connection.execute(text(query), _fence(claim)).scalar())


def _end_attempt(
    connection: Connection, claim: Claim, result: str, code: str | None = None, message: str | None = None
) -> None:
    update = """
        UPDATE attempts SET result = CAST(:result AS attempt_result), ended_at = clock_timestamp(),
            error_code = :code, error_message = :message
        WHERE job_id = :job AND attempt = :attempt AND result IS NULL
    """
    connection.execute(text(update), {**_fence(claim), "result": result, "code": code, "message": message})


def _end_job(
    connection: Connection, job_id: int, outcome: Outcome, code: str | None = None, message: str | None = None
) -> None:
    update = """
        UPDATE jobs SET outcome = CAST(:outcome AS outcome), finished_at = clock_timestamp(),
            error_code = :code, error_message = :message
        WHERE id = :job
    """
    connection.execute(text(update), {"job": job_id, "outcome": outcome.value, "code": code, "message": message})


# Whom a job holds up, and what the plan has for them: for the rare end that leaves no latents.
_DEPENDANTS = "queue q JOIN jobs j ON j.id = q.job_id WHERE q.source_job_id = :job AND q.state = 'waiting'"


def _free_dependants(connection: Connection, job_id: int) -> int:
    update = f"""
        UPDATE queue SET state = {READY_AGAIN}, ready_since = now() WHERE source_job_id = :job AND state = 'waiting'
    """
    return connection.execute(text(update), {"job": job_id}).rowcount


def _lock_fallbacks(connection: Connection, job_id: int) -> None:
    """Before a job ends without latents: hold its row and those of the jobs that its followers are to turn to.

    A fallback that ends at this moment does so either before this, and is seen to have ended, or afterwards, and then
    sees those that wait for it. Before anything else, and in order: so two that are each other's fallback don't wait
    for each other.
    """
    query = f"""
        SELECT FROM queue WHERE job_id = :job OR job_id IN (SELECT j.fallback_job_id FROM {_DEPENDANTS})
        ORDER BY job_id FOR UPDATE
    """
    connection.execute(text(query), {"job": job_id})


def _without_source(connection: Connection, job_id: int) -> None:
    """What becomes of those who waited for a job that left nothing."""
    _redirect(connection, job_id)
    _promote(connection, job_id)
    _free_dependants(connection, job_id)


def _redirect_followers(connection: Connection, job_id: int) -> int:
    """The same for a job that left its result, but no latents: who wants the result only is none the worse."""
    duplicates = f"""
        UPDATE queue SET state = {READY_AGAIN}, ready_since = now()
        WHERE job_id IN (SELECT q.job_id FROM {_DEPENDANTS} AND j.role = 'duplicate')
    """
    freed = connection.execute(text(duplicates), {"job": job_id}).rowcount
    freed += _redirect(connection, job_id)
    _promote(connection, job_id)
    return freed


def _redirect(connection: Connection, job_id: int) -> int:
    """Those whose fallback is done or to come turn to it; returns how many of them are ready."""
    to_come = f"""
        UPDATE queue SET source_job_id = turned.fallback_job_id
        FROM (SELECT q.job_id, j.fallback_job_id FROM {_DEPENDANTS}) turned, queue fallback
        WHERE queue.job_id = turned.job_id AND fallback.job_id = turned.fallback_job_id
            AND turned.fallback_job_id <> :job
    """
    done = f"""
        UPDATE queue SET state = {READY_AGAIN}, ready_since = now(), source_job_id = turned.fallback_job_id
        FROM (SELECT q.job_id, j.fallback_job_id FROM {_DEPENDANTS}) turned, jobs fallback
        WHERE queue.job_id = turned.job_id AND fallback.id = turned.fallback_job_id AND fallback.outcome = 'done'
            AND turned.fallback_job_id <> :job
    """
    connection.execute(text(to_come), {"job": job_id})
    return connection.execute(text(done), {"job": job_id}).rowcount


def _promote(connection: Connection, job_id: int) -> None:
    """Of the rest the one most like the source goes first, and the others wait for it: not all in full at once.

    Only where the plan had them follow the job: if the one that went first fails in its turn, nobody waits once more.
    """
    update = f"""
        WITH orphans AS MATERIALIZED (
            SELECT q.job_id, j.similarity, q.position FROM {_DEPENDANTS} AND j.source_job_id = :job
        ), heir AS (SELECT job_id FROM orphans ORDER BY similarity DESC NULLS LAST, position LIMIT 1)
        UPDATE queue SET source_job_id = heir.job_id FROM orphans, heir
        WHERE queue.job_id = orphans.job_id AND orphans.job_id <> heir.job_id
    """
    connection.execute(text(update), {"job": job_id})


def _has_entry(connection: Connection, claim: Claim) -> bool:
    query = """
        SELECT EXISTS (SELECT FROM cache_entries
            WHERE domain_id = :domain AND prompt_key = :prompt_key AND seed = :seed AND evicted_at IS NULL)
    """
    values = {"domain": claim.domain.id, "prompt_key": claim.prompt_key, "seed": claim.seed}
    return bool(connection.execute(text(query), values).scalar())


def _insert_generation(connection: Connection, claim: Claim, record: GenerationRecord) -> None:
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name not in ("video", "latents")}
    documents = [name for name in _DOCUMENTS if values[name] is not None]
    values |= {name: json.dumps(_plain(values[name])) for name in documents}
    values |= {"cache_result": record.cache_result.value, "job_id": claim.job_id, "attempt": claim.attempt}
    values |= _object_columns("video", record.video) | _object_columns("latents", record.latents)
    casts = {"cache_result": "cache_result", **dict.fromkeys(_DOCUMENTS, "jsonb")}
    placeholders = [f"CAST(:{n} AS {casts[n]})" if n in casts else f":{n}" for n in values]
    insert = f"INSERT INTO generations ({', '.join(values)}) VALUES ({', '.join(placeholders)})"
    connection.execute(text(insert), values)


def _insert_entry(connection: Connection, claim: Claim, entry: EntryRecord) -> None:
    # The same request finished elsewhere first: one entry is enough, the newer object is left to the sweeper.
    insert = """
        INSERT INTO cache_entries
            (domain_id, space_id, job_id, prompt, prompt_key, seed, embedding, steps, object_key, sha256, size)
        SELECT :domain, :space, :job, :prompt, :prompt_key, :seed, e.embedding, :steps, :key, :sha256, :size
        FROM embeddings e WHERE e.space_id = :space AND e.prompt_key = :prompt_key
        ON CONFLICT (domain_id, prompt_key, seed) WHERE evicted_at IS NULL DO NOTHING
    """
    values = {
        "domain": claim.domain.id,
        "space": claim.domain.space_id,
        "job": claim.job_id,
        "prompt": claim.prompt,
        "prompt_key": claim.prompt_key,
        "seed": claim.seed,
        "steps": list(entry.steps),
        "key": entry.object.key,
        "sha256": entry.object.sha256,
        "size": entry.object.size,
    }
    connection.execute(text(insert), values)


def _object_columns(kind: str, stored: StoredObject) -> dict[str, Any]:
    return {f"{kind}_key": stored.key, f"{kind}_sha256": stored.sha256, f"{kind}_bytes": stored.size}


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else list(value)


def upcoming_prompts(connection: Connection, claim: Claim, limit: int) -> list[str]:
    """Prompts of the claim's batch and model that are still to be run, each once, the next ones first."""
    query = """
        SELECT j.prompt FROM queue q JOIN jobs j ON j.id = q.job_id JOIN domains d ON d.id = j.domain_id
        WHERE q.batch_id = :batch AND q.state IN ('ready', 'waiting') AND d.fingerprint = :fingerprint
            AND j.role <> 'duplicate'
        GROUP BY j.prompt ORDER BY max(q.priority) DESC, min(q.position) LIMIT :limit
    """
    values = {"batch": claim.batch_id, "fingerprint": claim.domain.fingerprint, "limit": limit}
    return list(connection.execute(text(query), values).scalars())


def planned_pairs(connection: Connection, claim: Claim, count: int) -> list[tuple[str, str]]:
    """Prompts (source, follower) of the next followers that stand behind the claim in its batch's plan and domain."""
    query = """
        SELECT coalesce(s.prompt, e.prompt), j.prompt FROM queue q JOIN jobs j ON j.id = q.job_id
            LEFT JOIN jobs s ON s.id = j.source_job_id LEFT JOIN cache_entries e ON e.id = j.source_entry_id
        WHERE q.batch_id = :batch AND q.state IN ('waiting', 'ready') AND j.domain_id = :domain AND j.role = 'follower'
            AND q.position > (SELECT position FROM queue WHERE job_id = :job)
            AND coalesce(s.prompt, e.prompt) IS NOT NULL
        ORDER BY q.position LIMIT :count
    """
    values = {"batch": claim.batch_id, "domain": claim.domain.id, "job": claim.job_id, "count": count}
    return [(source, target) for source, target in connection.execute(text(query), values)]


def finished_request(connection: Connection, claim: Claim) -> Row[Any] | None:
    """The generation of the same request (domain, prompt, seed, frame rate) finished before, or None."""
    query = """
        SELECT j.id AS job_id, g.* FROM jobs j JOIN generations g ON g.job_id = j.id
        WHERE j.domain_id = :domain AND j.prompt_key = :prompt_key AND j.seed = :seed AND j.fps = :fps
            AND j.outcome = 'done' AND j.id <> :job
        ORDER BY j.finished_at LIMIT 1
    """
    values = {
        "domain": claim.domain.id,
        "prompt_key": claim.prompt_key,
        "seed": claim.seed,
        "fps": claim.fps,
        "job": claim.job_id,
    }
    return connection.execute(text(query), values).one_or_none()
