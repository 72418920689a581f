"""What goes into the engine and what comes out: Request, Reuse, Result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .config import GenerationSettings
from .differ import Difference
from .evidence import Evidence
from .gains import NO_GAINS, Gains
from .regions import Regions
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
    """What a request takes from a cached source (Chorus, arXiv 2604.04451).

    `latents[k]` is the source's x[k], the latent before step k, [C, T, H, W] float32; it must hold k1 and every k in
    (k1, k2]. `similarity` is the match score m that gave k1 and k2. `regions` is needed where k2 > k1. `tokens` are the
    text slots of the words that the source's prompt lacks; `gains` amplifies them.
    """

    entry_id: int | str
    domain_key: str
    similarity: float
    k1: int
    k2: int
    latents: Mapping[int, torch.Tensor]
    regions: Regions | None = None
    tokens: tuple[int, ...] = ()
    gains: Gains = NO_GAINS
    difference: Difference | None = None

    def lineage(self) -> dict[str, Any]:
        """All that decides the result, besides the latents themselves: enough to run it again. Plain values."""
        return {
            "entry": self.entry_id,
            "m": self.similarity,
            "k1": self.k1,
            "k2": self.k2,
            "regions": self.regions.digest if self.regions is not None else None,
            "tokens": list(self.tokens),
            "gains": asdict(self.gains),
        }


@dataclass(frozen=True)
class Result:
    """A finished generation.

    `latents` is x[N], [C, T, H, W] float32 on the CPU. `trajectory` holds the x[k] that the caller asked to keep and
    that were computed here: on a hit the steps before k1 never existed, so they're absent. All tensors are copies.
    `evidence` is there if it was asked for, and the run began from noise.
    """

    latents: torch.Tensor
    trace: Trace
    trajectory: dict[int, torch.Tensor] = field(default_factory=dict)
    evidence: Evidence | None = None


def identity(request: Request, reuse: Reuse | None, keep: frozenset[int], fingerprint: str) -> str:
    """sha256 (hex) of all that decides a generation's bits, the machine left out: what a checkpoint must agree with."""
    parts = [
        request.prompt,
        request.negative_prompt,
        request.seed,
        request.domain_key,
        asdict(request.settings),
        reuse.lineage() if reuse is not None else None,
        sorted(keep),
        fingerprint,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
