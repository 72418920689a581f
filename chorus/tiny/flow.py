"""Rectified flow on the model's sigmas: training pairs and the plain Euler sampler.

v = noise - x0, x_sigma = (1 - sigma) x0 + sigma noise, sigma = s u / (1 + (s - 1) u), timestep = 1000 sigma.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def shifted(u: torch.Tensor, shift: float | torch.Tensor) -> torch.Tensor:
    """Sigmas of evenly spread u."""
    return shift * u / (1 + (shift - 1) * u)


def draw_shifts(n: int, least: float, most: float, generator: torch.Generator) -> torch.Tensor:
    """[n] shifts from `least` to `most`, even in their logarithm: a large one trains where things are, which is settled
    in much noise; a small one their edges and textures."""
    if least == most:
        return torch.full((n,), most)
    return least * (most / least) ** torch.rand(n, generator=generator)


def draw_sigmas(shifts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One sigma for each of the `shifts` [n]: a logit-normal u, shifted."""
    return shifted(torch.sigmoid(torch.randn(len(shifts), generator=generator)), shifts)


def sigma_grid(steps: int, shift: float) -> torch.Tensor:
    """[steps + 1] sigmas from 1 to 0."""
    return shifted(torch.linspace(1, 0, steps + 1), shift)


def predict(model: Any, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """v at x [n, 16, t, h, w], in float32; `sigma` [n]."""
    v: torch.Tensor = model(hidden_states=x, timestep=1000 * sigma, encoder_hidden_states=text, return_dict=False)[0]
    return v.float()


def guided(
    model: Any, x: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor, empty: torch.Tensor, guidance: float
) -> torch.Tensor:
    """v_u + g (v_c - v_u), both halves in one batch; `empty` [1, slots, d]. Guidance 1 skips the unconditional half."""
    if guidance == 1.0:
        return predict(model, x, sigma, text)
    both = predict(model, x.repeat(2, 1, 1, 1, 1), sigma.repeat(2), torch.cat([text, empty.expand_as(text)]))
    conditional, unconditional = both.chunk(2)
    return unconditional + guidance * (conditional - unconditional)


def noised(x: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """x_sigma of the clean `x` [n, 16, t, h, w]; `sigma` [n]."""
    blend = spread(sigma)
    return (1 - blend) * x + blend * noise


def spread(sigma: torch.Tensor) -> torch.Tensor:
    """[n] to [n, 1, 1, 1, 1], to be multiplied with latents."""
    return sigma[:, None, None, None, None]


@torch.no_grad()
def sample(
    model: Any,
    noise: torch.Tensor,
    text: torch.Tensor,
    empty: torch.Tensor,
    *,
    steps: int,
    guidance: float,
    shift: float = 3.0,
) -> torch.Tensor:
    """Plain Euler from `noise` at sigma 1 to latents at sigma 0."""
    return walk(model, noise, text, empty, sigma_grid(steps, shift), guidance)[-1]


@torch.no_grad()
def walk(
    model: Any, x: torch.Tensor, text: torch.Tensor, empty: torch.Tensor, sigmas: torch.Tensor, guidance: float
) -> list[torch.Tensor]:
    """Every point of the Euler walk from `x` at the first sigma to the last: len(sigmas) of them, `x` included."""
    points = [x]
    for now, then in pairwise(sigmas.to(x.device)):
        x = x + (then - now) * guided(model, x, now.expand(len(x)), text, empty, guidance)
        points.append(x)
    return points
