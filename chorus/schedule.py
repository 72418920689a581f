"""Noise levels and the scheduler that walks them.

sigma = s*u / (1 + (s-1)*u) with u = 1, (N-1)/N, ..., 1/N and a last sigma of 0; timesteps are 1000*sigma. That is
Wan2.1's own schedule (`linspace(1, 0, N+1)[:N]`), that of the 4-step distilled Wan, and the built-in model's.
diffusers' FlowMatchEulerDiscreteScheduler, left to itself, spaces its steps down to an already shifted 1/1000, and
shifts that again: at 4 steps and shift 3 its last step goes from .009 to 0 and does nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from .config import SCHEDULERS
from .errors import UnsupportedSettings


class EvenEulerScheduler(FlowMatchEulerDiscreteScheduler):
    """diffusers' flow-matching Euler scheduler with evenly spaced u. Works in any diffusers pipeline."""

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: Any = None,
        sigmas: list[float] | None = None,
        mu: float | None = None,
        timesteps: list[float] | None = None,
    ) -> None:
        """As diffusers' method; where only a number of steps is given, u is spaced evenly from 1 to 1/N."""
        if sigmas is None and timesteps is None and num_inference_steps is not None:
            sigmas = even_levels(num_inference_steps)
        super().set_timesteps(num_inference_steps, device=device, sigmas=sigmas, mu=mu, timesteps=timesteps)


def even_levels(steps: int) -> list[float]:
    """The N values of u that N steps start from: 1, (N-1)/N, ..., 1/N."""
    return [float(u) for u in np.linspace(1.0, 0.0, steps + 1)[:steps]]


def noise_levels(steps: int, shift: float) -> tuple[float, ...]:
    """sigma[0..N] of N even steps, N+1 values from 1 down to 0."""
    return tuple(shift * u / (1 + (shift - 1) * u) for u in [*even_levels(steps), 0.0])


def make_scheduler(name: str, shift: float) -> Any:
    """A fresh scheduler (they hold state, so one per request), of config.SCHEDULERS. Raises UnsupportedSettings."""
    if name == "euler":
        return EvenEulerScheduler(shift=shift)
    flow: dict[str, Any] = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    # The multistep ones are imported when asked for: few requests need them. Their own levels are a thousandth below
    # those of `noise_levels`: they start at the shifted .999, for at 1 the logarithm that they step by is infinite.
    if name == "unipc":
        from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

        return UniPCMultistepScheduler(**flow)
    if name == "dpm++":
        from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

        return DPMSolverMultistepScheduler(**flow)
    raise UnsupportedSettings(f"unknown scheduler {name!r}", hint=f"known are {', '.join(SCHEDULERS)}")
