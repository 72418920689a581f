"""Measures on a model's own generations what two step caches have to know of its weights.

TeaCache: a polynomial from how far the time's embedding moves between two steps to how far the output does. MagCache:
the magnitude of what the blocks add in each step, relative to the step before.
`python -m chorus_batch.chorus.cachefit` prints both; they belong in teacache.FITTED and stepcache.MAGNITUDES.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from diffusers.hooks.mag_cache import MagCacheConfig

from .config import GenerationSettings
from .denoise import Guidance, Walk, denoise
from .schedule import make_scheduler
from .stepcache import MagCache

if TYPE_CHECKING:
    from .engine import Engine

DEGREE = 4
PROMPTS = (
    "a red circle moves left over a gray background",
    "a large striped blue star bounces on a checkered pink background",
    "on a fading white background, a spotted green ring grows",
    "the small purple square next to a small cyan circle falls on a black background",
)


@dataclass(frozen=True, eq=False)
class Measured:
    """One generation of N steps, P passes each (1 or 2): all values are relative to the step before.

    `distances` [N-1] of the time's projected embedding and `changes` [P, N-1] of the output are relative L1 distances;
    `magnitudes` [N], of what the blocks add in conditional passes, begin with a 1.
    """

    distances: npt.NDArray[np.float64]
    changes: npt.NDArray[np.float64]
    magnitudes: npt.NDArray[np.float64]


def measure(engine: Engine, prompt: str, settings: GenerationSettings, seed: int = 0) -> Measured:
    """Run a generation in full, and watch it."""
    model, network = engine.model, engine.network
    transformer = model.transformer
    noise = torch.randn((1, *model.latent_shape(settings)), generator=torch.Generator().manual_seed(seed))
    device = next(transformer.parameters()).device
    cache = _Watching(transformer, model.fingerprint, settings.steps)
    with torch.inference_mode(), cache.enabled():
        times, outputs = _Outputs(transformer.condition_embedder.time_proj), _Outputs(transformer.proj_out)
        guidance = Guidance(
            model.encode(prompt), model.encode("") if settings.guided else None, settings.guidance_scale
        )
        walk = Walk(settings.steps, guidance, cache=cache)
        with times.watched(), outputs.watched():
            denoise(network, lambda: make_scheduler(settings.scheduler, settings.shift), noise.to(device), walk)
        magnitudes = cache.magnitudes()
    passes = len(outputs.seen) // settings.steps
    changes = [_distances(outputs.seen[branch::passes]) for branch in range(passes)]
    return Measured(_distances(times.seen), np.array(changes), np.array(magnitudes))


def fit(measured: Sequence[Measured]) -> tuple[float, ...]:
    """TeaCache's polynomial, highest power first, by least squares over all passes of all generations."""
    x = np.concatenate([np.tile(each.distances, len(each.changes)) for each in measured])
    y = np.concatenate([each.changes.ravel() for each in measured])
    return tuple(float(c) for c in np.polyfit(x, y, DEGREE))


class _Watching(MagCache):
    """diffusers' own measuring: MagCache that skips nothing."""

    def _configure(self, fingerprint: str) -> MagCacheConfig:
        # At the end of what it takes for all steps it would print and forget.
        return MagCacheConfig(calibrate=True, num_inference_steps=self._steps + 1)

    def magnitudes(self) -> list[float]:
        """Of the conditional passes so far."""
        with self._transformer.cache_context("cond"):
            return list(self._hooks[0].state_manager.get_state().calibration_ratios)


class _Outputs:
    """What a module gave, call by call, on the CPU."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.seen: list[torch.Tensor] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        handle = self._module.register_forward_hook(lambda module, args, out: self.seen.append(out.float().cpu()))
        try:
            yield
        finally:
            handle.remove()


def _distances(values: Sequence[torch.Tensor]) -> npt.NDArray[np.float64]:
    """Relative L1 distance of each value from the one before."""
    pairs = zip(values[1:], values, strict=False)
    return np.array([float((b - a).abs().mean() / a.abs().mean()) for b, a in pairs])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    from .engine import Engine
    from .model import BUILTIN

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUILTIN, help="the built-in model, or a folder in its layout")
    parser.add_argument(
        "--prompt", action="append", help=f"may be given several times (default: {len(PROMPTS)} of them)"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--shift", type=float, default=5.0)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--size", default="128x128", help="width x height of the videos")
    parser.add_argument("--frames", type=int, default=9)
    options = parser.parse_args(arguments)
    width, height = map(int, options.size.split("x"))
    settings = GenerationSettings(width, height, options.frames, 8, options.steps, options.guidance, options.shift)
    engine = Engine.load(options.model)
    measured = [measure(engine, prompt, settings, seed) for seed, prompt in enumerate(options.prompt or PROMPTS)]
    print(f"weights {engine.fingerprint[:12]}, {len(measured)} generations of {options.steps} steps")
    print(f"distances {measured[0].distances.min():.4f} to {measured[0].distances.max():.4f}")
    print("polynomial", tuple(float(f"{c:.9g}") for c in fit(measured)))
    magnitudes = np.mean([each.magnitudes for each in measured], axis=0)
    print("magnitudes", tuple(round(float(m), 5) for m in magnitudes))


if __name__ == "__main__":
    main()
