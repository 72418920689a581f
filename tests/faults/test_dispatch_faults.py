"""A plan that doesn't hold at run time: sources that fail or leave nothing, entries that are gone, better ones that came."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chorus_batch.jobs import queue
from chorus_batch.jobs.database import transaction
from tests.faults.bench import PROMPTS, Bench, Worker

Hire = Callable[..., Worker]

RED, BLUE = PROMPTS[:2]
GREEN = "a green circle moves right over a black background"
BETTER = "a blue circle moves right over a black backdrop"  # nearer to BLUE than RED and GREEN are


def evict(bench: Bench) -> None:
    bench.sql("UPDATE cache_entries SET evicted_at = now(), evicted_reason = 'deleted' WHERE evicted_at IS NULL")


def make_source(bench: Bench, job: int) -> None:
    """Plan a job as a source, whatever the planner made of it."""
    bench.sql(
        "UPDATE jobs SET role = 'source', source_entry_id = NULL, source_job_id = NULL, similarity = NULL,"
        " fallback_job_id = NULL WHERE id = :job",
        job=job,
    )
    bench.sql("UPDATE queue SET state = 'ready', source_job_id = NULL WHERE job_id = :job", job=job)


def entry_of(bench: Bench, job: int) -> int:
    (entry,) = bench.sql("SELECT id FROM cache_entries WHERE job_id = :job", job=job)
    return int(entry.id)


@pytest.mark.parametrize("gone", ["from the database", "from the store"])
def test_a_planned_entry_that_is_gone_leaves_its_follower_to_the_fallback(gone: str, bench: Bench, hire: Hire) -> None:
    bench.submit([RED])
    hire().work()
    (entry,) = bench.sql("SELECT id, object_key FROM cache_entries")
    batch = bench.submit([BLUE, GREEN])
    follower, second = bench.jobs(batch)
    assert follower.role == "follower"
    make_source(bench, second.id)
    planned = "UPDATE jobs SET fallback_job_id = :fallback, similarity = 0.999 WHERE id = :job"
    bench.sql(planned, job=follower.id, fallback=second.id)
    bench.sql("UPDATE queue SET priority = 1 WHERE job_id = :job", job=follower.id)  # it is tried first
    if gone == "from the database":
        evict(bench)
    else:
        bench.store.remove([entry.object_key])
    hire().work()  # and holds nothing of what was made before
    follower, second = bench.jobs(batch)
    assert (second.cache_result, follower.cache_result) == ("miss", "semantic")
    assert follower.entry_id == entry_of(bench, second.id)
    assert bench.attempts(follower.id) == ["released", "done"]
    assert follower.notes == [f"entry {follower.entry_id} replaces the planned entry {entry.id}"]
    bench.check_done(batch)


def test_a_planned_entry_that_is_gone_without_a_fallback_costs_a_full_run(bench: Bench, hire: Hire) -> None:
    bench.submit([RED])
    hire().work()
    batch = bench.submit([BLUE])
    (follower,) = bench.jobs(batch)
    assert follower.role == "follower"
    evict(bench)
    hire().work()
    (follower,) = bench.jobs(batch)
    assert (follower.cache_result, bench.attempts(follower.id)) == ("miss", ["done"])
    assert follower.notes == ["no entry of the domain is similar enough: computed in full"]
    bench.check_done(batch)


def test_a_lost_entry_is_replaced_by_the_next_best(bench: Bench, hire: Hire) -> None:
    """One object is gone: another entry that is similar enough is as good as before."""
    first = bench.submit([RED])
    hire().work()
    second = bench.submit([BETTER])
    make_source(bench, bench.jobs(second)[0].id)
    hire().work()
    red, better = entry_of(bench, bench.jobs(first)[0].id), entry_of(bench, bench.jobs(second)[0].id)
    batch = bench.submit([BLUE])
    (row,) = bench.sql("SELECT source_entry_id FROM jobs WHERE batch_id = :batch", batch=batch)
    assert row.source_entry_id == better
    (stored,) = bench.sql("SELECT object_key FROM cache_entries WHERE id = :id", id=better)
    bench.store.remove([stored.object_key])
    hire().work()
    (follower,) = bench.jobs(batch)
    assert (follower.cache_result, follower.entry_id) == ("semantic", red)
    assert follower.notes == [
        f"entry {better} was evicted (object_missing)",
        f"entry {red} replaces the planned entry {better}",
    ]


def test_a_nearer_entry_that_came_since_is_taken_and_said_so(bench: Bench, hire: Hire) -> None:
    batch = bench.submit([RED, BLUE])
    source = next(job for job in bench.jobs(batch) if job.role == "source")
    follower = next(job for job in bench.jobs(batch) if job.role == "follower")
    later = bench.submit([BETTER])  # planned while nothing was cached
    bench.sql("UPDATE queue SET priority = 1 WHERE batch_id = :batch", batch=later)
    hire().work()
    (better,) = bench.jobs(later)
    follower = next(job for job in bench.jobs(batch) if job.id == follower.id)
    if follower.id == source.id + 1:  # BLUE follows RED, and not the other way round
        assert follower.entry_id == entry_of(bench, better.id)
        assert follower.notes == [f"job {better.id} is nearer than the planned source, job {source.id}"]
    bench.check_done(batch)


def test_followers_of_a_source_that_fails_start_from_its_fallback(bench: Bench, hire: Hire) -> None:
    batch = bench.submit([RED, BLUE, GREEN])
    jobs = bench.jobs(batch)
    source = next(job for job in jobs if job.role == "source")
    follower, second = (job for job in jobs if job.role == "follower")
    make_source(bench, second.id)
    planned = "UPDATE jobs SET fallback_job_id = :fallback, similarity = 0.999 WHERE id = :job"
    bench.sql(planned, job=follower.id, fallback=second.id)
    worker = hire()
    with transaction(bench.engine) as connection:
        taken = queue.claim(connection, worker.id)
        assert taken is not None and taken.job_id == source.id
        queue.fail(connection, taken, "not_finite", "NaN", retry=False, max_failures=1)
    worker.work()
    states = {job.id: (job.state, job.cache_result) for job in bench.jobs(batch)}
    assert states == {source.id: ("failed", None), follower.id: ("done", "semantic"), second.id: ("done", "miss")}
    follower = next(job for job in bench.jobs(batch) if job.id == follower.id)
    assert follower.entry_id == entry_of(bench, second.id)
    assert follower.notes == [f"job {second.id} replaces the planned source, job {source.id}"]


def test_followers_of_a_linked_source_without_latents_start_from_its_fallback(bench: Bench, hire: Hire) -> None:
    """Its video was there already, its latents are not: the followers aren't computed in full for that."""
    bench.submit([RED])
    hire().work()
    evict(bench)
    batch = bench.submit([RED, BLUE, GREEN])
    source, follower, second = bench.jobs(batch)
    make_source(bench, source.id)
    make_source(bench, second.id)
    bench.sql(
        "UPDATE jobs SET role = 'follower', source_job_id = :source, source_entry_id = NULL, similarity = 0.9,"
        " fallback_job_id = :fallback WHERE id = :job",
        job=follower.id,
        source=source.id,
        fallback=second.id,
    )
    waits = "UPDATE queue SET state = 'waiting', source_job_id = :source WHERE job_id = :job"
    bench.sql(waits, job=follower.id, source=source.id)
    bench.sql("UPDATE queue SET priority = 1 WHERE job_id = :job", job=source.id)
    hire().work()
    source, follower, second = bench.jobs(batch)
    assert (source.cache_result, follower.cache_result, second.cache_result) == ("exact", "semantic", "miss")
    assert follower.entry_id == entry_of(bench, second.id)
    assert bench.attempts(follower.id) == ["done"]
    bench.check_done(batch)
