"""What one generation is asked for, checked at birth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import UnsupportedSettings

SCHEDULERS = ("euler", "unipc", "dpm++")
STEP_CACHES = ("none", "teacache", "magcache", "taylorseer", "pab", "fastercache", "fbcache", "seacache")
# Below, consecutive steps differ too much for one to stand in for another.
LEAST_CACHED_STEPS = 10


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of one generation, already normalized: frames are 4k+1, sizes are in pixels.

    `guidance_scale` up to 1 means no guidance: one forward pass per step instead of two. `shift` is the s of
    sigma = s*u / (1 + (s-1)*u). `step_cache` names a cache inside the generation, between its steps. Raises
    UnsupportedSettings, naming the setting.
    """

    width: int
    height: int
    frames: int
    fps: int
    steps: int
    guidance_scale: float
    shift: float
    scheduler: str = "euler"
    step_cache: str = "none"

    def __post_init__(self) -> None:
        for name in ("width", "height", "frames", "fps", "steps"):
            if getattr(self, name) < 1:
                raise UnsupportedSettings(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.frames % 4 != 1:
            raise UnsupportedSettings(f"frames must be 4k+1, not {self.frames}", hint="9, 13, 17, 81 ...")
        if not math.isfinite(self.guidance_scale) or self.guidance_scale < 0:
            raise UnsupportedSettings(f"guidance_scale must be a number of at least 0, not {self.guidance_scale}")
        if not math.isfinite(self.shift) or self.shift <= 0:
            raise UnsupportedSettings(f"shift must be a positive number, not {self.shift}")
        if self.scheduler not in SCHEDULERS:
            raise UnsupportedSettings(
                f"unknown scheduler {self.scheduler!r}", hint=f"known are {', '.join(SCHEDULERS)}"
            )
        if self.step_cache not in STEP_CACHES:
            raise UnsupportedSettings(
                f"unknown step_cache {self.step_cache!r}", hint=f"known are {', '.join(STEP_CACHES)}"
            )
        if self.step_cache != "none" and self.steps < LEAST_CACHED_STEPS:
            raise UnsupportedSettings(
                f"step_cache {self.step_cache} gains nothing at {self.steps} steps: few steps differ too much",
                hint=f"use step_cache none, or at least {LEAST_CACHED_STEPS} steps",
            )

    @property
    def guided(self) -> bool:
        """Whether each step has a second, unconditional pass (as in diffusers: above 1)."""
        return self.guidance_scale > 1.0
