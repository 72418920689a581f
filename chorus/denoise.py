"""The one denoising loop, for every mode: it calls the transformer and the scheduler, and nothing else.

x[k] is the latent before step k, x[0] the noise, x[N] the clean latent. With a start at k1 > 0 the steps before k1
are never run (stage 1, full reuse). Without one, the loop does what diffusers' WanPipeline does, in the same order of
operations, so that the results are equal bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch

from .errors import Stopped


@dataclass(frozen=True)
class Guidance:
    """Text features [1, L, D] of both passes; without `unconditional` each step has one pass."""

    conditional: torch.Tensor
    unconditional: torch.Tensor | None
    scale: float


@dataclass(frozen=True)
class Denoised:
    """What the loop made: x[N] [1, C, T, H, W], the kept x[k] as `independent` copies, and counts."""

    latents: torch.Tensor
    kept: dict[int, torch.Tensor]
    forward_passes: int
    step_seconds: tuple[float, ...]


def denoise(
    transformer: Any,
    scheduler: Any,
    latents: torch.Tensor,
    guidance: Guidance,
    steps: int,
    *,
    start: int = 0,
    keep: Set[int] = frozenset(),
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[int, int], None] = lambda done, steps: None,
) -> Denoised:
    """Walk from x[start] = `latents` [1, C, T, H, W] (float32, on the transformer's device) to x[steps].

    `scheduler` must be fresh; a multistep solver begins at `start` as it does at step 0, with first order.
    `should_stop` is asked before every step and raises Stopped; `on_step(done, steps)` is called after each.
    """
    scheduler.set_timesteps(steps, device=latents.device)
    # Without it the scheduler would look its first index up on the device, and wait for it.
    scheduler.set_begin_index(start)
    kept: dict[int, torch.Tensor] = {}
    seconds: list[float] = []
    passes = 0
    if start in keep:
        kept[start] = independent(latents)
    for k in range(start, steps):
        if should_stop():
            raise Stopped(k, steps)
        began = time.perf_counter()
        timestep = scheduler.timesteps[k]
        velocity, count = _predict(transformer, latents, timestep, guidance)
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
        passes += count
        seconds.append(time.perf_counter() - began)
        if k + 1 in keep:
            kept[k + 1] = independent(latents)
        on_step(k + 1, steps)
    return Denoised(latents, kept, passes, tuple(seconds))


def _predict(
    transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, guidance: Guidance
) -> tuple[torch.Tensor, int]:
    """The model's velocity [1, C, T, H, W] in float32, and the number of passes.

    Two passes of one, not one of two: one pass of two gives other roundings than diffusers' two.
    """
    inputs = latents.to(transformer.dtype)
    timesteps = timestep.expand(latents.shape[0])
    conditional = transformer(inputs, timesteps, guidance.conditional, return_dict=False)[0].float()
    if guidance.unconditional is None:
        return conditional, 1
    unconditional = transformer(inputs, timesteps, guidance.unconditional, return_dict=False)[0].float()
    return unconditional + guidance.scale * (conditional - unconditional), 2


def independent(latents: torch.Tensor) -> torch.Tensor:
    """A copy [C, T, H, W] of a batch of one: CPU, float32, an ordinary tensor that shares no memory."""
    # Outside inference mode, or the copy couldn't be changed in place by its owner.
    with torch.inference_mode(False):
        return latents.detach()[0].to("cpu", torch.float32, copy=True)
