"""Real Celery workers under faults. Processes are shared by the tests, for one takes half a minute to import torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from chorus_batch.jobs import control, leases
from chorus_batch.jobs.companion import worker_command, worker_environment, worker_if_alone
from chorus_batch.jobs.database import connect, ensure_schema, transaction
from chorus_batch.jobs.dispatch import nudge
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.local.process import Process
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.settings import Settings
from tests.faults.bench import PROMPTS, Bench, until

STEPS = 20
START = 120.0  # seconds for a worker to be at its first job: it imports torch, beside another one, on a slow machine
LONG = {"steps": str(STEPS), "guidance_scale": "1"}


@dataclass
class Parent:
    """A Celery parent process as `submit --wait` and `worker start` start it."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def child(self) -> int:
        """The process that holds the model: the one child that isn't Python's own resource tracker."""
        children = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        pools = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(pools) == 1, f"{pools} of {children}; {self.said()}"
        return pools[0]

    def alive(self) -> bool:
        return self.popen.poll() is None

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]


@dataclass
class Crew:
    """Workers on servers of their own; a test asks for those that it needs."""

    bench: Bench
    _parents: dict[str, Parent] = field(default_factory=dict)

    def need(self, *names: str) -> list[Parent]:
        """The workers of those names, started if they don't run."""
        for name in names:
            if name not in self._parents or not self._parents[name].alive():
                self._parents[name] = self._start(name)
        return [self._parents[name] for name in names]

    def only(self, *names: str) -> list[Parent]:
        """The same, and no others."""
        for name in self._parents.keys() - set(names):
            self._end(self._parents.pop(name))
        return self.need(*names)

    def end(self) -> None:
        for parent in self._parents.values():
            self._end(parent)

    def _start(self, name: str) -> Parent:
        log = self.bench.folder / f"{name}-{len(list(self.bench.folder.iterdir()))}.log"
        settings = self.bench.settings
        with log.open("wb") as output:
            popen = subprocess.Popen(
                worker_command(name=name),
                env=worker_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return Parent(popen, log)

    def _end(self, parent: Parent) -> None:
        if parent.alive():
            parent.popen.kill()  # the child dies with it, as a test below shows
        parent.popen.wait(10)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    folder = Path(tempfile.mkdtemp(prefix="chorus-workers-", dir="/tmp"))
    folder.chmod(0o711)
    (folder / "logs").mkdir()
    asked = Settings(
        data_dir=folder / "data", device="cpu", heartbeat_interval=0.5, lease=5.0, poll_interval=0.5, max_failures=2
    )
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        stack.callback(local.down, asked)
        settings = local.ensure(asked)
        engine = connect(settings.database_url)
        stack.callback(engine.dispose)
        ensure_schema(engine)
        bench = Bench(settings, engine, folder / "logs")
        bench.store.ensure_bucket()
        crew = Crew(bench)
        stack.callback(crew.end)
        yield crew


def submit(bench: Bench, rows: int) -> int:
    """A batch of so many rows, each computed in full; workers are told as `submit` tells them."""
    prompts = [f"{PROMPTS[n % len(PROMPTS)]} {n}" for n in range(rows)]
    batch = bench.submit(prompts, cache=CacheMode.off, parameters=LONG)
    nudge(bench.settings)
    return batch


def done(bench: Bench, batch: int) -> int:
    return Counter(job.state for job in bench.jobs(batch))["done"]


def running(bench: Bench, batch: int) -> dict[int, int]:
    """Who runs which job: process id -> job."""
    query = (
        "SELECT w.pid, q.job_id FROM queue q JOIN workers w ON w.id = q.worker_id"
        " WHERE q.state = 'running' AND q.batch_id = :batch"
    )
    return {row.pid: row.job_id for row in bench.sql(query, batch=batch)}


def frozen_at_work(bench: Bench, batch: int, parent: Parent) -> int:
    """Stop a worker's child (SIGSTOP) while it has a job of the batch, and return the job."""
    child = parent.child

    def caught() -> bool:
        if child in running(bench, batch):
            os.kill(child, signal.SIGSTOP)
            if child in running(bench, batch):
                return True
            os.kill(child, signal.SIGCONT)  # it was between two jobs after all
        return False

    until(caught, f"a job in the worker's hands: {parent.said()}", START)
    return running(bench, batch)[child]


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_the_workers_modules_load_no_torch() -> None:
    """Celery's parent imports them; so does every child before it has decided on its device."""
    script = (
        "import sys, chorus_batch.workers.app, chorus_batch.workers.tasks, chorus_batch.workers.reconciler;"
        "print(sorted({'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = worker_environment(Settings(data_dir=Path("/nonexistent")))
    told = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "torch" not in told.stdout and "diffusers" not in told.stdout and "transformers" not in told.stdout


def test_two_workers_share_a_batch_and_only_children_load_torch(crew: Crew) -> None:
    bench, parents = crew.bench, crew.need("a", "b")
    batch = submit(bench, 6)
    until(lambda: len(running(bench, batch)) == 2, f"two workers at work: {parents[0].said()}", START)
    assert set(running(bench, batch)) == {parent.child for parent in parents}
    bench.finish(batch, START)
    bench.check_done(batch)
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 6
    for parent in parents:
        assert "libtorch" in maps(parent.child)
        assert "libtorch" not in maps(parent.popen.pid)


def test_the_broker_may_be_emptied_and_killed_in_mid_batch(crew: Crew) -> None:
    bench, parents = crew.bench, crew.need("a", "b")
    batch = submit(bench, 8)
    until(lambda: running(bench, batch), f"a worker at work: {parents[0].said()}", START)
    path = bench.settings.broker_url.removeprefix("redis+socket://").partition("?")[0]
    with redis.Redis(unix_socket_path=path) as broker:
        broker.flushall()
    until(lambda: done(bench, batch) >= 3, "three jobs done after the broker was emptied", START)
    (pid,) = (status.pid for status in local.ps(bench.settings) if status.name == "broker")
    assert pid is not None
    broker_process = Process.find(pid)
    assert broker_process is not None
    os.kill(pid, signal.SIGKILL)
    assert broker_process.wait(10)
    assert local.ensure(bench.settings) == bench.settings
    bench.finish(batch)
    bench.check_done(batch)
    assert [bench.attempts(job.id) for job in bench.jobs(batch)] == [["done"]] * 8
    # And work of which no message ever tells is found: the workers are idle now, and connected again.
    unannounced = bench.submit(PROMPTS[:1], cache=CacheMode.off, parameters=LONG)
    bench.finish(unannounced)
    with redis.Redis(unix_socket_path=path) as broker:
        broker.flushall()
    unannounced = bench.submit(PROMPTS[:1], cache=CacheMode.off, parameters=LONG)
    bench.finish(unannounced)
    assert all(parent.alive() for parent in parents)


def test_a_frozen_workers_job_is_done_by_another_and_its_own_result_refused(crew: Crew) -> None:
    bench, (_, second) = crew.bench, crew.need("a", "b")
    batch = submit(bench, 6)
    job = frozen_at_work(bench, batch, second)
    bench.finish(batch)
    finished = bench.jobs(batch)
    assert bench.attempts(job) == ["lost", "done"]
    os.kill(second.child, signal.SIGCONT)
    until(
        lambda: f"job {job}: attempt 1 is not this worker's" in second.said() or "entering again" in second.said(),
        "the zombie to learn of it",
    )
    again = submit(bench, 4)
    until(lambda: second.child in running(bench, again), "the zombie to work under its new identity", START)
    bench.finish(again)
    bench.check_done(again)
    bench.check_done(batch)  # no orphans
    assert bench.jobs(batch) == finished


def test_a_killed_parent_takes_its_child_along_and_another_worker_ends_its_job(crew: Crew) -> None:
    bench, (first, second) = crew.bench, crew.need("a", "b")
    batch = submit(bench, 8)
    child = Process.find(second.child)
    assert child is not None
    job = frozen_at_work(bench, batch, second)
    os.kill(second.popen.pid, signal.SIGKILL)
    second.popen.wait(10)
    assert child.wait(5)
    bench.finish(batch)
    bench.check_done(batch)
    assert bench.attempts(job) == ["lost", "done"]
    assert sum(len(bench.attempts(job.id)) for job in bench.jobs(batch)) == 8 + 1
    assert first.alive()


def test_a_killed_child_is_replaced_and_costs_at_most_its_job(crew: Crew) -> None:
    bench, (parent,) = crew.bench, crew.only("a")
    rows = 6
    batch = submit(bench, rows)
    until(lambda: done(bench, batch) >= rows // 2, f"half of the batch: {parent.said()}", START)
    child, job = parent.child, frozen_at_work(bench, batch, parent)
    os.kill(child, signal.SIGKILL)
    bench.finish(batch, START)
    assert parent.alive() and parent.child != child
    bench.check_done(batch)
    attempts = [bench.attempts(job.id) for job in bench.jobs(batch)]
    assert bench.attempts(job) == ["lost", "done"]
    assert Counter(result for results in attempts for result in results) == {"done": rows, "lost": 1}
    # Bounded rework: at most the batch's own steps and one job's for the worker that died.
    assert sum(len(results) for results in attempts) * STEPS <= rows * STEPS + STEPS


def test_a_worker_told_to_stop_gives_its_job_back_within_ten_seconds(crew: Crew) -> None:
    bench, (parent,) = crew.bench, crew.only("a")
    batch = bench.submit(
        [f"{prompt} of many steps" for prompt in PROMPTS], cache=CacheMode.off, parameters={"steps": "400"}
    )
    nudge(bench.settings)
    until(lambda: running(bench, batch), f"a job in the worker's hands: {parent.said()}", START)
    (job,) = running(bench, batch).values()
    child = Process.find(parent.child)
    assert child is not None
    parent.popen.send_signal(signal.SIGTERM)
    parent.popen.wait(10)
    assert child.wait(1)
    assert [found.state for found in bench.jobs(batch)] == ["ready"] * 4
    assert bench.attempts(job) == ["released"]
    assert bench.sql("SELECT sum(failures + deaths) AS n FROM queue WHERE batch_id = :batch", batch=batch)[0].n == 0
    # What it had computed is there for another to go on from, and nothing else.
    (kept,) = bench.keys(f"batches/{batch}/")
    assert kept.endswith(f"/jobs/{job}/attempts/1/checkpoint.safetensors")
    assert bench.sql("SELECT checkpoint->>'key' FROM queue WHERE job_id = :job", job=job) == [(kept,)]
    assert bench.sql("SELECT FROM workers WHERE stopped_at IS NULL") == []  # signed off, not to be waited for
    assert control.cancel(bench.engine, batch) == 4  # nobody else need do it


def test_a_waiting_command_keeps_a_worker_alive(crew: Crew, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither a worker killed a moment before nor the death of its own leaves it waiting for ever."""
    bench = crew.bench
    crew.only()
    bench.sql("UPDATE workers SET stopped_at = now() WHERE stopped_at IS NULL")
    with transaction(bench.engine) as connection:
        leases.register(connection, "just killed", slot="elsewhere", host="here", pid=1, device="cpu")
    with worker_if_alone(bench.settings, bench.engine):
        batch = submit(bench, 1)
        assert companions() == []
        until(companions, "a worker in the killed one's place")
        (first,) = companions()
        os.kill(first, signal.SIGKILL)
        until(lambda: companions() not in ([], [first]), "another one")
        bench.finish(batch, START)
    assert companions() == []
    bench.check_done(batch)
    assert "the worker ended by itself with code -9" in capfd.readouterr().err


def companions() -> list[int]:
    """The live Celery parents that this process started to wait with."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and Process.find(int(entry.name)) is not None:
            with suppress(OSError):
                if f"wait-{os.getpid()}@".encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
