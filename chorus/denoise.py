"""The one denoising loop, for every mode: it calls the network and the scheduler, and nothing else.

x[k] is the latent before step k, x[0] the noise, x[N] the clean latent. With a start at k1 > 0 the steps before k1 are
never run (stage 1). With a region the steps before its `until` compute its tokens only, and what lies outside is the
source's (stage 2). The rest is computed in full (stage 3). From noise and without a region the loop does what
diffusers' WanPipeline does, in the same order of operations, so that the results are equal bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .attention import Gain, Text, Watch
from .checkpoint import Checkpoint, restore_solver, solver_state
from .cost import Work
from .errors import CheckpointMismatch, Stopped
from .evidence import Recorder
from .network import Network, Visible
from .regions import Regions

if TYPE_CHECKING:
    from .stepcache import StepCache


@dataclass(frozen=True)
class Guidance:
    """Text features [1, L, D] of both passes; without `unconditional` each step has one pass."""

    conditional: torch.Tensor
    unconditional: torch.Tensor | None
    scale: float


@dataclass(frozen=True)
class RegionStage:
    """Stage 2: before step `until` only the tokens of `regions.see` are computed, and those of `regions.edit` kept.

    `source[k]` is the source's x[k], [C, T, H, W], for every k in (start, until].
    """

    until: int
    regions: Regions
    source: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Walk:
    """What the loop is asked for: from x[start] to x[steps].

    `gain(k)` is the amplification of step k's conditional pass. `keep` names the x[k] to copy. `cache` is a step cache
    enabled on the network's transformer.
    """

    steps: int
    guidance: Guidance
    start: int = 0
    region: RegionStage | None = None
    gain: Callable[[int], Gain | None] = lambda k: None
    keep: Set[int] = frozenset()
    recorder: Recorder | None = None
    cache: StepCache | None = None
    identity: str = ""  # names the generation in its checkpoints


@dataclass(frozen=True)
class Denoised:
    """What the loop made: x[N] [1, C, T, H, W], the kept x[k] as `independent` copies, and counts.

    `passes` holds the number of tokens of each pass, `step_seconds` the seconds of each step, resumed ones included;
    `ran` what really ran in each pass, where a step cache may have left something out, else nothing.
    """

    latents: torch.Tensor
    kept: dict[int, torch.Tensor]
    passes: tuple[int, ...]
    step_seconds: tuple[float, ...]
    ran: tuple[Work, ...] = ()


@dataclass
class _Progress:
    latents: torch.Tensor
    scheduler: Any
    step: int
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    passes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def denoise(
    network: Network,
    new_scheduler: Callable[[], Any],
    latents: torch.Tensor,
    walk: Walk,
    *,
    resume: Checkpoint | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[int, int], None] = lambda done, steps: None,
) -> Denoised:
    """Walk from x[start] = `latents` [1, C, T, H, W] (float32, on the network's device) to x[steps].

    A multistep solver begins with first order at `start` and where stage 2 ends: it can't know its history there, for
    outside the region there is none. `should_stop` is asked before every step and raises Stopped, which carries a
    checkpoint; with it as `resume` the walk goes on bit for bit. `on_step(done, steps)` is called after each step.
    With a step cache there is no checkpoint, for its memory isn't kept: raises CheckpointMismatch where one is given.
    """
    cache = walk.cache
    if cache is not None and resume is not None:
        raise CheckpointMismatch("a generation with a step cache can't be resumed", hint="start from the beginning")
    at = _begun(new_scheduler, latents, walk) if resume is None else _resumed(new_scheduler, latents, walk, resume)
    texts = _texts(network, walk.guidance)
    whole, part, edit = network.visible(latents), None, None
    if walk.region is not None:
        part = network.visible(latents, walk.region.regions.see)
        edit = _on_latents(walk.region.regions.edit, network.transformer.config.patch_size).to(latents.device)
    if cache is not None:
        cache.begin(at.scheduler.sigmas.tolist(), at.scheduler.timesteps.tolist())
    for k in range(at.step, walk.steps):
        if should_stop():
            raise Stopped(k, walk.steps, _checkpoint(at, k, walk) if cache is None else None)
        began = time.perf_counter()
        if walk.region is not None and k == walk.region.until:
            at.scheduler = _scheduler(new_scheduler, walk, k, latents.device)
            if cache is not None:
                cache.forget()
        if cache is not None:
            cache.at(k)
        partly = walk.region is not None and k < walk.region.until
        visible = part if partly and part is not None else whole
        timestep = at.scheduler.timesteps[k]
        watch = walk.recorder.at(k) if walk.recorder is not None else None
        velocity = _velocity(
            network, at.latents, timestep, texts, walk.guidance.scale, visible, walk.gain(k), watch, cache
        )
        stepped = at.scheduler.step(velocity, timestep, at.latents, return_dict=False)[0]
        if partly and walk.region is not None and edit is not None:
            # Chosen, not multiplied: outside the region the source's very bits remain.
            stepped = torch.where(edit, stepped, walk.region.source[k + 1].to(stepped.device, stepped.dtype))
        at.latents = stepped
        count = whole.rotary[0].shape[1] if visible.places is None else len(visible.places)
        at.passes += [count] * len(texts)
        at.seconds.append(time.perf_counter() - began)
        if k + 1 in walk.keep:
            at.kept[k + 1] = independent(at.latents)
        on_step(k + 1, walk.steps)
    ran = tuple(cache.ran) if cache is not None else ()
    return Denoised(at.latents, at.kept, tuple(at.passes), tuple(at.seconds), ran)


def _begun(new_scheduler: Callable[[], Any], latents: torch.Tensor, walk: Walk) -> _Progress:
    begun = _Progress(latents, _scheduler(new_scheduler, walk, walk.start, latents.device), walk.start)
    if walk.start in walk.keep:
        begun.kept[walk.start] = independent(latents)
    return begun


def _resumed(new_scheduler: Callable[[], Any], latents: torch.Tensor, walk: Walk, resume: Checkpoint) -> _Progress:
    scheduler = _scheduler(new_scheduler, walk, resume.step, latents.device)
    restore_solver(scheduler, resume.solver, latents.device)
    if walk.recorder is not None and resume.evidence is not None:
        walk.recorder.sum = resume.evidence.to(latents.device, copy=True)
    return _Progress(
        resume.latents.to(latents.device, torch.float32, copy=True),
        scheduler,
        resume.step,
        dict(resume.kept),
        list(resume.passes),
        list(resume.step_seconds),
    )


def _checkpoint(at: _Progress, step: int, walk: Walk) -> Checkpoint:
    evidence = walk.recorder.sum if walk.recorder is not None else None
    return Checkpoint(
        walk.identity,
        step,
        independent(at.latents)[None],
        solver_state(at.scheduler),
        dict(at.kept),
        None if evidence is None else evidence.detach().to("cpu", copy=True),
        tuple(at.passes),
        tuple(at.seconds),
    )


def _scheduler(new_scheduler: Callable[[], Any], walk: Walk, begin: int, device: torch.device) -> Any:
    scheduler = new_scheduler()
    scheduler.set_timesteps(walk.steps, device=device)
    # Without it the scheduler would look its first index up on the device, and wait for it.
    scheduler.set_begin_index(begin)
    return scheduler


def _texts(network: Network, guidance: Guidance) -> tuple[Text, ...]:
    features = (guidance.conditional, guidance.unconditional)
    return tuple(network.text(each) for each in features if each is not None)


def _velocity(
    network: Network,
    latents: torch.Tensor,
    timestep: torch.Tensor,
    texts: tuple[Text, ...],
    scale: float,
    visible: Visible,
    gain: Gain | None,
    watch: Watch | None,
    cache: StepCache | None,
) -> torch.Tensor:
    """The guided velocity [1, C, T, H, W] in float32.

    Two passes of one, not one of two: one pass of two gives other roundings than diffusers' two. Amplification is for
    the conditional pass only.
    """
    inputs = latents.to(network.dtype)
    times = network.times(timestep.expand(latents.shape[0]))
    conditional = network.velocity(inputs, times, texts[0], visible, gain=gain, watch=watch, cache=cache)
    if len(texts) == 1:
        return conditional
    unconditional = network.velocity(inputs, times, texts[1], visible, branch="uncond", cache=cache)
    return unconditional + scale * (conditional - unconditional)


def _on_latents(mask: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """A mask on the token grid [T, h, w], repeated over the patch: [T*pT, h*pH, w*pW]."""
    for dimension, size in enumerate(patch):
        mask = mask.repeat_interleave(size, dimension)
    return mask


def independent(latents: torch.Tensor) -> torch.Tensor:
    """A copy [C, T, H, W] of a batch of one: CPU, float32, an ordinary tensor that shares no memory."""
    # Outside inference mode, or the copy couldn't be changed in place by its owner.
    with torch.inference_mode(False):
        return latents.detach()[0].to("cpu", torch.float32, copy=True)
