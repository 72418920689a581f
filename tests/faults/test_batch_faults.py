"""A batch under faults: nothing lost, nothing done twice, no half-visible result, and a cache that is never wrong."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
import torch
from minio import Minio

from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import NotFinite, OutOfMemory
from chorus_batch.chorus.llm_differ import LocalModel
from chorus_batch.chorus.stages import Boundaries
from chorus_batch.jobs import cache, control, leases, queue, storage
from chorus_batch.jobs.database import connect, ensure_schema, transaction
from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.local.process import Process
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.settings import Settings
from chorus_batch.workers import models
from chorus_batch.workers.phases import Phases
from chorus_batch.workers.reconciler import Reconciler
from tests.faults.bench import PASSES, PROMPTS, STEPS, Bench, Worker, hiring, signalled, until
from tests.faults.conftest import impatient
from tests.faults.proxy import FaultProxy, Spoil
from tests.language_model import save_model

Hire = Callable[..., Worker]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the tries of one request to the store."""
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02))


@pytest.fixture
def proxy(bench: Bench) -> Iterator[FaultProxy]:
    bench.store.probe()  # the first object of a bucket takes its server longer than the limits below
    with FaultProxy(bench.settings.s3_endpoint) as proxy:
        yield proxy


def minio(settings: Settings) -> Minio:
    return Minio(settings.s3_endpoint, settings.s3_access_key, settings.s3_secret_key, secure=False, region="us-east-1")


def overwrite(bench: Bench, key: str, data: bytes, sha256: str) -> None:
    """Put other bytes in an object's place behind the program's back, with a checksum beside them."""
    bucket, metadata = bench.settings.s3_bucket, {"sha256": sha256}
    minio(bench.settings).put_object(bucket, key, io.BytesIO(data), len(data), metadata=metadata)  # type: ignore[arg-type]


def without_cache(bench: Bench, hire: Hire, prompts: Sequence[str]) -> list[str]:
    """The latents' checksums of such a batch, each computed in full."""
    batch = bench.submit(prompts, cache=CacheMode.off)
    hire().work()
    return bench.latents(batch)


# --- the object store


@pytest.mark.parametrize("how", [Spoil.reset, Spoil.overload, Spoil.lose])
def test_a_store_that_is_away_for_a_while_costs_no_job_a_try(
    how: Spoil, bench: Bench, hire: Hire, proxy: FaultProxy
) -> None:
    batch = bench.submit()
    worker = hire(s3_endpoint=proxy.address)
    proxy.spoil(how, times=6)  # twice as often as one request is tried
    worker.work()
    bench.check_done(batch)
    assert sum(request.spoiled is how for request in proxy.requests) == 6
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 4
    assert Counter(job.cache_result for job in bench.jobs(batch)) == {"miss": 2, "semantic": 2}


def test_a_slow_store_holds_nothing_up_for_ever(bench: Bench, hire: Hire, proxy: FaultProxy) -> None:
    batch = bench.submit()
    worker = hire(s3_endpoint=proxy.address, s3_timeout=1.0)
    proxy.spoil(Spoil.slow, times=4)
    worker.work()
    bench.check_done(batch)
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 4


def test_the_next_job_is_computed_while_a_result_waits_for_the_store(
    bench: Bench, hire: Hire, proxy: FaultProxy
) -> None:
    batch = bench.submit(PROMPTS[:1] + PROMPTS[2:3])
    worker = hire(s3_endpoint=proxy.address)
    gate = worker.gate()
    proxy.spoil(Spoil.reset, times=6, method="PUT")
    worker.work()
    assert gate.passes == 2 * PASSES
    bench.check_done(batch)


def test_a_worker_that_is_told_to_stop_while_the_store_is_away_gives_its_result_up(
    bench: Bench, hire: Hire, proxy: FaultProxy
) -> None:
    batch = bench.submit(PROMPTS[:1])
    worker = hire(s3_endpoint=proxy.address).start()
    proxy.spoil(Spoil.reset, times=1000)
    until(lambda: proxy.count("PUT") >= 4, "the publisher to have failed once")
    began = time.monotonic()
    worker.stop()
    assert time.monotonic() - began < 10
    (job,) = bench.jobs(batch)
    assert (job.state, bench.attempts(job.id)) == ("ready", ["released"])
    hire().work()
    bench.check_done(batch)


# --- the cache: slow at worst, never wrong


@pytest.mark.parametrize("lost", [False, True])
def test_regions_come_from_the_sources_video_or_if_it_is_lost_from_its_evidence(
    lost: bool, bench: Bench, hire: Hire, grounded_folders: tuple[Path, Path]
) -> None:
    def hired(**changes: str) -> Worker:
        """With boundaries that have a stage 2, which the built-in model's own don't."""
        worker = hire(**changes)
        with transaction(bench.engine) as connection:
            loaded = worker.runtime.model(cache.domain(connection, 1))
        policy = loaded.policies["chorus"]
        policy.boundaries = Boundaries.parse({str(STEPS): [[0.79, 1, 3]]}, 3.0)
        policy.regions = replace(policy.regions, largest_share=1.0)  # random weights may see objects everywhere
        return worker

    source = bench.submit(PROMPTS[:1])
    hired().work()
    by_evidence = bench.submit(PROMPTS[2:3] + PROMPTS[1:2])  # as below, but with another seed: no exact hit
    hired().work()
    if lost:
        bench.store.remove([bench.jobs(source)[0].video_key])
    by_video = bench.submit(PROMPTS[1:2])
    hired(segmenter="grounded:{},{}".format(*grounded_folders)).work()
    (expected, follower) = bench.jobs(by_evidence)[1], bench.jobs(by_video)[0]
    regions = [
        bench.sql("SELECT details->>'regions' AS sha256 FROM generations WHERE job_id = :job", job=job.id)[0].sha256
        for job in (expected, follower)
    ]
    assert follower.cache_result == expected.cache_result == "semantic", (expected.notes, follower.notes)
    assert None not in regions, (regions, follower.notes)
    # Models that know nothing see other things in the video than the source's own attention did.
    assert (regions[0] == regions[1]) is lost
    said = f"entry {follower.entry_id} has lost its video (object_missing): region from the evidence"
    assert follower.notes == ([said] if lost else [])


def test_a_language_model_is_asked_about_a_plans_pairs_at_once_and_never_again(
    bench: Bench, hire: Hire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, write = list[list[str]](), LocalModel.write

    def counted(model: LocalModel, texts: Sequence[str]) -> list[str | None]:
        asked.append(list(texts))
        return write(model, texts)

    monkeypatch.setattr(LocalModel, "write", counted)
    # Not what the lexical differ says of a colour.
    answer = {"kind": "several", "scope": "everything", "source_phrase": "circle", "target_phrase": "circle"}
    folder = save_model(tmp_path / "llm", answer=json.dumps(answer))
    mine = {"differ": f"llm:{folder}", "data_dir": tmp_path / "data"}
    colors = ("blue", "green", "yellow")
    prompts = [PROMPTS[0], *(PROMPTS[0].replace("red", color) for color in colors)]
    batch = bench.submit(prompts)
    hire(**mine).work()
    bench.check_done(batch)
    kinds = bench.sql("SELECT kind, count(*) FROM generations WHERE cache_result = 'semantic' GROUP BY kind")
    assert [tuple(row) for row in kinds] == [("several", 3)]
    assert [len(texts) for texts in asked] == [3]
    # Another worker, and other seeds.
    again = bench.submit([PROMPTS[0], PROMPTS[0], *prompts[1:]])
    hire(**mine).work()
    bench.check_done(again)
    assert len(asked) == 1


@pytest.mark.parametrize("how", ["cut on the way", "changed on the way", "changed", "swapped", "deleted", "empty"])
def test_a_damaged_entry_is_evicted_and_its_follower_computed_in_full(
    how: str, bench: Bench, hire: Hire, proxy: FaultProxy
) -> None:
    first = bench.submit(PROMPTS[:1])
    hire().work()  # and gone with what it held in memory
    (entry,) = bench.sql("SELECT id, object_key, sha256 FROM cache_entries WHERE evicted_at IS NULL")
    data = bench.store.get(entry.object_key)
    if how == "cut on the way":
        proxy.spoil(Spoil.truncate, times=3, method="GET")
    elif how == "changed on the way":
        proxy.spoil(Spoil.corrupt, times=3, method="GET")
    elif how == "changed":
        overwrite(bench, entry.object_key, data[:-1] + bytes([data[-1] ^ 1]), entry.sha256)
    elif how == "swapped":  # whole and with its right checksum, but another one's
        overwrite(bench, entry.object_key, bench.store.get(bench.jobs(first)[0].latents_key), "")
    elif how == "empty":
        overwrite(bench, entry.object_key, b"", entry.sha256)
    else:
        bench.store.remove([entry.object_key])

    second = bench.submit(PROMPTS[1:2])
    hire(s3_endpoint=proxy.address).work()
    (follower,) = bench.jobs(second)
    assert (follower.role, follower.cache_result) == ("follower", "miss")
    (note,) = follower.notes
    assert f"entry {entry.id} was evicted (object_{'missing' if how == 'deleted' else 'corrupt'})" in note
    (evicted,) = bench.sql("SELECT evicted_reason FROM cache_entries WHERE evicted_at IS NOT NULL")
    assert evicted.evicted_reason in note
    bench.check_done(second)
    assert bench.latents(second) == without_cache(bench, hire, PROMPTS[1:2])  # not a bit from the entry

    third = bench.submit(["a green circle moves right over a black background"])
    hire().work()
    assert bench.jobs(third)[0].entry_id not in (None, entry.id)  # what the follower left is used instead


def test_an_entry_damaged_once_on_the_way_is_fetched_again(bench: Bench, hire: Hire, proxy: FaultProxy) -> None:
    bench.submit(PROMPTS[:1])
    hire().work()
    second = bench.submit(PROMPTS[1:2])
    proxy.spoil(Spoil.truncate, method="GET")
    hire(s3_endpoint=proxy.address).work()
    (follower,) = bench.jobs(second)
    assert (follower.cache_result, follower.notes, follower.k1) == ("semantic", [], 1)


def test_a_hit_is_the_same_from_memory_and_from_the_store(bench: Bench, hire: Hire) -> None:
    held = bench.submit(PROMPTS[:2])
    hire().work()
    bench.sql("DELETE FROM cache_entries WHERE job_id = :job", job=bench.jobs(held)[1].id)
    fetched = bench.submit(PROMPTS[:2], parameters={"fps": "4"})  # other requests in the same domain
    hire().work()
    for batch in (held, fetched):
        assert [job.cache_result for job in bench.jobs(batch)] == ["miss", "semantic"]
    assert bench.latents(held) == bench.latents(fetched)


def test_a_finished_request_whose_objects_are_gone_is_made_again(bench: Bench, hire: Hire) -> None:
    first = bench.submit(PROMPTS[:1] + PROMPTS[2:3] + ("the cyan ring shrinks on a white background",))
    hire().work()
    made = bench.jobs(first)
    bench.store.remove([made[0].video_key])
    overwrite(bench, made[1].latents_key, b"other", made[1].latents_sha256)
    second = bench.submit(PROMPTS[:1] + PROMPTS[2:3] + ("the cyan ring shrinks on a white background",))
    hire().work()
    again = bench.jobs(second)
    assert [job.cache_result for job in again] == ["miss", "miss", "exact"]
    assert [job.latents_sha256 for job in again] == [job.latents_sha256 for job in made]
    assert f"job {made[0].id} has lost an object (object_missing)" in again[0].notes[0]
    assert f"job {made[1].id} has lost an object (object_corrupt)" in again[1].notes[0]
    assert again[2].origin_job_id == made[2].id
    bench.check_done(second)


# --- the database


def terminate(bench: Bench) -> int:
    """End every connection to the database, as a failover does. Returns how many there were."""
    # From another database: this connection must not be among them.
    with psycopg.connect(bench.settings.database_url, dbname="postgres", autocommit=True) as connection:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        return connection.execute(query, [bench.engine.url.database]).rowcount


def test_ended_connections_cost_nothing(bench: Bench, hire: Hire) -> None:
    batch = bench.submit()
    worker = hire()
    gate = worker.gate()
    gate.close_at(3)
    worker.start()
    signalled(gate.reached, "the worker to compute")
    assert terminate(bench) > 0
    gate.open()
    bench.finish(batch)
    bench.check_done(batch)
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 4


def test_a_storm_of_ended_connections_loses_and_doubles_nothing(bench: Bench, hire: Hire) -> None:
    batch = bench.submit([*PROMPTS, *(f"{prompt}, again" for prompt in PROMPTS)], parameters={"guidance_scale": "1"})
    worker = hire()
    gate = worker.gate()
    gate.close_at(1)
    worker.start()
    signalled(gate.reached, "the worker to compute")
    over = threading.Event()

    def storm() -> None:
        # In odd pauses, so that they hit claims, beats and commits alike.
        for n in range(60):
            terminate(bench)
            if over.wait(0.02 + 0.013 * (n % 7)):
                return

    thread = threading.Thread(target=storm)
    thread.start()
    gate.open()
    thread.join()
    over.set()
    bench.finish(batch)
    bench.check_done(batch, no_orphans=False)  # what was stored before a commit that failed is left to the sweeper
    for job in bench.jobs(batch):
        assert set(bench.attempts(job.id)) <= {"done", "released"}


def test_a_claim_whose_answer_was_lost_is_given_back(bench: Bench, hire: Hire) -> None:
    """The commit came through, its answer didn't: the database says that the worker has a job, the worker knows none."""
    batch = bench.submit(PROMPTS[:1])
    worker = hire()
    with transaction(bench.engine) as connection:
        lost = queue.claim(connection, worker.id)
    assert lost is not None
    until(lambda: bench.attempts(lost.job_id) == ["released"], "the claim to be given back")
    worker.work()
    bench.check_done(batch)
    assert bench.attempts(lost.job_id) == ["released", "done"]


def test_a_claim_in_hand_is_never_taken_for_a_forgotten_one(bench: Bench, hire: Hire) -> None:
    """Beats at their fastest beside claims."""
    batch = bench.submit([f"{prompt} {n}" for prompt in PROMPTS for n in range(5)], cache=CacheMode.off)
    worker = hire(heartbeat_interval=0.001)
    jobs = []
    while (claim := worker.pipeline.claim(Phases())) is not None:
        jobs.append(claim.job_id)
        time.sleep(0.01)
    assert len(jobs) == len(set(jobs)) == 20
    assert [job.state for job in bench.jobs(batch)] == ["running"] * 20


@pytest.fixture(scope="module")
def own() -> Iterator[Settings]:
    """Servers that may be killed."""
    folder = Path(tempfile.mkdtemp(prefix="chorus-faults-", dir="/tmp"))
    folder.chmod(0o711)
    settings = impatient(Settings(data_dir=folder))
    yield settings
    local.down(settings)
    shutil.rmtree(folder)


@pytest.fixture
def own_bench(own: Settings, tmp_path: Path) -> Iterator[Bench]:
    settings = local.ensure(own)
    engine = connect(settings.database_url)
    ensure_schema(engine)
    bench = Bench(settings, engine, tmp_path)
    bench.store.ensure_bucket()
    for table in ("generations", "queue", "attempts", "jobs", "cache_entries", "batches", "workers"):
        bench.sql(f"TRUNCATE {table} CASCADE")
    yield bench
    engine.dispose()


def kill_postgres(settings: Settings) -> None:
    (pid,) = (status.pid for status in local.ps(settings) if status.name == "postgres")
    assert pid is not None
    process = Process.find(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)
    assert process.wait(10)


def test_a_killed_database_loses_no_job_and_no_work(own_bench: Bench) -> None:
    bench = own_bench
    batch = bench.submit()
    with hiring(bench.settings) as hire:
        worker = hire()
        gate = worker.gate()
        gate.close_at(PASSES + 3)
        worker.start()
        signalled(gate.reached, "the worker to be at its second job")
        until(lambda: len(bench.sql("SELECT FROM generations")) == 1, "the first job to be published")
        kill_postgres(bench.settings)
        with pytest.raises(DependencyDown):
            bench.sql("SELECT 1")
        gate.open()
        until(lambda: gate.passes >= 2 * PASSES, "the job to be computed without a database")
        local.ensure(bench.settings)
        bench.finish(batch)
        bench.check_done(batch)
        assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 4
        assert gate.passes == 2 * PASSES + 2 * 2 * (STEPS - 1)  # two in full, two from their source's first step


def test_a_failure_that_a_killed_database_cant_be_told_of_isnt_forgotten(own_bench: Bench) -> None:
    bench = own_bench
    batch = bench.submit(PROMPTS[:1])
    with hiring(bench.settings) as hire:
        worker = hire()
        transformer, gate = worker.transformer, worker.gate()
        gate.close_at(PASSES)
        worker.start()
        signalled(gate.reached, "the worker to be at its last pass")
        kill_postgres(bench.settings)
        poison(transformer)
        gate.open()
        until(lambda: not worker.pipeline._heartbeat._claims, "the worker to have done with the job")
        local.ensure(bench.settings)
        bench.finish(batch)
    (job,) = bench.jobs(batch)
    assert (job.state, job.error_code) == ("failed", "not_finite")
    assert bench.attempts(job.id) == ["released", "failed"]


def test_nobody_is_declared_dead_for_the_databases_absence(own_bench: Bench) -> None:
    bench = own_bench
    settings = replace(bench.settings, lease=1.0)
    batch = bench.submit(PROMPTS[:1])
    with transaction(bench.engine) as connection:
        leases.register(connection, "w", slot="w", host="here", pid=1, device="cpu")
        assert queue.claim(connection, "w") is not None
        bench.sql("SELECT 1")
    looks = threading.Semaphore(0)
    bench.submit(PROMPTS[2:3])  # something ready, for the reconciler to tell at every look
    reconciler = Reconciler(settings, looks.release)
    reconciler.start()
    try:
        assert looks.acquire(timeout=10)
        kill_postgres(bench.settings)
        time.sleep(settings.lease + 0.3)  # nobody can beat for longer than a lease
        while looks.acquire(blocking=False):
            pass
        local.ensure(bench.settings)
        assert looks.acquire(timeout=10) and looks.acquire(timeout=10)
        with transaction(bench.engine) as connection:
            assert leases.heartbeat(connection, "w") == {(bench.jobs(batch)[0].id, 1)}
        # But who stays silent now is dead.
        until(lambda: bench.jobs(batch)[0].state == "ready", "the silent worker's job to be taken back", 10)
    finally:
        reconciler.stop()
        reconciler.join(10)


# --- workers


def expire(bench: Bench, worker: str) -> None:
    bench.sql("UPDATE workers SET heartbeat_at = now() - interval '1 hour' WHERE id = :id", id=worker)


def test_a_zombies_result_is_refused_and_swept(bench: Bench, hire: Hire) -> None:
    """A worker that stood still for longer than its lease comes back when another has done its job."""
    batch = bench.submit(PROMPTS[:2])
    zombie = hire(heartbeat_interval=2.5)  # too seldom to notice by itself
    gate = zombie.gate()
    gate.close_at(PASSES)
    zombie.start()
    signalled(gate.reached, "the zombie to be at its last pass")
    expire(bench, zombie.id)
    assert bench.reap().requeued == 1
    hire().work()
    finished = bench.jobs(batch)
    assert [job.state for job in finished] == ["done", "done"]
    gate.open()
    zombie.stop()
    assert bench.jobs(batch) == finished
    assert [bench.attempts(job.id) for job in finished] == [["lost", "done"], ["done"]]
    bench.check_done(batch)  # no orphans
    assert len(bench.keys("cache/")) == len(bench.sql("SELECT FROM cache_entries"))


def test_a_zombie_that_is_first_to_store_changes_nothing_either(bench: Bench, hire: Hire) -> None:
    """Its job is requeued, not yet taken: attempts are fenced, not workers."""
    batch = bench.submit(PROMPTS[:1])
    zombie = hire(heartbeat_interval=2.5)
    gate = zombie.gate()
    gate.close_at(PASSES)
    zombie.start()
    signalled(gate.reached, "the zombie to be at its last pass")
    expire(bench, zombie.id)
    bench.reap()
    gate.close_at(10**6)
    gate.open()
    zombie.stop()
    (job,) = bench.jobs(batch)
    assert (job.state, job.attempt, bench.attempts(job.id)) == ("ready", None, ["lost"])
    assert bench.keys(f"batches/{batch}/") == set()
    hire().work()
    bench.check_done(batch)


def test_a_worker_declared_dead_stops_its_job_and_enters_again(bench: Bench, hire: Hire) -> None:
    batch = bench.submit(PROMPTS[:1])
    worker = hire()
    gate = worker.gate()
    gate.close_at(2)
    worker.start()
    signalled(gate.reached, "the worker to compute")
    before = worker.id
    bench.sql("UPDATE workers SET stopped_at = now() WHERE id = :id", id=before)
    until(lambda: worker.id != before, "the worker to enter again")
    # Its claims are void only when a reaper has looked: until then nobody else has them.
    assert bench.reap().requeued == 1
    gate.open()
    bench.finish(batch)
    bench.check_done(batch)
    (job,) = bench.jobs(batch)
    assert bench.attempts(job.id) == ["lost", "done"]
    assert gate.passes < 2 * PASSES  # the lost one wasn't computed to its end
    with transaction(bench.engine) as connection:
        assert leases.live_workers(connection, bench.settings.lease) == 1


def test_a_worker_that_signs_off_leaves_no_ghost(bench: Bench, hire: Hire) -> None:
    """A beat that has just been told of its death mustn't enter again when the worker has left meanwhile."""
    worker = hire(heartbeat_interval=0.2)
    heartbeat = worker.runtime.heartbeat
    assert heartbeat is not None

    def beat() -> object:
        return bench.sql("SELECT heartbeat_at FROM workers WHERE id = :id", id=worker.id)[0].heartbeat_at

    before = beat()
    until(lambda: beat() != before, "a beat")
    leaving = threading.Thread(target=heartbeat.leave)
    with heartbeat._lock:  # where the next beat stands when it has its answer
        bench.sql("UPDATE workers SET stopped_at = now()")
        time.sleep(0.5)
        leaving.start()
        leaving.join(0.5)
    leaving.join(10)
    heartbeat.join(10)
    with transaction(bench.engine) as connection:
        assert leases.live_workers(connection, bench.settings.lease) == 0


def test_two_workers_share_a_batch_and_do_nothing_twice(bench: Bench, hire: Hire) -> None:
    prompts = [f"{prompt} {n}" for n in range(3) for prompt in PROMPTS]
    alone = bench.submit(prompts, cache=CacheMode.off)
    hire().work()
    batch = bench.submit(prompts, cache=CacheMode.off)
    workers = [hire(), hire()]
    gates = [worker.gate() for worker in workers]
    for worker, gate in zip(workers, gates, strict=True):
        gate.close_at(1)
        worker.start()
    for gate in gates:
        signalled(gate.reached, "both workers to be at a job")
    for gate in gates:
        gate.open()
    bench.finish(batch)
    bench.check_done(batch)
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 12
    assert sum(gate.passes for gate in gates) == 12 * PASSES
    by = bench.sql(
        "SELECT worker_id, count(*) AS n FROM attempts a JOIN jobs j ON j.id = a.job_id"
        " WHERE j.batch_id = :batch GROUP BY worker_id",
        batch=batch,
    )
    assert {row.worker_id for row in by} == {worker.id for worker in workers}
    # Without a cache who computes what, and beside whom, changes no bit.
    assert bench.latents(batch) == bench.latents(alone)


def test_two_workers_with_a_cache_finish_each_job_once(bench: Bench, hire: Hire) -> None:
    batch = bench.submit([f"{prompt} {n}" for n in range(2) for prompt in PROMPTS])
    for _ in range(2):
        hire().start()
    bench.finish(batch)
    bench.check_done(batch)
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 8


def stopped_at_pass(worker: Worker, passes: int) -> None:
    """The worker takes a job, is told to stop while it makes that pass of it, and leaves."""
    gate = worker.gate()
    gate.close_at(passes)
    worker.start()
    signalled(gate.reached, "the worker to be in the middle of a generation")
    worker.runtime.stopping.set()
    gate.open()
    worker.ended(10)
    assert gate.passes == passes + 1  # the step was ended, no other begun
    worker.close()


def test_a_worker_told_to_stop_leaves_its_job_at_the_next_step_for_another_to_go_on(bench: Bench, hire: Hire) -> None:
    batch = bench.submit(PROMPTS[:2])
    stopped_at_pass(hire(), 3)  # the first pass of the second step
    source, follower = bench.jobs(batch)
    assert (source.state, follower.state) == ("ready", "waiting")
    assert bench.attempts(source.id) == ["released"]
    assert bench.sql("SELECT failures, deaths FROM queue WHERE job_id = :job", job=source.id) == [(0, 0)]
    assert bench.keys(f"batches/{batch}/") == {f"batches/{batch}/jobs/{source.id}/attempts/1/checkpoint.safetensors"}
    stopped_at_pass(hire(), 1)  # a step further
    assert bench.keys(f"batches/{batch}/") == {f"batches/{batch}/jobs/{source.id}/attempts/2/checkpoint.safetensors"}
    worker = hire()
    gate = worker.gate()
    worker.work()
    follower = bench.jobs(batch)[1]
    assert gate.passes == PASSES - 4 - 2 + 2 * follower.steps_computed
    bench.check_done(batch)  # the checkpoint is gone, too
    assert bench.attempts(source.id) == ["released", "released", "done"]
    done = bench.sql("SELECT steps_computed, forward_passes FROM generations WHERE job_id = :job", job=source.id)
    assert done == [(STEPS, PASSES)]
    again = bench.submit(PROMPTS[:2], cache=CacheMode.off)
    hire().work()
    assert bench.latents(again)[0] == bench.latents(batch)[0]


@pytest.mark.parametrize("how", ["damaged", "deleted", "another generation's"])
def test_a_checkpoint_that_cant_be_used_costs_time_and_nothing_else(how: str, bench: Bench, hire: Hire) -> None:
    batch = bench.submit(PROMPTS[:1])
    stopped_at_pass(hire(), 3)
    (key,) = bench.keys(f"batches/{batch}/")
    if how == "deleted":
        bench.store.remove([key])
    elif how == "damaged":
        bench.store.put(key, bench.store.get(key)[:-9], "application/octet-stream")
    else:
        bench.sql("UPDATE jobs SET seed = seed + 1 WHERE batch_id = :batch", batch=batch)
    worker = hire()
    gate = worker.gate()
    worker.work()
    assert gate.passes == PASSES
    bench.check_done(batch)
    assert "checkpoint" in bench.jobs(batch)[0].notes[0]


def test_a_cancelled_batch_stops_in_mid_generation(bench: Bench, hire: Hire) -> None:
    batch, other = bench.submit(), bench.submit(["the cyan ring shrinks on a white background"])
    worker = hire()
    gate = worker.gate()
    gate.close_at(3)
    worker.start()
    signalled(gate.reached, "the worker to be at its second step")
    assert control.cancel(bench.engine, batch) == 4
    until(lambda: worker.runtime.heartbeat and worker.runtime.heartbeat._lost, "the worker to learn of it")
    gate.open()
    bench.finish(other)
    bench.check_done(other)
    assert gate.passes == 4 + PASSES
    jobs = bench.jobs(batch)
    assert [job.state for job in jobs] == ["cancelled"] * 4
    assert [bench.attempts(job.id) for job in jobs] == [["released"], [], [], []]
    assert bench.keys(f"batches/{batch}/") == set()


# --- jobs that can't be done


def poison(transformer: torch.nn.Module) -> Callable[[], None]:
    """Set one weight to NaN. Returns what undoes it."""
    weight = next(transformer.parameters())
    with torch.no_grad():
        before = weight.flatten()[0].item()
        weight.view(-1)[0] = torch.nan

    def undo() -> None:
        with torch.no_grad():
            weight.view(-1)[0] = before

    return undo


def test_a_generation_that_isnt_finite_fails_its_job_alone(bench: Bench, hire: Hire) -> None:
    batch = bench.submit(PROMPTS[:2])
    worker = hire()
    undo = poison(worker.transformer)
    phases = Phases()
    claim = worker.pipeline.claim(phases)
    assert claim is not None
    worker.pipeline.run(claim, phases)
    undo()
    source, follower = bench.jobs(batch)
    assert (source.state, source.error_code, bench.attempts(source.id)) == ("failed", "not_finite", ["failed"])
    assert follower.state == "ready"  # freed
    worker.work()
    follower = bench.jobs(batch)[1]
    assert (follower.state, follower.cache_result, follower.steps_computed) == ("done", "miss", STEPS)
    assert {key.split("/")[3] for key in bench.keys(f"batches/{batch}/")} == {str(follower.id)}
    assert control.retry(bench.engine, batch) == 1
    worker.work()
    bench.check_done(batch)


def test_a_model_that_is_broken_for_good_ends_the_batch_in_coded_failures(bench: Bench, hire: Hire) -> None:
    batch = bench.submit()
    worker = hire()
    poison(worker.transformer)
    worker.work()
    assert [(job.state, job.error_code) for job in bench.jobs(batch)] == [("failed", "not_finite")] * 4
    assert bench.is_over(batch)
    assert bench.keys() == set()
    assert bench.sql("SELECT FROM cache_entries") == []


def test_a_result_that_cant_be_published_costs_tries_and_ends(
    bench: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.submit(PROMPTS[:2])
    worker = hire(max_failures=2)
    with monkeypatch.context() as broken:
        broken.setattr(tempfile, "tempdir", "/nonexistent")  # no place to write the video at
        worker.start()
        until(lambda: [job.state for job in bench.jobs(batch)] == ["failed"] * 2, "both jobs to fail")
    for job in bench.jobs(batch):
        assert (job.error_code, bench.attempts(job.id)) == ("internal", ["failed", "failed"])
    assert bench.keys() == set()
    assert control.retry(bench.engine, batch) == 2
    bench.finish(batch)
    assert [job.state for job in bench.jobs(batch)] == ["done"] * 2


def test_an_object_that_the_store_will_never_take_ends_its_job(
    bench: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting doesn't mend it: without a try spent on it the job would be made again for ever."""
    batch = bench.submit(PROMPTS[:1])
    monkeypatch.setattr(storage, "LARGEST", 100)  # bytes: every video is larger
    hire(max_failures=2).start()
    until(lambda: [job.state for job in bench.jobs(batch)] == ["failed"], "the job to fail")
    (job,) = bench.jobs(batch)
    assert (job.error_code, bench.attempts(job.id)) == ("object_too_large", ["failed", "failed"])


def test_a_worker_with_other_weights_is_named(bench: Bench, hire: Hire) -> None:
    batch = bench.submit(PROMPTS[:1])
    bench.sql("UPDATE domains SET fingerprint = repeat('0', 64)")
    hire().work()
    (row,) = bench.sql("SELECT error_code, error_message FROM jobs WHERE batch_id = :batch", batch=batch)
    assert row.error_code == "weights"
    assert "submit the batch again" in row.error_message


def test_a_prompt_outside_the_models_world_is_a_video_and_a_note(bench: Bench, hire: Hire) -> None:
    batch = bench.submit(["An elderly fisherman mends his nets, xyzzy \U0001f41f", PROMPTS[0]], cache=CacheMode.off)
    hire().work()
    other, own = bench.jobs(batch)
    assert (other.state, own.state) == ("done", "done")
    assert ["own small world" in note for note in other.notes] == [True] and own.notes == []


# --- decoding, beside the next job's denoising


def test_a_decode_that_fails_ends_its_own_job_only(bench: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, failures = Engine.decode, [MemoryError(), NotFinite("the decoded video holds NaN")]
    seen: set[bytes] = set()

    def failing(engine: Engine, latents: torch.Tensor) -> object:
        known, bits = len(seen), latents.numpy().tobytes()
        seen.add(bits)
        if failures and len(seen) > known:  # a job that is taken up again has the same latents
            raise failures.pop(0)
        return decode(engine, latents)

    monkeypatch.setattr(Engine, "decode", failing)
    batch = bench.submit(PROMPTS[:3], cache=CacheMode.off)
    hire().start()
    bench.finish(batch)  # the first one waits a moment before its second try
    first, second, third = bench.jobs(batch)
    assert (second.state, second.error_code, bench.attempts(second.id)) == ("failed", "not_finite", ["failed"])
    assert first.state == third.state == "done"
    assert bench.attempts(first.id) == ["failed", "done"]  # a full memory may have room at the next try
    (row,) = bench.sql("SELECT details->'device_idle' AS idle FROM generations WHERE job_id = :job", job=third.id)
    assert 0 < row.idle < 60  # since another one's denoising


def test_a_model_that_finds_no_room_costs_a_try_and_keeps_no_claim(
    bench: Bench, hire: Hire, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = bench.submit(PROMPTS[:1])
    load, tries = models.load_engine, []

    def crowded(*given: Any) -> Any:
        tries.append(given)
        if len(tries) == 1:
            raise OutOfMemory("cpu has no room", hint="free the device")
        return load(*given)

    monkeypatch.setattr(models, "load_engine", crowded)
    worker = hire()
    claim = worker.pipeline.claim(Phases())
    assert claim is not None
    worker.pipeline.run(claim, Phases())
    (job,) = bench.jobs(batch)
    assert (job.state, bench.attempts(job.id)) == ("ready", ["failed"])
    assert bench.sql("SELECT error_code FROM attempts") == [("out_of_memory",)]
    assert bench.sql("SELECT FROM queue WHERE worker_id IS NOT NULL") == []
    worker.start()
    bench.finish(batch)
    assert bench.attempts(job.id) == ["failed", "done"]
