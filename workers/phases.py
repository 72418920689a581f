"""Where a job's time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Phases:
    """Seconds by phase, and since the start."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of a block to `phase`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def move(self, phase: str, part: str, seconds: float) -> None:
        """Count some of a phase's seconds as another's."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) - seconds
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began
