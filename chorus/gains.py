"""Gains of the token-guided attention amplification: gamma(k, m), as pure numbers (README, "Method").

Source: Chorus (arXiv 2604.04451), TGAA. The paper asks for gains that fall along the steps, that are smaller the closer
the match and never below 1, and gives no formula: this one is the project's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .errors import GainError


@dataclass(frozen=True)
class Gains:
    """How far the differential tokens are amplified at most. Checked at birth: raises GainError.

    `key` multiplies their keys, `output` the cross-attention's output; both are at least 1, which is off. `until` is
    the share of all steps, in (0, 1], after which nothing is amplified; `tau` (below 1) the lowest match score that is
    reused, where the gains are largest.
    """

    key: float
    output: float
    until: float
    tau: float

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value)):
                raise GainError(f"gains: {name} must be a finite number, not {value!r}")
        if self.key < 1 or self.output < 1:
            raise GainError(f"gains: key and output must be 1 (off) or more, not {self.key} and {self.output}")
        if not 0 < self.until <= 1:
            raise GainError(f"gains: until is a share of the steps in (0, 1], not {self.until}")
        if self.tau >= 1:
            raise GainError(f"gains: tau must be below 1, not {self.tau}")

    def at(self, k: int, *, k1: int, steps: int, m: float) -> tuple[float, float]:
        """(gamma_k, gamma_o) at step `k` of `steps`, for a request that starts at `k1` with match score `m`.

        gamma = 1 + (g - 1) * (1 - m)/(1 - tau) * decay(k), with decay 1 up to k1, falling in a line to 0 at step
        until * steps, and the score's factor kept in 0..1. Exactly 1.0 where g is 1.
        """
        if not math.isfinite(m):
            raise GainError(f"the match score must be a number, not {m}")
        if not (0 <= k1 <= steps and 0 <= k <= steps):
            raise GainError(f"gains: step {k} and k1 = {k1} must lie within 0..{steps}")
        strength = _between_0_and_1((1 - m) / (1 - self.tau)) * self._decay(k, k1, steps)
        return 1 + (self.key - 1) * strength, 1 + (self.output - 1) * strength

    def _decay(self, k: int, k1: int, steps: int) -> float:
        # Rounded, or 0.07 of 100 steps would end a hair after step 7, and step 7 would still be amplified.
        end = round(self.until * steps, 9)
        return _between_0_and_1((end - k) / (end - k1)) if end > k1 else 0.0


def _between_0_and_1(value: float) -> float:
    return min(1.0, max(0.0, value))


NO_GAINS = Gains(key=1.0, output=1.0, until=1.0, tau=0.0)
