"""What a claim hands to a worker, and what the worker hands back: frozen rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chorus_batch.jobs.models import CacheMode, CacheResult, Reuse, Role
from chorus_batch.jobs.storage import StoredObject


@dataclass(frozen=True)
class DomainRecord:
    """One domain (README, "Method"), as stored."""

    id: int
    key: str
    space_id: int
    model: str
    fingerprint: str
    dtype: str
    width: int
    height: int
    frames: int
    steps: int
    guidance_scale: float
    shift: float
    scheduler: str
    negative_prompt: str
    policy: str
    step_cache: str


@dataclass(frozen=True)
class Claim:
    """One job in one worker's hands. `attempt` is the fencing token: every write names it."""

    job_id: int
    attempt: int
    worker_id: str
    batch_id: int
    prompt: str
    prompt_key: bytes
    seed: int
    fps: int
    reuse: Reuse
    cache: CacheMode
    role: Role
    source_job_id: int | None  # whom it waited for last: the planned source, or who took its place
    planned_job_id: int | None
    fallback_job_id: int | None
    source_entry_id: int | None
    similarity: float | None
    failures: int
    domain: DomainRecord
    checkpoint: StoredObject | None = None  # of an earlier attempt that was stopped: to go on from


@dataclass(frozen=True)
class GenerationRecord:
    """The trace of one finished job (README, "Method").

    `details` holds what reuse consisted of, as far as there was any, as plain values: `phrases` [the source's, this
    prompt's] for what differs, `tokens` (the differential ones' text slots), `gains` ([of the keys, of the output] for
    each computed step), `visible` (the share of the tokens that each computed step computed), `regions` (sha256 of the
    masks), `device_idle` (seconds between the denoising of the worker's last job and of this one, if there was work all
    the while), `compilations` (how often torch.compile compiled something for it), `mask` (whether a segmenter's region
    came from the `store`, was `made`, or was in the worker's `memory`; the seconds are those of the phase `mask`), and
    whatever else the engine counts.
    """

    cache_result: CacheResult
    video: StoredObject
    latents: StoredObject
    steps_total: int
    steps_computed: int
    entry_id: int | None = None
    origin_job_id: int | None = None
    similarity: float | None = None
    k1: int = 0
    k2: int = 0
    forward_passes: int = 0
    tokens_computed: int = 0
    tokens_total: int = 0
    flops: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase
    seconds_total: float = 0.0
    peak_memory: int = 0  # bytes
    backend: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    kind: str | None = None  # of the difference between the prompts
    scope: str | None = None  # where it lies
    details: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, bool] | None = None  # attribute -> whether the video shows it; None: nobody can tell


@dataclass(frozen=True)
class EntryRecord:
    """What a miss adds to the cache."""

    object: StoredObject
    steps: Sequence[int]  # the k whose x[k] the object holds
