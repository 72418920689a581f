"""Budgets and deadlines on a real Postgres: when a batch stops, what stays, and how it goes on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from chorus_batch.jobs import control, limits, queue, statistics
from chorus_batch.jobs.claims import Claim
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.limits import LimitReached, enforce
from chorus_batch.jobs.progress import exit_code, follow, line
from chorus_batch.jobs.statistics import Progress

from .conftest import Part, Program, Writer, left, made

PAST = datetime.now(UTC) - timedelta(minutes=1)
LATER = datetime.now(UTC) + timedelta(days=1)
SECONDS = 1.5  # of each job that conftest.made ends


class Night:
    """A batch with limits, and one worker."""

    def __init__(self, writer: Writer, parts: list[Part], name: str = "night", **limits: Any) -> None:
        self.writer, self.engine, self.jobs = writer, writer.engine, writer.batch(parts, name)
        self.worker = writer.worker(f"worker of {name}")
        with transaction(self.engine) as connection:
            self.batch = statistics.find_batch(connection, name)
        self.set(**limits)

    def set(self, **values: Any) -> None:
        with transaction(self.engine) as connection:
            for name, value in values.items():
                update = f"UPDATE batches SET {name} = :value WHERE id = :batch"
                connection.execute(text(update), {"value": value, "batch": self.batch})

    def claim(self) -> Claim | None:
        with transaction(self.engine) as connection:
            return queue.claim(connection, self.worker)

    def finish(self, claim: Claim | None) -> None:
        assert claim is not None
        with transaction(self.engine) as connection:
            queue.finish(connection, claim, made(claim, seconds_total=SECONDS), left(claim))

    def enforce(self) -> dict[int, limits.Stop]:
        with transaction(self.engine) as connection:
            return enforce(connection)

    def recheck(self) -> dict[int, limits.Stop]:
        """As `enforce`, whenever the budget was looked at last."""
        self.set(checked_until=None)
        return self.enforce()

    @property
    def progress(self) -> Progress:
        with transaction(self.engine) as connection:
            return statistics.progress(connection, self.batch)


def test_a_budget_stops_a_batch_and_keeps_what_is_done(writer: Writer) -> None:
    night = Night(writer, [Part() for _ in range(6)], max_seconds=2.5 * SECONDS)
    for _ in range(2):
        night.finish(night.claim())
        assert night.recheck() == {}
    night.finish(night.claim())
    assert night.recheck() == {night.batch: "budget"}
    assert night.claim() is None
    found = night.progress
    assert (found.state, found.done, found.queued, found.running) == ("budget reached", 3, 3, 0)
    assert found.is_over and exit_code(found) == 8
    assert line(found).endswith("| 0.00125 of 0.00104 GPU h")
    assert night.recheck() == {}  # once is enough


def test_a_raised_budget_goes_on(writer: Writer) -> None:
    night = Night(writer, [Part() for _ in range(3)], max_seconds=SECONDS)
    night.finish(night.claim())
    night.recheck()
    with pytest.raises(LimitReached, match=r"0\.0004167 of 0\.0004167 GPU hours") as caught:
        control.resume(night.engine, night.batch)
    assert caught.value.exit_code == 8 and "--max-gpu-hours" in caught.value.hint
    with pytest.raises(LimitReached):
        control.resume(night.engine, night.batch, {"max_seconds": SECONDS / 2})
    assert night.progress.max_seconds == SECONDS and night.claim() is None  # nothing was changed
    assert control.resume(night.engine, night.batch, {"max_seconds": 2 * SECONDS}) == 2
    night.finish(night.claim())
    assert night.recheck() == {night.batch: "budget"}
    assert control.resume(night.engine, night.batch, {"max_seconds": None}) == 1
    night.finish(night.claim())
    assert night.recheck() == {}
    assert (night.progress.state, exit_code(night.progress)) == ("finished", 0)


def test_running_jobs_count_and_are_finished_and_free_nobody(writer: Writer) -> None:
    night = Night(writer, [Part(), Part(source=0), Part(), Part()], max_seconds=600.0)
    running = night.claim()
    assert running is not None and running.job_id == night.jobs[0]
    assert night.recheck() == {}
    with transaction(night.engine) as connection:
        connection.execute(text("UPDATE attempts SET started_at = started_at - interval '11 minutes'"))
    assert night.progress.seconds_running == pytest.approx(660, abs=60)
    assert night.recheck() == {night.batch: "budget"}
    assert not night.progress.is_over  # a job runs
    night.finish(running)
    assert [writer.state(job) for job in night.jobs] == ["done", "paused", "paused", "paused"]
    assert night.claim() is None and night.progress.is_over and exit_code(night.progress) == 8
    # Its long attempt is over: what counts is what its trace says.
    assert control.resume(night.engine, night.batch) == 3


def test_a_job_that_comes_back_is_parked(writer: Writer) -> None:
    night = Night(writer, [Part(), Part()], max_seconds=0.0)
    running = night.claim()
    assert running is not None
    night.recheck()
    with transaction(night.engine) as connection:
        assert queue.fail(connection, running, "passing", "m", retry=True, max_failures=3, delay=0)
    assert writer.state(running.job_id) == "paused" and night.claim() is None


def test_the_last_jobs_are_left_to_end(writer: Writer) -> None:
    night = Night(writer, [Part()], max_seconds=0.0)
    running = night.claim()
    assert night.recheck() == {}
    night.finish(running)
    assert night.recheck() == {} and exit_code(night.progress) == 0


def test_a_deadline(writer: Writer) -> None:
    night = Night(writer, [Part(), Part()], deadline=LATER)
    assert night.enforce() == {} and "| until " in line(night.progress)
    night.finish(night.claim())
    night.set(deadline=PAST)
    assert night.enforce() == {night.batch: "deadline"}
    assert night.claim() is None
    assert (night.progress.state, exit_code(night.progress)) == ("past deadline", 7)
    with pytest.raises(LimitReached, match="is past") as caught:
        control.resume(night.engine, night.batch)
    assert (caught.value.exit_code, caught.value.code) == (7, "past_deadline")
    assert control.resume(night.engine, night.batch, {"deadline": None}) == 1
    night.finish(night.claim())
    assert exit_code(night.progress) == 0


def test_whoever_waits_sees_the_deadline_pass_though_no_worker_lives(writer: Writer) -> None:
    night = Night(writer, [Part()], deadline=PAST)
    assert follow(night.engine, night.batch, timeout=20).state == "past deadline"


def test_other_batches_go_on(writer: Writer) -> None:
    night = Night(writer, [Part() for _ in range(3)], max_seconds=0.0)
    writer.batch([Part()], "other")
    assert night.enforce() == {night.batch: "budget"}
    claim = night.claim()
    assert claim is not None and claim.batch_id != night.batch


def test_a_budget_isnt_summed_up_before_it_can_be_spent(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Night(writer, [Part(), Part()], max_seconds=1e6)
    asked: list[int] = []
    real = limits.spent
    monkeypatch.setattr(limits, "spent", lambda *a: asked.append(a[1]) or real(*a))
    for _ in range(3):
        assert night.enforce() == {}
    assert asked == [night.batch]
    with transaction(night.engine) as connection:
        query = "SELECT extract(epoch FROM checked_until - now())::float8 FROM batches WHERE id = :batch"
        pause = connection.execute(text(query), {"batch": night.batch}).scalar_one()
    assert 50 < pause <= limits.LONGEST_CHECK


def test_two_that_look_at_once_stop_it_once(writer: Writer) -> None:
    night = Night(writer, [Part() for _ in range(50)], max_seconds=0.0)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: night.enforce(), range(8)))
    assert [one for one in found if one] == [{night.batch: "budget"}]


def test_claims_while_it_is_stopped(writer: Writer) -> None:
    """Whatever a claim and a stop meet, a job is running, done or parked; none is ready when the stop is over."""
    night = Night(writer, [Part() for _ in range(40)], max_seconds=0.0)
    with ThreadPoolExecutor(5) as pool:
        claims = [pool.submit(night.claim) for _ in range(20)]
        stops = [pool.submit(night.enforce) for _ in range(3)]
        claimed = [claim for one in claims if (claim := one.result()) is not None]
        assert [one.result() for one in stops if one.result()] == [{night.batch: "budget"}]
    states = [writer.state(job) for job in night.jobs]
    assert states.count("running") == len(claimed) and states.count("paused") == 40 - len(claimed)


def test_a_person_may_still_pause_retry_and_cancel(writer: Writer) -> None:
    night = Night(writer, [Part(), Part()], max_seconds=0.0)
    failing = night.claim()
    assert failing is not None
    night.enforce()
    with transaction(night.engine) as connection:
        queue.fail(connection, failing, "broken", "m", retry=False, max_failures=1)
    assert control.pause(night.engine, night.batch) == 0 and night.progress.state == "budget reached"
    assert control.retry(night.engine, night.batch) == 1
    assert writer.state(failing.job_id) == "paused"
    assert control.cancel(night.engine, night.batch) == 2
    assert (night.progress.state, exit_code(night.progress)) == ("cancelled", 7)


def test_impossible_states_are_refused_by_the_schema(writer: Writer) -> None:
    night = Night(writer, [Part()])
    for values in ({"max_seconds": -1}, {"stopped": "budget"}, {"stopped": "mood"}):
        with pytest.raises(IntegrityError, match="ck_batches"):
            night.set(**values)


def test_commands(writer: Writer, program: Program) -> None:
    night = Night(writer, [Part() for _ in range(3)], max_seconds=SECONDS)
    night.finish(night.claim())
    program("wait", "night", code=8)
    assert "budget reached" in program("status", "night")
    assert "GPU hours are spent" in program("resume", "night", code=8)
    assert program("resume", "night", "--max-gpu-hours", "1", "--deadline", "8h").strip() == "2"
    night.set(deadline=PAST)
    program("wait", "night", code=7)
    assert "is past" in program("resume", "night", code=7)
    assert "not a positive number" in program("resume", "night", "--max-gpu-hours", "-1", code=2)
    assert "neither a time" in program("resume", "night", "--deadline", "soon", code=2)
    assert program("resume", "night", "--deadline", "none").strip() == "2"
    for _ in range(2):
        night.finish(night.claim())
    assert "finished" in program("wait", "night")
