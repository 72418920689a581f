"""One job, top to bottom: exact hit, else neighbour, else a full run; every hop timed, every fallback noted."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from chorus_batch.chorus import checkpoint
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import CheckpointMismatch, CorruptLatents, MissingStep, Stopped
from chorus_batch.chorus.latents import pack, unpack
from chorus_batch.chorus.llm_differ import LlmDiffer
from chorus_batch.chorus.policy import Candidate, Decision, Policy, ReusePolicy
from chorus_batch.chorus.request import Request, Result, Reuse
from chorus_batch.chorus.segment import Source, Video
from chorus_batch.jobs import cache, keys, queue
from chorus_batch.jobs.claims import Claim, GenerationRecord
from chorus_batch.jobs.database import statement, transaction
from chorus_batch.jobs.errors import ChorusBatchError, ClaimLost, DependencyDown, ObjectCorrupt, ObjectMissing
from chorus_batch.jobs.models import CacheMode, CacheResult, Role
from chorus_batch.jobs.models import Reuse as RowReuse
from chorus_batch.jobs.neighbours import Neighbour, is_planned
from chorus_batch.jobs.parameters import clean_prompt
from chorus_batch.jobs.storage import StoredObject
from chorus_batch.workers.failures import INTERNAL, Failure
from chorus_batch.workers.masks import StoredMasks
from chorus_batch.workers.models import generation_settings
from chorus_batch.workers.phases import Phases
from chorus_batch.workers.publisher import LOST, Finished, Pictures, Publisher, no_object, record_objects
from chorus_batch.workers.runtime import HeldSource, LoadedModel, Runtime
from chorus_batch.workers.texts import AHEAD
from chorus_batch.workers.video import VideoError, read_mp4

log = logging.getLogger(__name__)

# Entries that a job tries before it is computed in full. Not all: if the store has lost everything, or is another one,
# a single job shouldn't empty the cache.
TRIES = 3
# Nearest entries among which the one that bears most steps is looked for: a comparison of two prompts each.
RANKED = 8
# Pairs that a differ that is a model is asked about beside the one that is needed now.
PAIRS_AHEAD = 63


class _Deferred(Exception):
    """The job waits in the queue again, for a source that is still to come."""


class Pipeline:
    """Runs claims on this process's device and hands the results to the publisher."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._publisher = Publisher(runtime)
        self._free_since: float | None = None  # when the last job's denoising ended, if there was work ever since

    def claim(self, phases: Phases) -> Claim | None:
        """The next job, or None."""
        with self._heartbeat.claiming():
            with phases.timed("claim"), statement(self._runtime.database) as connection:
                runtime = self._runtime
                claim = queue.claim(
                    connection,
                    runtime.worker_id,
                    runtime.held.ids(),
                    max_wait=runtime.settings.max_wait,
                    unfit=tuple(runtime.unfit),
                )
            if claim is not None:
                self._heartbeat.holds(claim)
            else:
                self._free_since = None
        return claim

    def drain(self) -> bool:
        """Wait for what is being published; whether anything was."""
        return self._publisher.drain()

    def run(self, claim: Claim, phases: Phases) -> None:
        """Bring one job to its end, or back into the queue. Raises DependencyDown if a server is away."""
        notes: list[str] = []
        try:
            self._publisher.publish(self._linked(claim, phases, notes) or self._generated(claim, phases, notes))
        except Stopped as stopped:
            self._stopped(claim, stopped)
        except _Deferred:
            self._heartbeat.drops(claim)
        except ClaimLost as error:
            log.warning("%s", error)
            self._heartbeat.drops(claim)
        except DependencyDown as error:
            if not error.passing:
                return self._end(claim, error.code, str(error), retry=True)
            # No fault of the job: it costs none of its tries.
            self._end(claim)
            raise
        except Exception as error:
            failure = Failure.of(error)
            if failure.code == INTERNAL:
                log.exception("job %s", claim.job_id)
            self._end(claim, failure.code, failure.message, retry=failure.retry)
            if failure.lost:
                self.drain()
                os._exit(LOST)

    @property
    def _heartbeat(self):  # type: ignore[no-untyped-def]
        heartbeat = self._runtime.heartbeat
        assert heartbeat is not None
        return heartbeat

    def _end(
        self,
        claim: Claim,
        code: str | None = None,
        message: str = "",
        *,
        retry: bool = True,
        checkpoint: StoredObject | None = None,
    ) -> None:
        """Release a claim, for its next holder to go on from the checkpoint; with a code record a failure."""
        try:
            with transaction(self._runtime.database) as connection:
                if code is None:
                    queue.release(connection, claim, checkpoint)
                else:
                    limit = self._runtime.settings.max_failures
                    queue.fail(connection, claim, code, message, retry=retry, max_failures=limit)
            if code is not None:
                self._forget_checkpoint(claim)
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
            scores=found.scores,
        )
        return Finished(claim, record, phases)

    def _generated(self, claim: Claim, phases: Phases, notes: list[str]) -> Finished:
        loaded = self._runtime.model(claim.domain)
        policy, settings = loaded.policies[claim.domain.policy], generation_settings(claim.domain, claim.fps)
        request = Request(
            clean_prompt(claim.prompt), claim.seed, settings, claim.domain.key, claim.domain.negative_prompt
        )
        details: dict[str, Any] = {}
        reuse, neighbour = self._reuse(claim, loaded.engine, policy, request, phases, notes, details)
        stores = reuse is None and claim.cache in (CacheMode.on, CacheMode.exact)
        run = partial(
            loaded.engine.generate,
            request,
            reuse,
            keep=policy.kept_steps(settings) if stores else frozenset(),
            evidence=stores and policy.policy is Policy.chorus,
            should_stop=lambda: self._should_stop(claim),
        )
        resume = self._checkpoint(claim, phases, notes)
        if loaded.texts is not None:
            with phases.timed("texts"):
                wanted = [request.prompt, *([request.negative_prompt] if settings.guided else [])]
                loaded.texts.prepare(wanted, partial(self._upcoming, claim), lambda: self._should_stop(claim))
        if self._free_since is not None:
            details["device_idle"] = round(time.perf_counter() - self._free_since, 4)
        try:
            result = run(resume=resume)
        except CheckpointMismatch:
            notes.append("the checkpoint was another generation's: computed from the beginning")
            result = run()
        finally:
            self._free_since = time.perf_counter()
        if result.trace.compilations:
            # Told aloud: each takes as long as many steps, and there should be few of them.
            log.warning("job %s: torch.compile compiled %d new shapes", claim.job_id, result.trace.compilations)
        for phase, seconds in result.trace.seconds.items():
            phases.seconds[phase] = seconds
        return self._finished(claim, phases, loaded, request, result, neighbour, details, notes)

    def _upcoming(self, claim: Claim) -> list[str]:
        """Texts that the claim's batch will need, cleaned."""
        with transaction(self._runtime.database) as connection:
            return [clean_prompt(prompt) for prompt in queue.upcoming_prompts(connection, claim, AHEAD)]

    def _should_stop(self, claim: Claim) -> bool:
        return self._runtime.stopping.is_set() or self._heartbeat.lost(claim)

    def _reuse(
        self,
        claim: Claim,
        engine: Engine,
        policy: ReusePolicy,
        request: Request,
        phases: Phases,
        notes: list[str],
        details: dict[str, Any],
    ) -> tuple[Reuse | None, Neighbour | None]:
        """What the best entry of the domain offers; nothing for a planned source, whose followers count on it.

        The plan's source is one of the entries: whatever bears more steps by now, or as many and is nearer, is taken
        instead, and so is the next one if the plan's is gone. Raises _Deferred if there is none, but will be.
        """
        semantic = claim.cache in (CacheMode.on, CacheMode.readonly) and claim.reuse is not RowReuse.off
        if not semantic or claim.role is Role.source or policy.policy is Policy.none:
            return None, None
        least = max(policy.boundaries.tau_at(claim.domain.steps), self._runtime.settings.min_similarity)
        evicted = False
        for _ in range(TRIES):
            found = self._neighbours(claim, least, phases)
            if not found:
                break
            with phases.timed("decide"):
                neighbour = best(claim, policy, request, found)
                self._ask_ahead(claim, policy, (clean_prompt(neighbour.prompt), request.prompt))
            try:
                held = self._held(neighbour, phases)
                with phases.timed("decide"):
                    video = partial(self._video, neighbour, engine, request.settings, notes)
                    prompt, entry = clean_prompt(neighbour.prompt), neighbour.object.sha256
                    source = Source(prompt, held.evidence, video, entry)
                    candidate = Candidate(neighbour.entry_id, neighbour.similarity, source, held.latents)
                    offsets = engine.model.token_offsets(request.prompt)
                    decision = policy.decide(request.prompt, offsets, request.settings, claim.domain.key, candidate)
                self._note_mask(policy, decision, phases, details)
                if decision.reuse is not None and decision.reuse.k1 not in held.latents:
                    raise MissingStep(f"entry {neighbour.entry_id} holds no latents of step {decision.reuse.k1}")
            except (ObjectMissing, ObjectCorrupt, CorruptLatents, MissingStep) as error:
                log.warning("entry %s evicted: %s", neighbour.entry_id, error)
                notes.append(f"entry {neighbour.entry_id} was evicted ({error.code})")
                self._runtime.held.drop(neighbour.job_id)
                with transaction(self._runtime.database) as connection:
                    cache.evict(connection, neighbour.entry_id, error.code)
                evicted = True
                continue
            notes += unplanned(claim, neighbour, found)
            notes += decision.notes
            if self._runtime.lacking and decision.reuse is not None and decision.reuse.regions is not None:
                notes.append("the segmenter that was asked for isn't there: region from the evidence")
            return decision.reuse, neighbour if decision.reuse is not None else None
        if evicted:
            notes[-1] += ": computed in full"
        else:
            notes.append("no entry of the domain is similar enough: computed in full")
        return None, None

    def _neighbours(self, claim: Claim, least: float, phases: Phases) -> list[Neighbour]:
        """Entries to start from. If there are none, but the plan has a source that is still to come, wait for that."""
        search = partial(self._runtime.search.nearest, claim=claim, min_similarity=least, count=RANKED)
        with phases.timed("lookup"):
            with transaction(self._runtime.database) as connection:
                found = search(connection)
            if found or claim.role is not Role.follower or claim.fallback_job_id is None:
                return found
            with transaction(self._runtime.database) as connection:
                deferred = queue.defer(connection, claim)
                if not deferred:  # it may have ended between the two
                    return search(connection)
            raise _Deferred

    def _ask_ahead(self, claim: Claim, policy: ReusePolicy, pair: tuple[str, str]) -> None:
        """Where the differ is a model that has to be asked: about the batch's next planned pairs too, at once."""
        differ = policy.differ
        if not isinstance(differ, LlmDiffer) or differ.knows(*pair):
            return
        with transaction(self._runtime.database) as connection:
            planned = queue.planned_pairs(connection, claim, PAIRS_AHEAD)
        differ.compare_many([pair, *((clean_prompt(source), clean_prompt(target)) for source, target in planned)])

    def _note_mask(self, policy: ReusePolicy, decision: Decision, phases: Phases, details: dict[str, Any]) -> None:
        """For the trace: where a segmenter's region came from, and its seconds, which are no part of the decision's."""
        if not isinstance(policy.segmenter, StoredMasks):
            return
        taken = policy.segmenter.taken()
        if taken is not None:
            phases.move("decide", "mask", taken.seconds)
            details["mask"] = taken.origin
        elif decision.reuse is not None and decision.reuse.regions is not None:
            details["mask"] = "memory"

    def _held(self, neighbour: Neighbour, phases: Phases) -> HeldSource:
        held = self._runtime.held.get(neighbour.job_id, neighbour.object.sha256)
        if held is None:
            with phases.timed("fetch"):
                held = _unpacked(self._runtime.store.get(neighbour.object.key, neighbour.object))
            self._runtime.held.add(neighbour.job_id, neighbour.object.sha256, held)
        return held

    def _video(
        self, neighbour: Neighbour, engine: Engine, settings: GenerationSettings, notes: list[str]
    ) -> Video | None:
        """The source's video, for a segmenter that looks at it; None, with a note, where it is lost."""
        try:
            with transaction(self._runtime.database) as connection:
                stored = cache.video_of(connection, neighbour.job_id)
            if stored is None:
                raise ObjectMissing(f"job {neighbour.job_id} has no video")
            frames = read_mp4(self._runtime.store.get(stored.key, stored))
        except (ObjectMissing, ObjectCorrupt, VideoError) as error:
            log.warning("entry %s: %s", neighbour.entry_id, error)
            notes.append(f"entry {neighbour.entry_id} has lost its video ({error.code}): region from the evidence")
            return None
        return Video(frames, engine.grid(engine.model.latent_shape(settings)))

    def _checkpoint(self, claim: Claim, phases: Phases, notes: list[str]) -> checkpoint.Checkpoint | None:
        """Where an earlier attempt was stopped, if it left anything that can be read."""
        if claim.checkpoint is None:
            return None
        try:
            with phases.timed("fetch"):
                return checkpoint.unpack(self._runtime.store.get(claim.checkpoint.key, claim.checkpoint))
        except (ObjectMissing, ObjectCorrupt, CorruptLatents) as error:
            notes.append(f"the checkpoint was lost ({error.code}): computed from the beginning")
            return None

    def _stopped(self, claim: Claim, stopped: Stopped) -> None:
        """Give the job back with what was computed; without it if the store can't take it."""
        stored: StoredObject | None = None
        if stopped.checkpoint is not None and not self._heartbeat.lost(claim):
            key = keys.checkpoint_key(claim.batch_id, claim.job_id, claim.attempt)
            try:
                data = checkpoint.pack(stopped.checkpoint)
                stored = self._runtime.store.put(key, data, "application/octet-stream")
            except ChorusBatchError as error:
                log.warning("job %s: the checkpoint wasn't stored: %s", claim.job_id, error)
        self._end(claim, checkpoint=stored)
        if stored is not None:
            self._forget_checkpoint(claim)

    def _forget_checkpoint(self, claim: Claim) -> None:
        """Remove what an earlier attempt left, once nobody will go on from it."""
        if claim.checkpoint is not None:
            self._publisher.remove([claim.checkpoint.key], claim)

    def _finished(
        self,
        claim: Claim,
        phases: Phases,
        loaded: LoadedModel,
        request: Request,
        result: Result,
        neighbour: Neighbour | None,
        details: dict[str, Any],
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
            kind=trace.kind,
            scope=trace.scope,
            forward_passes=trace.forward_passes,
            tokens_computed=trace.tokens_computed,
            tokens_total=trace.tokens_total,
            flops=float(trace.flops_computed),
            peak_memory=trace.peak_memory,
            backend=trace.backend,
            details={**trace.details(), **details},
            notes=tuple(notes),
        )
        with phases.timed("pack"):
            domain = {"domain": claim.domain.key}
            latents = pack({trace.steps_total: result.latents}, domain)
            entry = None
            if result.trajectory:
                entry = pack(result.trajectory, domain, self._runtime.settings.latent_dtype, result.evidence)
        if entry is not None:
            # Read back: a follower must start from the same latents whether it finds them here or in the store.
            self._runtime.held.add(claim.job_id, hashlib.sha256(entry).hexdigest(), _unpacked(entry))
        pictures = Pictures(
            partial(loaded.decoder.decode, result.latents),
            partial(loaded.engine.model.judge, request.prompt),
            partial(loaded.engine.model.remark, request.prompt),
        )
        return Finished(claim, record, phases, pictures, latents, entry, tuple(sorted(result.trajectory)))


def best(claim: Claim, policy: ReusePolicy, request: Request, found: Sequence[Neighbour]) -> Neighbour:
    """The neighbour that bears most steps; of those that bear as many the most similar. `found` isn't empty."""

    def bears(neighbour: Neighbour) -> tuple[tuple[int, int], float, bool]:
        m = neighbour.similarity
        depth = policy.depth(clean_prompt(neighbour.prompt), request.prompt, m, request.settings)
        return depth, m, is_planned(claim, neighbour)

    return max(found, key=bears)


def unplanned(claim: Claim, taken: Neighbour, found: Sequence[Neighbour]) -> list[str]:
    """What the trace says of a follower that starts from another of the entries `found` than the plan's."""
    no_plan = claim.planned_job_id is None and claim.source_entry_id is None
    if claim.role is not Role.follower or no_plan or is_planned(claim, taken):
        return []
    if claim.planned_job_id is not None:
        planned, place = f"source, job {claim.planned_job_id}", f"job {taken.job_id}"
    else:
        planned, place = f"entry {claim.source_entry_id}", f"entry {taken.entry_id}"
    for each in found:
        if is_planned(claim, each):
            better = "is nearer" if taken.similarity > each.similarity else "bears more steps"
            return [f"{place} {better} than the planned {planned}"]
    # The planner and the database compute similarities in single precision, each in its own order.
    if claim.similarity is not None and taken.similarity > claim.similarity + 1e-5:
        return [f"{place} is nearer than the planned {planned}"]
    return [f"{place} replaces the planned {planned}"]


def _unpacked(data: bytes) -> HeldSource:
    latents, _, evidence = unpack(data)
    return HeldSource(latents, evidence)
