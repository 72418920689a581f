"""The queue's promises, against a real Postgres."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
from sqlalchemy import Connection, Engine, text

from chorus_batch.jobs import cache, control, leases, queue, statistics
from chorus_batch.jobs.claims import Claim
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import ClaimLost, Conflict
from chorus_batch.jobs.models import CacheResult
from chorus_batch.jobs.simulation import PlannedJob, simulate
from chorus_batch.jobs.storage import StoredObject

from .conftest import DIMENSION, Part, Writer, left, made


def claim(database: Engine, worker: str, held: tuple[int, ...] = ()) -> Claim | None:
    with transaction(database) as connection:
        return queue.claim(connection, worker, held)


def finish(database: Engine, taken: Claim, **changes: object) -> int:
    with transaction(database) as connection:
        return queue.finish(connection, taken, made(taken, **changes), left(taken))


def test_claims_in_order_of_priority_then_batch_then_position(writer: Writer, database: Engine) -> None:
    first = writer.batch([Part(), Part(), Part(priority=5)], "first")
    second = writer.batch([Part(priority=9), Part()], "second")
    worker = writer.worker("w")
    order = [taken.job_id for _ in range(5) if (taken := claim(database, worker))]
    assert order == [second[0], first[2], first[0], first[1], second[1]]
    assert claim(database, worker) is None


@pytest.mark.parametrize("fair_share", [0.0, 1.0])
def test_jobs_of_an_unfit_model_are_left_to_others(writer: Writer, database: Engine, fair_share: float) -> None:
    theirs = writer.batch([Part(priority=9, domain="other"), Part(domain="other")], "theirs")
    mine = writer.batch([Part(), Part(priority=-1)], "mine")
    with transaction(database) as connection:
        connection.execute(text("UPDATE domains SET model = 'wan14' WHERE key = 'other'"))

    def taken(*unfit: str) -> list[int]:
        with transaction(database) as connection:
            claims = [queue.claim(connection, worker, fair_share=fair_share, unfit=unfit) for _ in range(3)]
        return [each.job_id for each in claims if each is not None]

    worker = writer.worker("w")
    assert taken("wan1", "wan14") == mine
    assert [writer.state(job) for job in theirs] == ["ready"] * 2
    assert taken("wan1") == theirs


def test_followers_wait_and_are_freed_by_their_source(writer: Writer, database: Engine) -> None:
    source, follower, other = writer.batch([Part(), Part(source=0), Part()])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None and taken.job_id == source
    assert writer.state(follower) == "waiting"
    assert finish(database, taken) == 1
    assert writer.state(follower) == "ready"
    # The follower comes first in the plan's order, and is preferred for its source in memory.
    next_one = claim(database, worker, held=(source,))
    assert next_one is not None and next_one.job_id == follower
    assert writer.state(other) == "ready"


def test_the_pairs_that_a_batch_needs_next(writer: Writer, database: Engine) -> None:
    def row(prompt: str, source: int | None = None, domain: str = "a") -> Part:
        return Part(source, prompt=prompt, domain=domain)

    rows = [
        row("s"), row("t"), row("f", 0), row("g", 1), row("o", domain="b"), row("p", 4, "b"), row("h", 0),
        row("i", 0), row("j", 1),
    ]  # fmt: skip
    writer.batch([row("x"), row("y", 0)], "of another batch")
    source, *_, last = writer.batch(rows)
    with transaction(database) as connection:
        # Planned from an entry of the cache, made by another batch.
        space = cache.register_space(connection, "test", DIMENSION)
        entry = connection.execute(
            text(
                "INSERT INTO cache_entries (domain_id, space_id, job_id, prompt, prompt_key, seed, embedding, steps,"
                " object_key, sha256, size) SELECT domain_id, :space, id, 'e', 'e', 0, '[1,0,0,0]', '{1}', 'k', 's', 1"
                " FROM jobs WHERE id = :job RETURNING id"
            ),
            {"space": space, "job": source},
        ).scalar_one()
        update = "UPDATE jobs SET source_job_id = NULL, source_entry_id = :entry WHERE id = :job"
        connection.execute(text(update), {"entry": entry, "job": last})
    worker = writer.worker("w")
    taken = [found for _ in range(3) if (found := claim(database, worker))]
    assert [found.prompt for found in taken] == ["x", "s", "t"]
    for found in taken[1:]:
        finish(database, found)
    follower = claim(database, worker)
    assert follower is not None and follower.prompt == "f"
    with transaction(database) as connection:
        pairs = queue.planned_pairs(connection, follower, 10)
        assert pairs == [("t", "g"), ("s", "h"), ("s", "i"), ("e", "j")]
        assert queue.planned_pairs(connection, follower, 2) == pairs[:2]


def test_a_held_source_wins_over_another_within_a_priority_and_only_there(writer: Writer, database: Engine) -> None:
    parts = [Part(priority=1), Part(priority=1), Part(source=1), Part(source=0), Part(), Part(source=0, priority=1)]
    source, other, early, follower, single, urgent = writer.batch(parts)
    worker = writer.worker("w")
    for expected in (source, other):
        taken = claim(database, worker)
        assert taken is not None and taken.job_id == expected
        finish(database, taken)
    # First by priority; then the held source's follower, though `early` stands before it; `single` stands behind both.
    order = [taken.job_id for held in ((other,), (source,), (), ()) if (taken := claim(database, worker, held=held))]
    assert order == [urgent, follower, early, single]


def test_what_waits_for_nobody_keeps_its_place_before_what_is_held(writer: Writer, database: Engine) -> None:
    """The plan starts sources ahead of their turn, so that there is something to follow when the workers need it."""
    source, ahead, follower = writer.batch([Part(), Part(), Part(source=0)])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None and taken.job_id == source
    finish(database, taken)
    order = [taken.job_id for _ in range(2) if (taken := claim(database, worker, held=(source,)))]
    assert order == [ahead, follower]


def test_a_failed_source_frees_its_followers(writer: Writer, database: Engine) -> None:
    _, follower = writer.batch([Part(), Part(source=0)])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    with transaction(database) as connection:
        again = queue.fail(connection, taken, "not_finite", "NaN", retry=False, max_failures=3)
    assert not again
    assert writer.state(taken.job_id) == "failed"
    assert writer.state(follower) == "ready"


# --- a source that comes to nothing


def falls_back(database: Engine, *pairs: tuple[int, int]) -> None:
    """Give jobs their second-best sources: (follower, fallback)."""
    with transaction(database) as connection:
        for follower, fallback in pairs:
            connection.execute(
                text("UPDATE jobs SET fallback_job_id = :fallback WHERE id = :job"),
                {"job": follower, "fallback": fallback},
            )


def fails(database: Engine, taken: Claim) -> None:
    with transaction(database) as connection:
        queue.fail(connection, taken, "not_finite", "NaN", retry=False, max_failures=3)


def sources_of(database: Engine) -> dict[int, int | None]:
    """What each unfinished job waits for, or waited for last."""
    with transaction(database) as connection:
        return {row.job_id: row.source_job_id for row in connection.execute(text("SELECT * FROM queue"))}


def test_followers_of_a_failed_source_wait_for_their_fallback(writer: Writer, database: Engine) -> None:
    source, second, follower, other = writer.batch([Part(), Part(), Part(source=0), Part(source=0)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    taken, fallback = claim(database, worker), claim(database, worker)
    assert taken is not None and fallback is not None and fallback.job_id == second
    fails(database, taken)
    assert (writer.state(follower), writer.state(other)) == ("waiting", "ready")
    assert finish(database, fallback) == 1
    # Whoever holds the fallback is preferred now, and the claim knows whom the plan named.
    again = claim(database, worker, held=(second,))
    assert again is not None and (again.job_id, again.role.value) == (follower, "follower")
    assert (again.source_job_id, again.planned_job_id, again.fallback_job_id) == (second, source, second)


def test_a_fallback_that_is_done_frees_the_followers_of_a_failed_source(writer: Writer, database: Engine) -> None:
    source, second, follower, twin = writer.batch([Part(), Part(priority=1), Part(source=0), Part(source=0)])
    falls_back(database, (follower, second), (twin, second))
    worker = writer.worker("w")
    done = claim(database, worker)
    assert done is not None and done.job_id == second
    finish(database, done)
    taken = claim(database, worker)
    assert taken is not None and taken.job_id == source
    fails(database, taken)
    assert sources_of(database) == {follower: second, twin: second}
    assert (writer.state(follower), writer.state(twin)) == ("ready", "ready")


def test_one_follower_takes_the_place_of_a_source_without_fallback(writer: Writer, database: Engine) -> None:
    """Not all of them are computed in full at once; but that is tried only once."""
    _, *followers = writer.batch([Part(), *(Part(source=0) for _ in range(3))])
    with transaction(database) as connection:
        likest = "UPDATE jobs SET similarity = 0.95 WHERE id = :job"
        connection.execute(text(likest), {"job": followers[1]})
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    fails(database, taken)
    assert [writer.state(job) for job in followers] == ["waiting", "ready", "waiting"]
    heir = claim(database, worker)
    assert heir is not None and heir.job_id == followers[1]
    fails(database, heir)
    assert [writer.state(job) for job in followers] == ["ready", "failed", "ready"]


def test_a_fallback_that_failed_is_none(writer: Writer, database: Engine) -> None:
    _, second, follower = writer.batch([Part(), Part(), Part(source=0)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    first, other = claim(database, worker), claim(database, worker)
    assert first is not None and other is not None
    fails(database, other)
    assert writer.state(follower) == "waiting"
    fails(database, first)
    assert writer.state(follower) == "ready"


def test_a_quarantined_source_hands_its_followers_on(writer: Writer, database: Engine) -> None:
    poison, second, follower = writer.batch([Part(priority=1), Part(), Part(source=0)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None and taken.job_id == poison
    writer.silence(worker, 31)
    with transaction(database) as connection:
        assert leases.reap(connection, lease=30, max_deaths=1) == leases.Reaped(0, 1)
    assert writer.state(follower) == "waiting"
    assert sources_of(database) == {second: None, follower: second}


def test_nobody_waits_for_a_paused_batchs_fallback_but_with_it(writer: Writer, database: Engine) -> None:
    _, second, follower = writer.batch([Part(), Part(), Part(source=0)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    control.pause(database, taken.batch_id)
    fails(database, taken)
    assert (writer.state(second), writer.state(follower)) == ("paused", "waiting")
    control.resume(database, taken.batch_id)
    fallback = claim(database, worker)
    assert fallback is not None and fallback.job_id == second
    finish(database, fallback)
    assert writer.state(follower) == "ready"


@pytest.mark.parametrize("first", ["the source", "the fallback"])
def test_a_fallback_that_ends_while_the_source_fails_frees_the_follower(
    writer: Writer, database: Engine, first: str
) -> None:
    """Whichever commits first: a follower that turned to a job that is gone would wait for ever."""
    _, second, follower = writer.batch([Part(), Part(), Part(source=0)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    source, fallback = claim(database, worker), claim(database, worker)
    assert source is not None and fallback is not None

    def end(connection: Connection, which: str) -> None:
        if which == "the source":
            queue.fail(connection, source, "x", "", retry=False, max_failures=1)
        else:
            queue.finish(connection, fallback, made(fallback), left(fallback))

    begun = threading.Event()

    def later() -> None:
        with transaction(database) as connection:
            begun.set()
            end(connection, "the source" if first == "the fallback" else "the fallback")

    thread = threading.Thread(target=later)
    with transaction(database) as connection:
        end(connection, first)
        thread.start()
        assert begun.wait(10)
        thread.join(0.3)
        assert thread.is_alive()  # it waits for the one that began first
    thread.join(10)
    assert not thread.is_alive()
    assert (writer.state(follower), sources_of(database)) == ("ready", {follower: second})


def test_sources_that_are_each_others_fallback_may_fail_at_once(writer: Writer, database: Engine) -> None:
    for turn in range(5):
        jobs = writer.batch([Part(), Part(), Part(source=0), Part(source=1)], f"batch {turn}")
        falls_back(database, (jobs[2], jobs[1]), (jobs[3], jobs[0]))
        workers = [writer.worker(f"w{turn}{n}") for n in range(2)]
        taken = [claim(database, worker) for worker in workers]
        barrier = threading.Barrier(2)
        errors: list[BaseException] = []

        def end(one: Claim | None, barrier: threading.Barrier = barrier, errors: list[BaseException] = errors) -> None:
            assert one is not None
            barrier.wait()
            try:
                fails(database, one)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=end, args=(one,)) for one in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert [writer.state(job) for job in jobs] == ["failed", "failed", "ready", "ready"]
        with transaction(database) as connection:
            connection.execute(text("DELETE FROM queue"))


def linked(database: Engine, taken: Claim, origin: int) -> int:
    """Finish a claim as the same request's result from before; adds no entry."""
    with transaction(database) as connection:
        record = made(taken, cache_result=CacheResult.exact, origin_job_id=origin, steps_computed=0)
        return queue.finish(connection, taken, record)


@pytest.mark.parametrize("evicted", [True, False])
def test_a_source_that_was_linked_serves_its_followers_only_if_its_entry_lives(
    writer: Writer, database: Engine, evicted: bool
) -> None:
    (origin,) = writer.batch([Part(prompt="same")], "before")
    worker = writer.worker("w")
    before = claim(database, worker)
    assert before is not None
    finish(database, before)
    parts = [Part(prompt="same"), Part(), Part(source=0), Part(source=0), Part(source=0, role="duplicate")]
    source, second, follower, twin, duplicate = writer.batch(parts)
    falls_back(database, (follower, second))
    if evicted:
        with transaction(database) as connection:
            connection.execute(text("UPDATE cache_entries SET evicted_at = now(), evicted_reason = 'test'"))
    taken = claim(database, worker)
    assert taken is not None and taken.job_id == source
    assert linked(database, taken, origin) == (2 if evicted else 3)
    states = [writer.state(job) for job in (follower, twin, duplicate)]
    # Who wants the video has it; who wants latents waits for the fallback, or computes them for whoever else has none.
    assert states == (["waiting", "ready", "ready"] if evicted else ["ready"] * 3)


# --- a planned entry that is gone


def test_a_follower_of_a_lost_entry_waits_for_its_fallback_and_that_only_once(writer: Writer, database: Engine) -> None:
    second, follower = writer.batch([Part(), Part(priority=1)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None and taken.job_id == follower
    with transaction(database) as connection:
        assert queue.defer(connection, taken)
        assert not queue.defer(connection, taken)  # it isn't this worker's any more
    assert writer.state(follower) == "waiting"
    with pytest.raises(ClaimLost):
        finish(database, taken)
    fallback = claim(database, worker)
    assert fallback is not None and fallback.job_id == second
    finish(database, fallback)
    again = claim(database, worker)
    assert again is not None and (again.job_id, again.attempt, again.failures) == (follower, 2, 0)
    with transaction(database) as connection:
        assert not queue.defer(connection, again)
    finish(database, again)
    assert writer.state(follower) == "done"


def test_nobody_waits_for_a_fallback_twice(writer: Writer, database: Engine) -> None:
    """It was retried, say: the follower that it sent on its way doesn't come back to it."""
    second, follower = writer.batch([Part(), Part(priority=1)])
    falls_back(database, (follower, second))
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    with transaction(database) as connection:
        assert queue.defer(connection, taken)
    fallback = claim(database, worker)
    assert fallback is not None
    fails(database, fallback)
    assert control.retry(database, fallback.batch_id) == 1
    again = claim(database, worker)
    assert again is not None and again.job_id == follower
    with transaction(database) as connection:
        assert not queue.defer(connection, again)


# --- who has waited for too long


def ready_for(database: Engine, job: int, seconds: float) -> None:
    with transaction(database) as connection:
        since = "UPDATE queue SET ready_since = now() - make_interval(secs => :s) WHERE job_id = :job"
        connection.execute(text(since), {"s": seconds, "job": job})


def test_what_has_waited_too_long_goes_before_what_is_held(writer: Writer, database: Engine) -> None:
    source, _, early, *followers = writer.batch([Part(), Part(), Part(source=1), Part(source=0), Part(source=0)])
    worker = writer.worker("w")
    for _ in range(2):
        taken = claim(database, worker)
        assert taken is not None
        finish(database, taken)
    ready_for(database, early, 61)
    for limit, expected in ((62.0, followers[0]), (60.0, early), (60.0, followers[1])):
        with transaction(database) as connection:
            found = queue.claim(connection, worker, (source,), max_wait=limit)
        assert found is not None and found.job_id == expected


def test_a_follower_is_ready_since_its_source_is_done(writer: Writer, database: Engine) -> None:
    _, follower = writer.batch([Part(), Part(source=0)])
    ready_for(database, follower, 3600)
    taken = claim(database, writer.worker("w"))
    assert taken is not None
    finish(database, taken)
    with transaction(database) as connection:
        waited = connection.execute(text("SELECT extract(epoch FROM now() - ready_since) FROM queue")).scalar_one()
    assert waited < 600


def test_a_low_priority_that_has_waited_too_long_gets_a_share_of_the_claims(writer: Writer, database: Engine) -> None:
    jobs = writer.batch([Part(priority=9), Part(), Part(priority=-1), Part(priority=-1), Part(priority=9)])
    ready_for(database, jobs[2], 61)
    ready_for(database, jobs[3], 59)
    worker = writer.worker("w")
    order = []
    # (share, expected): never; always; but not those who haven't waited for long; then as usual.
    for share in (0.0, 1.0, 1.0, 0.0, 0.0):
        with transaction(database) as connection:
            found = queue.claim(connection, worker, max_wait=60, fair_share=share)
        assert found is not None
        order.append(found.job_id)
    assert order == [jobs[0], jobs[2], jobs[4], jobs[1], jobs[3]]


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_takes_jobs_in_the_order_in_which_the_simulator_has_it(
    seed: int, writer: Writer, database: Engine
) -> None:
    """The forecast of a run rests on the simulator's idea of these rules."""
    rng = random.Random(seed)
    parts: list[Part] = []
    for _ in range(24):
        sources = [n for n, part in enumerate(parts) if part.source is None]
        follows = bool(sources) and rng.random() < 0.7
        parts.append(Part(source=rng.choice(sources) if follows else None, priority=rng.choice((0, 0, 1))))
    jobs = writer.batch(parts)
    planned = [PlannedJob(1.0, row, part.source, priority=part.priority) for row, part in enumerate(parts)]
    run = simulate(planned, 1, held=len(parts))
    worker = writer.worker("w")
    order: list[int] = []
    while (taken := claim(database, worker, tuple(order))) is not None:
        order.append(taken.job_id)
        finish(database, taken)
    assert order == [jobs[row] for row in sorted(range(len(parts)), key=lambda row: run.starts[row])]


def test_a_passing_error_is_tried_again_later_and_not_for_ever(writer: Writer, database: Engine) -> None:
    (job,) = writer.batch([Part()])
    worker = writer.worker("w")
    for tries in range(3):
        taken = claim(database, worker)
        assert taken is not None and taken.attempt == tries + 1 and taken.failures == tries
        with transaction(database) as connection:
            again = queue.fail(connection, taken, "internal", "boom", retry=True, max_failures=3, delay=3600)
        assert again == (tries < 2)
        assert claim(database, worker) is None  # not before its delay is over
        with transaction(database) as connection:
            connection.execute(text("UPDATE queue SET not_before = NULL"))
    assert writer.state(job) == "failed"


def test_a_released_job_costs_no_try(writer: Writer, database: Engine) -> None:
    writer.batch([Part()])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    with transaction(database) as connection:
        queue.release(connection, taken)
    again = claim(database, worker)
    assert again is not None and (again.attempt, again.failures) == (2, 0)


SO_FAR = StoredObject("checkpoint", 12, "f" * 64)


def test_a_job_that_was_stopped_goes_on_from_its_checkpoint(writer: Writer, database: Engine) -> None:
    (job,) = writer.batch([Part()])
    first, second = writer.worker("first"), writer.worker("second")
    taken = claim(database, first)
    assert taken is not None and taken.checkpoint is None
    with transaction(database) as connection:
        queue.release(connection, taken, SO_FAR)
        stored = connection.execute(text("SELECT checkpoint FROM queue")).scalar_one()
    assert stored == {"key": "checkpoint", "size": 12, "sha256": "f" * 64}
    again = claim(database, second)
    assert again is not None and (again.job_id, again.attempt, again.checkpoint) == (job, 2, SO_FAR)
    # Whoever got no further leaves what there was.
    with transaction(database) as connection:
        queue.release(connection, again)
    third = claim(database, first)
    assert third is not None and third.checkpoint == SO_FAR
    # Whoever got further replaces it; a worker whose claim is void replaces nothing.
    further = replace(SO_FAR, key="further")
    with transaction(database) as connection:
        queue.release(connection, third, further)
        queue.release(connection, again, SO_FAR)
    fourth = claim(database, second)
    assert fourth is not None and (fourth.attempt, fourth.checkpoint) == (4, further)
    # It outlives a worker that dies.
    writer.silence(second, 31)
    with transaction(database) as connection:
        leases.reap(connection, lease=30, max_deaths=3)
    fifth = claim(database, first)
    assert fifth is not None and fifth.checkpoint == further
    finish(database, fifth)
    assert writer.state(job) == "done"


def test_a_job_that_failed_starts_again_from_the_beginning(writer: Writer, database: Engine) -> None:
    """What it had computed so far may be what failed."""
    writer.batch([Part()])
    worker = writer.worker("w")
    for checkpoint in (SO_FAR, None):
        taken = claim(database, worker)
        assert taken is not None
        with transaction(database) as connection:
            queue.release(connection, taken, checkpoint)
    taken = claim(database, worker)
    assert taken is not None and taken.checkpoint == SO_FAR
    with transaction(database) as connection:
        assert queue.fail(connection, taken, "internal", "boom", retry=True, max_failures=3, delay=0)
    again = claim(database, worker)
    assert again is not None and (again.failures, again.checkpoint) == (1, None)


def test_a_claim_knows_its_domains_policy(writer: Writer, database: Engine) -> None:
    writer.batch([Part(policy="nirvana"), Part()])
    worker = writer.worker("w")
    taken = [claim(database, worker) for _ in range(2)]
    assert [(one.domain.policy, one.domain.step_cache) for one in taken if one] == [
        ("nirvana", "none"),
        ("chorus", "none"),
    ]
    assert len({one.domain.id for one in taken if one}) == 2


def test_the_trace_of_a_hit_is_stored_and_an_equal_request_finds_its_scores(writer: Writer, database: Engine) -> None:
    writer.batch([Part(prompt="same"), Part(prompt="same"), Part()])
    worker = writer.worker("w")
    hit = claim(database, worker)
    assert hit is not None
    details = {"phrases": ["a red ball", "a blue ball"], "gains": [[1.2, 1.1], [1.0, 1.0]], "regions": "ab"}
    finish(database, hit, kind="attribute", scope="object", details=details, scores={"colour": True, "shape": False})
    equal = claim(database, worker)
    assert equal is not None
    with transaction(database) as connection:
        found = queue.finished_request(connection, equal)
    assert found is not None
    assert (found.kind, found.scope, found.details) == ("attribute", "object", details)
    assert found.scores == {"colour": True, "shape": False}
    finish(database, equal)
    with transaction(database) as connection:
        query = "SELECT kind, scope, details, scores IS NULL AS unscored FROM generations WHERE job_id = :job"
        plain = connection.execute(text(query), {"job": equal.job_id}).one()
    assert tuple(plain) == (None, None, {}, True)


def test_silence_beyond_the_lease_voids_claims_and_the_zombie_is_refused(writer: Writer, database: Engine) -> None:
    (job,) = writer.batch([Part()])
    zombie, heir = writer.worker("zombie"), writer.worker("heir")
    old = claim(database, zombie)
    assert old is not None
    writer.silence(zombie, 31)
    with transaction(database) as connection:
        assert leases.reap(connection, lease=30, max_deaths=3) == leases.Reaped(1, 0)
    new = claim(database, heir)
    assert new is not None and (new.job_id, new.attempt) == (job, 2)
    with pytest.raises(ClaimLost):
        finish(database, old)
    with transaction(database) as connection:
        assert leases.heartbeat(connection, zombie) is None
        assert leases.heartbeat(connection, heir) == {(job, 2)}
    finish(database, new)
    with pytest.raises(ClaimLost):
        finish(database, old)
    with transaction(database) as connection:
        assert connection.execute(text("SELECT attempt FROM generations")).scalar_one() == 2


def test_a_living_worker_keeps_an_old_job(writer: Writer, database: Engine) -> None:
    """Age alone is no sign of death: a long generation is not run twice."""
    writer.batch([Part()])
    worker = writer.worker("w")
    claim(database, worker)
    with transaction(database) as connection:
        connection.execute(text("UPDATE attempts SET started_at = now() - interval '5 hours'"))
        leases.heartbeat(connection, worker)
        assert leases.reap(connection, lease=30, max_deaths=3) == leases.Reaped(0, 0)


def test_a_successor_in_the_same_slot_proves_the_predecessor_dead(writer: Writer, database: Engine) -> None:
    writer.batch([Part()])
    claim(database, writer.worker("old", slot="host:1:cpu"))
    writer.worker("new", slot="host:1:cpu")
    with transaction(database) as connection:
        assert leases.reap(connection, lease=3600, max_deaths=3) == leases.Reaped(1, 0)


def test_a_job_that_kills_workers_is_quarantined_and_frees_its_followers(writer: Writer, database: Engine) -> None:
    poison, follower = writer.batch([Part(), Part(source=0)])
    for death in range(3):
        worker = writer.worker(f"w{death}")
        taken = claim(database, worker)
        assert taken is not None and taken.job_id == poison
        writer.silence(worker, 31)
        with transaction(database) as connection:
            leases.reap(connection, lease=30, max_deaths=3)
    assert writer.state(poison) == "quarantined"
    assert writer.state(follower) == "ready"


def test_finishing_twice_is_harmless(writer: Writer, database: Engine) -> None:
    """The commit's answer may be lost: the second call finds its own work done."""
    writer.batch([Part()])
    taken = claim(database, writer.worker("w"))
    assert taken is not None
    finish(database, taken)
    assert finish(database, taken) == 0


def test_the_same_request_leaves_one_live_entry(writer: Writer, database: Engine) -> None:
    writer.batch([Part(prompt="same"), Part(prompt="same")])
    worker = writer.worker("w")
    for _ in range(2):
        taken = claim(database, worker)
        assert taken is not None
        finish(database, taken)
    with transaction(database) as connection:
        assert connection.execute(text("SELECT count(*) FROM cache_entries")).scalar_one() == 1


def test_racing_workers_never_share_a_job(writer: Writer, database: Engine) -> None:
    jobs = writer.batch([Part() for _ in range(40)])
    taken: list[int] = []

    def run(worker: str) -> None:
        while (got := claim(database, worker)) is not None:
            taken.append(got.job_id)

    threads = [threading.Thread(target=run, args=(writer.worker(f"w{n}"),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(jobs)


def test_cancel_ends_everything_and_running_claims_are_void(writer: Writer, database: Engine) -> None:
    jobs = writer.batch([Part(), Part(source=0), Part()])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    assert control.cancel(database, taken.batch_id) == 3
    assert {writer.state(job) for job in jobs} == {"cancelled"}
    with transaction(database) as connection:
        assert leases.heartbeat(connection, worker) == set()
    with pytest.raises(ClaimLost):
        finish(database, taken)
    with pytest.raises(Conflict):
        control.resume(database, taken.batch_id)


def test_a_paused_batch_stays_parked_whatever_ends(writer: Writer, database: Engine) -> None:
    _, follower, other = writer.batch([Part(), Part(source=0), Part()])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    assert control.pause(database, taken.batch_id) == 1
    finish(database, taken)
    assert claim(database, worker) is None
    assert (writer.state(follower), writer.state(other)) == ("paused", "paused")
    assert control.resume(database, taken.batch_id) == 2
    assert claim(database, worker) is not None


def test_retry_puts_failed_jobs_back_with_their_attempts_counted_on(writer: Writer, database: Engine) -> None:
    (job,) = writer.batch([Part()])
    worker = writer.worker("w")
    taken = claim(database, worker)
    assert taken is not None
    with transaction(database) as connection:
        queue.fail(connection, taken, "out_of_memory", "", retry=False, max_failures=1)
    assert control.retry(database, taken.batch_id, code="another") == 0
    assert control.retry(database, taken.batch_id, code="out_of_memory") == 1
    again = claim(database, worker)
    assert again is not None and (again.job_id, again.attempt) == (job, 2)


def test_counts_sum_to_the_total_at_every_moment(writer: Writer, database: Engine) -> None:
    writer.batch([Part(), Part(source=0), Part(), Part()])
    worker = writer.worker("w")

    def check() -> statistics.Progress:
        with transaction(database) as connection:
            p = statistics.progress(connection, 1)
        assert p.queued + p.running + p.done + p.failed + p.quarantined + p.cancelled == p.total == 4
        return p

    assert check().queued == 4
    first = claim(database, worker)
    assert first is not None
    assert check().running == 1
    finish(database, first)
    second = claim(database, worker)
    assert second is not None
    with transaction(database) as connection:
        queue.fail(connection, second, "internal", "", retry=False, max_failures=1)
    progress = check()
    assert (progress.done, progress.failed, progress.state) == (1, 1, "running")
    while (taken := claim(database, worker)) is not None:
        finish(database, taken)
    progress = check()
    assert progress.is_over and progress.state == "finished"


def test_a_claim_reads_a_few_pages_however_many_jobs_wait(writer: Writer, database: Engine) -> None:
    """The plan of the claim: index scans with a limit, never a scan or sort of the queue."""
    writer.batch([Part() for _ in range(3)])
    worker = writer.worker("w")
    with transaction(database) as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))  # no foreign keys for the filler
        connection.execute(
            text(
                "INSERT INTO queue (job_id, batch_id, source_job_id, priority, position, state)"
                " SELECT 1000 + n, 1, n % 1000, 0, n, 'ready' FROM generate_series(1, 50000) n"
            )
        )
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE queue"))
        explained = connection.execute(
            text(f"EXPLAIN {queue.CLAIM.text}"),
            {"worker": worker, "held": "{7,8}", "max_wait": 60.0, "fair": True},
        ).scalars()
        plan = "\n".join(explained)
    assert "Seq Scan on queue" not in plan
    assert "ix_queue_ready" in plan
    assert "ix_queue_source" in plan


def test_views_agree_with_what_was_recorded(writer: Writer, database: Engine) -> None:
    jobs = writer.batch([Part(), Part(source=0), Part(source=0, role="duplicate")])
    worker = writer.worker("w")
    miss = claim(database, worker)
    assert miss is not None
    finish(database, miss)
    with transaction(database) as connection:
        entry = connection.execute(text("SELECT id FROM cache_entries")).scalar_one()
    follower = claim(database, worker)
    assert follower is not None
    finish(
        database,
        follower,
        cache_result=CacheResult.semantic,
        entry_id=entry,
        similarity=0.9,
        k1=8,
        k2=8,
        steps_computed=12,
    )
    duplicate = claim(database, worker)
    assert duplicate is not None
    finish(database, duplicate, cache_result=CacheResult.exact, origin_job_id=jobs[0], steps_computed=0)
    with transaction(database) as connection:
        by_batch = connection.execute(text("SELECT * FROM cache_hits_by_batch")).mappings().one()
        by_day = connection.execute(text("SELECT * FROM cache_hits_by_day")).mappings().one()
        block = connection.execute(text("SELECT * FROM hit_rate_per_100")).mappings().one()
        savings = connection.execute(text("SELECT * FROM savings_by_entry ORDER BY entry_id")).mappings().first()
        totals = statistics.totals(connection)
    for view in (by_batch, by_day):
        assert (view["finished"], view["hits"], view["semantic_hits"], view["exact_hits"], view["misses"]) == (
            3,
            2,
            1,
            1,
            1,
        )
        assert (view["steps_total"], view["steps_skipped"]) == (60, 28)
        assert view["hit_rate"] == pytest.approx(2 / 3)
        assert view["steps_skipped_share"] == pytest.approx(28 / 60)
        assert view["seconds"] == pytest.approx(4.5)
    assert (block["block"], block["jobs"], block["hits"]) == (0, 3, 2)
    assert savings is not None and (savings["hits"], savings["steps_skipped"]) == (1, 8)
    assert (totals["hits"], totals["steps_skipped"], totals["seconds"]) == (2, 28, pytest.approx(4.5))


def test_wrong_states_are_refused_by_the_schema(writer: Writer, database: Engine) -> None:
    (job,) = writer.batch([Part()])
    for statement in (
        "UPDATE jobs SET outcome = 'done'",  # no finished_at
        "UPDATE jobs SET outcome = 'failed', finished_at = now()",  # no error code
        "UPDATE jobs SET role = 'follower'",  # of nothing
        "UPDATE queue SET state = 'running'",  # by nobody
        "UPDATE queue SET state = 'waiting'",  # for nothing
        f"UPDATE jobs SET source_job_id = {job}, role = 'duplicate'",  # of itself
    ):
        with pytest.raises(Exception, match="violates check constraint"), database.begin() as connection:
            connection.execute(text(statement))


def test_upcoming_prompts_are_the_batchs_own_each_once_the_next_first(database: Engine, writer: Writer) -> None:
    worker = writer.worker("w")
    writer.batch([Part(prompt="another batch's", priority=-1)], name="other")
    writer.batch(
        [
            Part(prompt="claimed", priority=9),
            Part(prompt="last"),
            Part(prompt="same", priority=5),
            Part(source=2, prompt="follower", priority=5),
            Part(prompt="same", seed=1),
        ]
    )
    with transaction(database) as connection:
        claim = queue.claim(connection, worker)
        assert claim is not None and claim.prompt == "claimed"
        assert queue.upcoming_prompts(connection, claim, 10) == ["same", "follower", "last"]
        assert queue.upcoming_prompts(connection, claim, 2) == ["same", "follower"]
        connection.execute(text("UPDATE domains SET fingerprint = repeat('1', 64)"))
        assert queue.upcoming_prompts(connection, claim, 10) == []
