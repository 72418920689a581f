"""One job, top to bottom: exact hit, else neighbour, else a full run; every hop timed, every fallback noted."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping

import torch

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.errors import CorruptLatents, EngineError, MissingStep, Stopped
from chorus_batch.chorus.latents import pack, unpack
from chorus_batch.chorus.request import Request, Result, Reuse
from chorus_batch.chorus.schedule import noise_levels
from chorus_batch.jobs import cache, queue
from chorus_batch.jobs.claims import Claim, GenerationRecord
from chorus_batch.jobs.database import statement, transaction
from chorus_batch.jobs.errors import ChorusBatchError, ClaimLost, DependencyDown, ObjectCorrupt, ObjectMissing
from chorus_batch.jobs.models import CacheMode, CacheResult, Role
from chorus_batch.jobs.models import Reuse as ReusePolicy
from chorus_batch.jobs.neighbours import Neighbour
from chorus_batch.jobs.parameters import clean_prompt
from chorus_batch.workers.phases import Phases
from chorus_batch.workers.publisher import Finished, Publisher, no_object, record_objects
from chorus_batch.workers.runtime import LoadedModel, Runtime

log = logging.getLogger(__name__)

OUT_OF_MEMORY = "out_of_memory"
DEVICE_LOST = "device_lost"


class Pipeline:
    """Runs claims on this process's device and hands the results to the publisher."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._publisher = Publisher(runtime)

    def claim(self, phases: Phases) -> Claim | None:
        """The next job, or None."""
        with self._heartbeat.claiming():
            with phases.timed("claim"), statement(self._runtime.database) as connection:
                claim = queue.claim(connection, self._runtime.worker_id, self._runtime.held.ids())
            if claim is not None:
                self._heartbeat.holds(claim)
        return claim

    def drain(self) -> bool:
        """Wait for what is being published; whether anything was."""
        return self._publisher.drain()

    def run(self, claim: Claim, phases: Phases) -> None:
        """Bring one job to its end, or back into the queue. Raises DependencyDown if a server is away."""
        notes: list[str] = []
        try:
            self._publisher.publish(self._linked(claim, phases, notes) or self._generated(claim, phases, notes))
        except Stopped:
            self._end(claim)
        except ClaimLost as error:
            log.warning("%s", error)
            self._heartbeat.drops(claim)
        except DependencyDown as error:
            if not error.passing:
                return self._end(claim, error.code, str(error), retry=True)
            # No fault of the job: it costs none of its tries.
            self._end(claim)
            raise
        except (EngineError, ChorusBatchError) as error:
            self._end(claim, error.code, f"{error}. {error.hint}" if error.hint else str(error), retry=False)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._end(claim, OUT_OF_MEMORY, str(error) or "out of memory", retry=True)
        except torch.AcceleratorError as error:
            # The device's context is poisoned: whatever this process computed next would be garbage.
            self._end(claim, DEVICE_LOST, str(error), retry=True)
            self.drain()
            os._exit(70)
        except Exception as error:
            log.exception("job %s", claim.job_id)
            self._end(claim, "internal", f"{type(error).__name__}: {error}", retry=True)

    @property
    def _heartbeat(self):  # type: ignore[no-untyped-def]
        heartbeat = self._runtime.heartbeat
        assert heartbeat is not None
        return heartbeat

    def _end(self, claim: Claim, code: str | None = None, message: str = "", *, retry: bool = True) -> None:
        """Release a claim, or with a code record a failure."""
        try:
            with transaction(self._runtime.database) as connection:
                if code is None:
                    queue.release(connection, claim)
                else:
                    limit = self._runtime.settings.max_failures
                    queue.fail(connection, claim, code, message, retry=retry, max_failures=limit)
        except ClaimLost as error:
            log.warning("%s", error)
        except DependencyDown as error:
            # The heartbeat finds the claim when the database is back, and gives it back.
            log.warning("job %s: %s", claim.job_id, error)
        finally:
            self._heartbeat.drops(claim)

    def _linked(self, claim: Claim, phases: Phases, notes: list[str]) -> Finished | None:
        """The same request's finished objects, if they are still there."""
        if claim.cache is CacheMode.off:
            return None
        with phases.timed("lookup"):
            with transaction(self._runtime.database) as connection:
                found = queue.finished_request(connection, claim)
            if found is None:
                return None
            video, latents = record_objects(found)
            try:
                for stored in (video, latents):
                    if self._runtime.store.stat(stored.key) != stored:
                        raise ObjectCorrupt(f"{stored.key} is not what was stored")
            except (ObjectMissing, ObjectCorrupt) as error:
                log.warning("job %s: can't link job %s: %s", claim.job_id, found.job_id, error)
                notes.append(f"the same request's job {found.job_id} has lost an object ({error.code}): made again")
                return None
        record = GenerationRecord(
            cache_result=CacheResult.exact,
            origin_job_id=found.origin_job_id or found.job_id,
            steps_total=found.steps_total,
            steps_computed=0,
            tokens_total=found.tokens_total,
            video=video,
            latents=latents,
        )
        return Finished(claim, record, phases)

    def _generated(self, claim: Claim, phases: Phases, notes: list[str]) -> Finished:
        loaded = self._runtime.model(claim.domain)
        settings = _settings(claim)
        reuse, neighbour = self._reuse(claim, loaded, phases, notes)
        kept: frozenset[int] = frozenset()
        if reuse is None and claim.cache in (CacheMode.on, CacheMode.exact):
            kept = loaded.boundaries.kept_steps(settings.steps, noise_levels(settings.steps, settings.shift))
        request = Request(
            clean_prompt(claim.prompt), claim.seed, settings, claim.domain.key, claim.domain.negative_prompt
        )
        result = loaded.engine.generate(request, reuse, keep=kept, should_stop=lambda: self._should_stop(claim))
        for phase, seconds in result.trace.seconds.items():
            phases.seconds[phase] = seconds
        with phases.timed("decode"):
            frames = loaded.engine.decode(result.latents)
        return self._finished(claim, phases, result, frames, neighbour, notes)

    def _should_stop(self, claim: Claim) -> bool:
        return self._runtime.stopping.is_set() or self._heartbeat.lost(claim)

    def _reuse(
        self, claim: Claim, loaded: LoadedModel, phases: Phases, notes: list[str]
    ) -> tuple[Reuse | None, Neighbour | None]:
        """What the nearest entry of the domain offers; nothing for a planned source, whose followers count on it."""
        semantic = claim.cache in (CacheMode.on, CacheMode.readonly) and claim.reuse is not ReusePolicy.off
        if not semantic or claim.role is Role.source:
            return None, None
        steps = claim.domain.steps
        least = max(loaded.boundaries.tau_at(steps), self._runtime.settings.min_similarity)
        levels = noise_levels(steps, claim.domain.shift)
        with phases.timed("lookup"), transaction(self._runtime.database) as connection:
            neighbour = self._runtime.search.nearest(connection, claim, least)
        if neighbour is None:
            notes.append("no entry of the domain is similar enough: computed in full")
            return None, None
        if claim.role is Role.follower and claim.source_job_id not in (None, neighbour.job_id):
            notes.append(f"job {neighbour.job_id} is nearer than the planned source {claim.source_job_id}")
        k1, _ = loaded.boundaries.at(neighbour.similarity, steps, levels)
        if k1 == 0:
            return None, None
        try:
            latents = self._latents(neighbour, phases)
            if k1 not in latents:
                raise MissingStep(f"entry {neighbour.entry_id} holds no latents of step {k1}")
        except (ObjectMissing, ObjectCorrupt, CorruptLatents, MissingStep) as error:
            log.warning("entry %s evicted: %s", neighbour.entry_id, error)
            notes.append(f"entry {neighbour.entry_id} was evicted ({error.code}): computed in full")
            self._runtime.held.drop(neighbour.job_id)
            with transaction(self._runtime.database) as connection:
                cache.evict(connection, neighbour.entry_id, error.code)
            return None, None
        # Stage 1 alone for now: full reuse up to k1, full compute from there.
        return Reuse(neighbour.entry_id, claim.domain.key, neighbour.similarity, k1, k1, latents), neighbour

    def _latents(self, neighbour: Neighbour, phases: Phases) -> Mapping[int, torch.Tensor]:
        held = self._runtime.held.get(neighbour.job_id, neighbour.object.sha256)
        if held is not None:
            return held
        with phases.timed("fetch"):
            latents, _ = unpack(self._runtime.store.get(neighbour.object.key, neighbour.object))
        self._runtime.held.add(neighbour.job_id, neighbour.object.sha256, latents)
        return latents

    def _finished(
        self,
        claim: Claim,
        phases: Phases,
        result: Result,
        frames: object,
        neighbour: Neighbour | None,
        notes: list[str],
    ) -> Finished:
        trace = result.trace
        record = GenerationRecord(
            cache_result=CacheResult.semantic if neighbour is not None else CacheResult.miss,
            video=no_object(),
            latents=no_object(),
            steps_total=trace.steps_total,
            steps_computed=trace.steps_computed,
            entry_id=neighbour.entry_id if neighbour is not None else None,
            similarity=neighbour.similarity if neighbour is not None else None,
            k1=trace.k1,
            k2=trace.k2,
            forward_passes=trace.forward_passes,
            tokens_computed=trace.tokens_computed,
            tokens_total=trace.tokens_total,
            flops=float(trace.flops_computed),
            peak_memory=trace.peak_memory,
            backend=trace.backend,
            notes=tuple(notes),
        )
        with phases.timed("pack"):
            domain = {"domain": claim.domain.key}
            latents = pack({trace.steps_total: result.latents}, domain)
            entry = pack(result.trajectory, domain) if result.trajectory else None
        if entry is not None:
            self._runtime.held.add(claim.job_id, hashlib.sha256(entry).hexdigest(), result.trajectory)
        return Finished(claim, record, phases, frames, latents, entry, tuple(sorted(result.trajectory)))  # type: ignore[arg-type]


def _settings(claim: Claim) -> GenerationSettings:
    domain = claim.domain
    return GenerationSettings(
        width=domain.width,
        height=domain.height,
        frames=domain.frames,
        fps=claim.fps,
        steps=domain.steps,
        guidance_scale=domain.guidance_scale,
        shift=domain.shift,
        scheduler=domain.scheduler,
    )
