"""Publishes results beside the next job's denoising: decode, mux, upload, verify, commit, in this order.

Objects are stored and verified before the transaction that makes them visible; a worker that dies between the two
leaves orphans, never a half-visible result.
"""

from __future__ import annotations

import logging
import os
import queue as queues
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from chorus_batch.jobs import keys, limits, queue
from chorus_batch.jobs.claims import Claim, EntryRecord, GenerationRecord
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.dispatch import nudge_for_masks
from chorus_batch.jobs.errors import ChorusBatchError, ClaimLost, DependencyDown
from chorus_batch.jobs.storage import StoredObject
from chorus_batch.workers.failures import INTERNAL, Failure
from chorus_batch.workers.phases import Phases
from chorus_batch.workers.runtime import Runtime
from chorus_batch.workers.video import write_mp4

log = logging.getLogger(__name__)

Frames: TypeAlias = npt.NDArray[np.uint8]  # [F, H, W, 3]
LOST = 70  # the exit status of a process whose device is lost

PATIENCE = 90.0  # seconds that a finished generation is kept while a server is away, before the job is given back
WAITING = 2  # finished generations that may wait; a slow store then holds back the next one


@dataclass(frozen=True)
class Pictures:
    """How latents become a video, which attributes it shows, if one can tell, and what else there is to say."""

    decode: Callable[[], tuple[Frames, tuple[str, ...]]]  # frames, and what the trace should say of them
    judge: Callable[[Frames], Mapping[str, bool] | None]
    remark: Callable[[], str | None]


@dataclass(frozen=True)
class Video:
    """An MP4 file; nothing for an exact hit, whose objects exist."""

    data: bytes = b""
    scores: Mapping[str, bool] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finished:
    """A generation that is ready to be published. Latents and entry are safetensors bytes."""

    claim: Claim
    record: GenerationRecord  # its objects are filled in here
    phases: Phases
    pictures: Pictures | None = None  # None for an exact hit: its objects exist
    latents: bytes = b""
    entry: bytes | None = None
    entry_steps: tuple[int, ...] = ()


class Publisher:
    """One background thread; results become visible in the order in which they were handed over."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._queue: queues.Queue[Finished] = queues.Queue(WAITING)
        self._published = 0
        threading.Thread(target=self._run, name="publisher", daemon=True).start()

    def publish(self, finished: Finished) -> None:
        """Hand over a result; waits while too many are waiting."""
        self._queue.put(finished)
        self._published += 1

    def drain(self) -> bool:
        """Wait until everything handed over is published. Returns whether there was anything since the last call."""
        self._queue.join()
        published, self._published = self._published, 0
        return published > 0

    def _run(self) -> None:
        while True:
            finished = self._queue.get()
            try:
                self._publish(finished)
            except Exception as error:
                # The job is claimed by a worker that lives: nobody else would ever end it. It costs a try, or a
                # generation that can't be published would be made again for ever.
                log.exception("job %s: publishing", finished.claim.job_id)
                self._fail(finished.claim, "internal", f"{type(error).__name__}: {error}")
            finally:
                assert self._runtime.heartbeat is not None
                self._runtime.heartbeat.drops(finished.claim)
                self._queue.task_done()

    def _publish(self, finished: Finished) -> None:
        claim, until, pause = finished.claim, time.monotonic() + PATIENCE, 0.5
        try:
            video = self._video(finished)
        except Exception as error:
            failure = Failure.of(error)
            if failure.code == INTERNAL:
                raise
            self._fail(claim, failure.code, failure.message, retry=failure.retry)
            if failure.lost:
                os._exit(LOST)
            return None
        while True:
            try:
                self._store_and_commit(finished, video)
                return self._enforce_limits()
            except ClaimLost as error:
                log.warning("%s; its result is dropped", error)
                return self._sweep(claim)
            except DependencyDown as error:
                if not error.passing:
                    return self._fail(claim, error.code, str(error))
                # A worker that was told to stop has seconds, not the store's patience.
                if self._runtime.stopping.is_set() or time.monotonic() + pause > until:
                    log.error("job %s: %s; given back", claim.job_id, error)
                    return self._give_back(claim)
                log.warning("job %s: %s; trying again in %.1f s", claim.job_id, error, pause)
                self._runtime.stopping.wait(pause)
                pause = min(2 * pause, 10.0)
            except ChorusBatchError as error:
                return self._fail(claim, error.code, str(error))

    def _video(self, finished: Finished) -> Video:
        if finished.pictures is None:
            return Video()
        with finished.phases.timed("decode"):
            frames, notes = finished.pictures.decode()
        with finished.phases.timed("mux"), tempfile.TemporaryDirectory(prefix="chorus-") as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(frames, finished.claim.fps, path)  # reads it back and compares
            remark = finished.pictures.remark()
            if remark is not None:
                notes = (*notes, remark)
            return Video(path.read_bytes(), finished.pictures.judge(frames), notes)

    def _store_and_commit(self, finished: Finished, video: Video) -> None:
        claim, record, phases = finished.claim, finished.record, finished.phases
        entry: EntryRecord | None = None
        if video.data:
            record = replace(record, scores=video.scores, notes=(*record.notes, *video.notes))
            with phases.timed("upload"):
                put = self._runtime.store.put
                place = (claim.batch_id, claim.job_id, claim.attempt)
                record = replace(
                    record,
                    video=put(keys.video_key(*place), video.data, "video/mp4"),
                    latents=put(keys.latents_key(*place), finished.latents, "application/octet-stream"),
                )
                if finished.entry is not None:
                    key = keys.entry_key(claim.domain.key, claim.job_id, claim.attempt)
                    stored = put(key, finished.entry, "application/octet-stream")
                    entry = EntryRecord(stored, finished.entry_steps)
        record = replace(record, seconds=dict(phases.seconds), seconds_total=phases.total)
        with transaction(self._runtime.database) as connection:
            freed = queue.finish(connection, claim, record, entry)
        if freed and self._runtime.settings.segmenter_folders is not None:
            nudge_for_masks(self._runtime.settings)
        if claim.checkpoint is not None:
            self.remove([claim.checkpoint.key], claim)

    def _enforce_limits(self) -> None:
        """Stop a batch whose budget this job used up. Every worker's reconciler looks too, but more seldom."""
        try:
            with transaction(self._runtime.database) as connection:
                limits.enforce(connection)
        except DependencyDown as error:
            log.warning("%s", error)

    def _fail(self, claim: Claim, code: str, message: str, *, retry: bool = True) -> None:
        log.error("job %s: %s: %s", claim.job_id, code, message)
        limit = self._runtime.settings.max_failures
        try:
            with transaction(self._runtime.database) as connection:
                queue.fail(connection, claim, code, message, retry=retry, max_failures=limit)
        except (ClaimLost, DependencyDown) as error:
            log.warning("job %s: %s", claim.job_id, error)

    def _give_back(self, claim: Claim) -> None:
        try:
            with transaction(self._runtime.database) as connection:
                queue.release(connection, claim)
        except DependencyDown as error:
            # The heartbeat finds the claim when the database is back, and gives it back.
            log.warning("job %s: %s", claim.job_id, error)

    def _sweep(self, claim: Claim) -> None:
        place = (claim.batch_id, claim.job_id, claim.attempt)
        orphans = [keys.video_key(*place), keys.latents_key(*place)]
        orphans.append(keys.entry_key(claim.domain.key, claim.job_id, claim.attempt))
        self.remove(orphans, claim)

    def remove(self, objects: Sequence[str], claim: Claim) -> None:
        """Objects that nobody will ask for. One that can't be removed now stays."""
        try:
            self._runtime.store.remove(objects)
        except ChorusBatchError as error:
            log.warning("job %s: %s", claim.job_id, error)


def no_object() -> StoredObject:
    """Stands in a record until the object exists."""
    return StoredObject("", 0, "")


def record_objects(row: Any) -> tuple[StoredObject, StoredObject]:
    """Video and latents of a finished generation, from its row."""
    return (
        StoredObject(row.video_key, row.video_bytes, row.video_sha256),
        StoredObject(row.latents_key, row.latents_bytes, row.latents_sha256),
    )
