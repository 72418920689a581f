"""Batches and workers for fault tests: everything is real; a worker lives in a thread, so that it can be held."""

from __future__ import annotations

import csv
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, Row, text

from chorus_batch.jobs import leases
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.ingest.rows import IngestOptions, open_source
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore, StoredObject
from chorus_batch.jobs.submission import SubmitOptions, submit

# The second is close enough to the first to reuse it, and so is the fourth to the third.
PROMPTS = (
    "a red circle moves right over a black background",
    "a blue circle moves right over a black background",
    "on a gray background, a yellow triangle moves up",
    "on a gray background, a green triangle moves up",
)
STEPS = 4
PASSES = 2 * STEPS  # of the transformer for a video in full: with and without the prompt
DEADLINE = 60.0  # seconds that anything may take before a test gives up on it


def until(condition: Callable[[], object], what: str, seconds: float = DEADLINE) -> None:
    """Poll until `condition` holds; fails with `what` was waited for."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)


def signalled(event: threading.Event, what: str, seconds: float = DEADLINE) -> None:
    assert event.wait(seconds), f"not within {seconds:g} s: {what}"


@dataclass
class Bench:
    """A database, a bucket, and what happens in them."""

    settings: Settings
    engine: Engine
    folder: Path
    _files: Iterator[int] = field(default_factory=itertools.count)

    @property
    def store(self) -> ObjectStore:
        """The store without any fault on the way."""
        return ObjectStore.from_settings(self.settings)

    def submit(
        self,
        prompts: Sequence[str] = PROMPTS,
        *,
        cache: CacheMode = CacheMode.on,
        parameters: Mapping[str, str] | None = None,
    ) -> int:
        """A batch of a row for each prompt, the n-th with seed n. Returns its id."""
        path = self.folder / f"prompts-{next(self._files)}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("prompt", "seed"), *((prompt, n) for n, prompt in enumerate(prompts))])
        overrides = {"steps": str(STEPS), **(parameters or {})}
        ingest = IngestOptions(load_card(self.settings.model, self.settings.models_folder), overrides=overrides)
        with ExitStack() as stack:
            sources = [stack.enter_context(open_source(str(path)))]
            done = submit(self.settings, self.engine, sources, ingest, SubmitOptions(cache=cache, new=True))
        assert done.batch_id is not None
        return done.batch_id

    def sql(self, query: str, **values: Any) -> list[Row[Any]]:
        with transaction(self.engine) as connection:
            result = connection.execute(text(query), values)
            return list(result.all()) if result.returns_rows else []

    def jobs(self, batch: int) -> list[Row[Any]]:
        """Every job of a batch in the order of its rows: its state, and its generation if it has one."""
        query = """
            SELECT j.id, s.state, j.role::text, j.error_code, g.attempt, g.cache_result::text, g.notes, g.entry_id,
                g.k1, g.steps_computed, g.origin_job_id,
                g.video_key, g.video_bytes, g.video_sha256, g.latents_key, g.latents_bytes, g.latents_sha256
            FROM jobs j JOIN job_states s ON s.job_id = j.id LEFT JOIN generations g ON g.job_id = j.id
            WHERE j.batch_id = :batch ORDER BY j.row
        """
        return self.sql(query, batch=batch)

    def attempts(self, job: int) -> list[str | None]:
        """The results of a job's attempts, in order."""
        rows = self.sql("SELECT result::text FROM attempts WHERE job_id = :job ORDER BY attempt", job=job)
        return [row.result for row in rows]

    def is_over(self, batch: int) -> bool:
        return self.sql("SELECT count(*) AS n FROM queue WHERE batch_id = :batch", batch=batch)[0].n == 0

    def finish(self, batch: int, seconds: float = DEADLINE) -> None:
        until(lambda: self.is_over(batch), f"batch {batch} over: {self.jobs(batch)}", seconds)

    def latents(self, batch: int) -> list[str]:
        return [job.latents_sha256 for job in self.jobs(batch)]

    def keys(self, prefix: str = "") -> set[str]:
        return {found.key for found in self.store.list(prefix)}

    def check_done(self, batch: int, *, no_orphans: bool = True) -> None:
        """Every job done exactly once; what is promised is stored, and (unless objects may be left) nothing else."""
        jobs = self.jobs(batch)
        assert [job.state for job in jobs] == ["done"] * len(jobs)
        assert self.is_over(batch)
        store, promised = self.store, set()
        for job in jobs:
            results = self.attempts(job.id)
            assert None not in results, f"job {job.id} is done and still running: {results}"
            assert Counter(results)["done"] == 1 and results[-1] == "done"
            assert len(results) == job.attempt
            for stored in (
                StoredObject(job.video_key, job.video_bytes, job.video_sha256),
                StoredObject(job.latents_key, job.latents_bytes, job.latents_sha256),
            ):
                assert len(store.get(stored.key, stored)) == stored.size
                if job.cache_result != "exact":
                    promised.add(stored.key)
        if no_orphans:
            assert self.keys(f"batches/{batch}/") == promised

    def reap(self, max_deaths: int = 3) -> leases.Reaped:
        with transaction(self.engine) as connection:
            return leases.reap(connection, lease=self.settings.lease, max_deaths=max_deaths)


class Gate:
    """Holds a worker inside the transformer at its n-th pass from now, and counts its passes."""

    def __init__(self, transformer: Any) -> None:
        self.passes = 0
        self.reached = threading.Event()
        self._at: int | None = None
        self._opened = threading.Event()
        self._hook = transformer.patch_embedding.register_forward_pre_hook(self._passing)

    def close_at(self, passes: int) -> None:
        """Hold the worker before it makes its pass number `passes` from now, counted from 1."""
        self.reached.clear()
        self._opened.clear()
        self._at = self.passes + passes

    def open(self) -> None:
        self._at = None
        self._opened.set()

    def remove(self) -> None:
        self.open()
        self._hook.remove()

    def _passing(self, *_: object) -> None:
        self.passes += 1
        if self.passes == self._at:
            self.reached.set()
            assert self._opened.wait(DEADLINE), "the gate wasn't opened"


class Worker:
    """A worker process's whole content in a thread of this one; Celery's place is taken by `start`."""

    def __init__(self, settings: Settings, slot: str | None = None) -> None:
        # Imported here: the tests of real processes need no torch in their own.
        from chorus_batch.workers.pipeline import Pipeline
        from chorus_batch.workers.runtime import Runtime

        self.runtime = Runtime(settings, slot)
        self.runtime.start()
        self.pipeline = Pipeline(self.runtime)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._gates: list[Gate] = []

    @property
    def id(self) -> str:
        return self.runtime.worker_id

    @property
    def transformer(self) -> Any:
        """The real model's transformer."""
        with transaction(self.runtime.database) as connection:
            domain = connection.execute(text("SELECT min(id) FROM domains")).scalar_one()
            from chorus_batch.jobs import cache

            return self.runtime.model(cache.domain(connection, domain)).engine.model.transformer

    def gate(self) -> Gate:
        gate = Gate(self.transformer)
        self._gates.append(gate)
        return gate

    def work(self) -> None:
        """Until nothing is ready, in the caller's thread."""
        from chorus_batch.workers.tasks import work

        work(self.runtime, self.pipeline)

    def start(self) -> Worker:
        """Work in a thread, looking for jobs again and again, until stopped."""
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """What SIGTERM does; returns when the worker has ended."""
        self.runtime.stopping.set()
        self.ended()

    def ended(self, seconds: float = DEADLINE) -> None:
        if self._thread is not None:
            self._thread.join(seconds)
            assert not self._thread.is_alive(), f"the worker didn't end within {seconds:g} s"
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        for gate in self._gates:
            gate.remove()
        try:
            self.stop()
        finally:
            self.runtime.close()

    def _run(self) -> None:
        try:
            while not self.runtime.stopping.is_set():
                self.work()
                self.runtime.stopping.wait(0.05)
        except BaseException as error:
            self._failure = error


@contextmanager
def hiring(settings: Settings, **changes: Any) -> Iterator[Callable[..., Worker]]:
    """Makes workers, and closes them all at the end."""
    with ExitStack() as stack:

        def hire(**more: Any) -> Worker:
            worker = Worker(replace(settings, **changes, **more))
            stack.callback(worker.close)
            return worker

        yield hire
