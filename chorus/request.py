"""What goes into the engine and what comes out: Request, Reuse, Result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .config import GenerationSettings
from .trace import Trace


@dataclass(frozen=True)
class Request:
    """One video to make.

    `prompt` and `negative_prompt` are used as they are: who makes the request cleans them. `seed` is 0..2**63-1.
    `domain_key` names everything that must be equal for reuse to be legal (README, "Method").
    """

    prompt: str
    seed: int
    settings: GenerationSettings
    domain_key: str
    negative_prompt: str = ""


@dataclass(frozen=True)
class Reuse:
    """What a request takes from a cached source (Chorus, arXiv 2604.04451, stage 1: full reuse).

    `latents[k]` is the source's x[k], the latent before step k, [C, T, H, W] float32; it must hold k1.
    `similarity` is the match score m that gave k1 and k2.
    """

    entry_id: int | str
    domain_key: str
    similarity: float
    k1: int
    k2: int
    latents: Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """A finished generation.

    `latents` is x[N], [C, T, H, W] float32 on the CPU. `trajectory` holds the x[k] that the caller asked to keep and
    that were computed here: on a hit the steps before k1 never existed, so they're absent. All tensors are copies.
    """

    latents: torch.Tensor
    trace: Trace
    trajectory: dict[int, torch.Tensor] = field(default_factory=dict)
