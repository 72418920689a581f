"""storage gc on a real store and database: what is needed stays, whoever is at work; what isn't goes."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from chorus_batch.jobs import control, garbage, keys, queue
from chorus_batch.jobs.companion import worker_environment
from chorus_batch.jobs.database import transaction
from chorus_batch.workers import publisher
from tests.faults.bench import PASSES, PROMPTS, Bench, Worker, signalled, until

Hire = Callable[..., Worker]
Gc = Callable[..., str]

ENCODER = "a" * 64


@pytest.fixture
def gc(bench: Bench, monkeypatch: pytest.MonkeyPatch, command: Gc) -> Gc:
    """What the command prints, in the bench's database and bucket."""
    for name, value in worker_environment(bench.settings).items():
        if name.startswith("CHORUS_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("CHORUS_PROFILE", "production")  # starts nothing

    return partial(command, "storage", "gc")


def collected(bench: Bench, before: datetime | None = None) -> list[str]:
    """What the command would remove."""
    before = before or datetime.now(UTC) + timedelta(seconds=1)
    listed = garbage.listing(bench.store)
    with transaction(bench.engine) as connection:
        needed = garbage.references(connection, before)
    return [each.key for each in garbage.sweep(listed, needed, before).garbage]


def put(bench: Bench, *wanted: str) -> set[str]:
    for key in wanted:
        bench.store.put(key, b"left behind", "application/octet-stream")
    return set(wanted)


def stopped_halfway(bench: Bench, hire: Hire) -> tuple[int, str]:
    """A batch of one job that a worker gave back after half of its steps, and the key of its checkpoint."""
    batch = bench.submit(PROMPTS[:1])
    worker = hire()
    gate = worker.gate()
    gate.close_at(PASSES // 2)
    worker.start()
    signalled(gate.reached, "half of the steps")
    worker.runtime.stopping.set()
    gate.open()
    worker.stop()
    (checkpoint,) = bench.keys("batches/")
    return batch, checkpoint


def test_orphans_go_and_what_is_needed_stays(bench: Bench, hire: Hire, gc: Gc) -> None:
    batch = bench.submit()
    hire().work()
    bench.check_done(batch)
    first, *_ = bench.jobs(batch)
    entry, other = bench.sql("SELECT * FROM cache_entries ORDER BY id")
    needed = bench.keys() | put(
        bench,
        keys.text_key(ENCODER, ""),  # the negative prompt
        keys.mask_key(entry.sha256, "circle"),
        "someone/elses",
        "texts/readme",
    )
    orphans = put(
        bench,
        keys.video_key(batch, first.id, 7),
        keys.checkpoint_key(batch, first.id, first.attempt),
        keys.entry_key("b" * 64, first.id, 7),
        keys.text_key(ENCODER, "of no batch"),
        keys.mask_key("c" * 64, "circle"),
        "probe/0123",
    )
    size = sum(each.size for each in bench.store.list(""))
    # Nothing is older than a week.
    told = json.loads(gc("--json"))
    assert (told["garbage"], told["too_young"], bench.keys()) == (0, len(orphans), needed | orphans)
    told = json.loads(gc("--json", "--dry-run", "--older-than", "0s"))
    assert (told["garbage"], told["dry_run"], bench.keys()) == (len(orphans), True, needed | orphans)
    assert told["objects"] == len(needed | orphans) - 1  # it doesn't look at what it has no name for
    assert told["garbage_bytes"] == len(orphans) * len(b"left behind") < told["bytes"] < size
    assert set(gc("-q", "--yes", "--older-than", "0s").split()) == orphans
    assert bench.keys() == needed
    # An entry that was evicted goes, and its mask with it.
    bench.sql("UPDATE cache_entries SET evicted_at = now(), evicted_reason = 'test' WHERE id = :id", id=entry.id)
    assert set(gc("-q", "--yes", "--older-than", "0s").split()) == {
        entry.object_key,
        keys.mask_key(entry.sha256, "circle"),
    }
    assert other.object_key in bench.keys("cache/")
    bench.check_done(batch)


def test_a_running_jobs_objects_survive(bench: Bench, hire: Hire, gc: Gc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it goes on from, and those that it has stored and not yet committed."""
    batch, checkpoint = stopped_halfway(bench, hire)
    gc("--yes", "--older-than", "0s")
    assert bench.keys("batches/") == {checkpoint}
    during: list[set[str]] = []
    finish = queue.finish

    def collect_first(*given: Any) -> int:
        """Between a result's last upload and its commit."""
        found = collected(bench)
        bench.store.remove(found)
        during.append(bench.keys())
        return finish(*given)

    monkeypatch.setattr(publisher.queue, "finish", collect_first)
    hire().work()
    bench.check_done(batch)
    assert len(during) == 1 and len(during[0]) == 4 and checkpoint in during[0]  # and video, latents, entry
    (job,) = bench.jobs(batch)
    assert bench.attempts(job.id) == ["released", "done"] and job.notes == []


def test_a_cancelled_jobs_checkpoint_goes(bench: Bench, hire: Hire, gc: Gc) -> None:
    batch, checkpoint = stopped_halfway(bench, hire)
    control.cancel(bench.engine, batch)
    assert gc("-q", "--yes", "--older-than", "0s").split() == [checkpoint]
    assert bench.keys() == set()


def test_text_features_stay_as_long_as_their_batches_are_recent(bench: Bench, hire: Hire, gc: Gc) -> None:
    batch = bench.submit(PROMPTS[:2])
    text, waiting = (keys.text_key(ENCODER, prompt) for prompt in PROMPTS[:2])
    bench.sql("UPDATE batches SET created_at = now() - interval '8 days' WHERE id = :batch", batch=batch)
    put(bench, text, waiting)
    bench.sql("UPDATE jobs SET outcome = 'cancelled', finished_at = now() WHERE prompt = :p", p=PROMPTS[0])
    # Written a moment ago: it is younger than any batch.
    assert gc("-q", "--yes").split() == []
    begun = datetime.now(UTC) + timedelta(seconds=1)
    until(lambda: datetime.now(UTC) > begun, "another second")
    assert collected(bench, begun) == [text]
    # Of a batch that is over, but was submitted within the time.
    control.cancel(bench.engine, bench.submit(PROMPTS[:1]))
    assert collected(bench, begun) == []


def test_it_asks_and_refuses_a_database_that_knows_nothing(
    bench: Bench, gc: Gc, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphans = put(bench, "probe/0123")
    told = gc("--yes", "--older-than", "0s", code=5)
    assert "the database knows of no batch" in told and "CHORUS_DATABASE_URL" in told
    bench.submit(PROMPTS[:1])
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    gc("--older-than", "0s", code=130)  # nobody is there to say yes
    assert bench.keys() == orphans
    told = gc("--yes", "--older-than", "a week", code=2)
    assert "'a week' is no duration" in told
    gc("--yes", "--older-than", "9999999d", code=2)
    assert bench.keys() == orphans
