"""What each generation records: counted, not estimated (README, "Method")."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Trace:
    """The record of one generation.

    cache_result     'miss' or 'hit'
    entry, m         the source entry and its match score; None on a miss
    k1, k2           the steps really used: [0, k1) skipped, [k1, k2) by region, the rest in full
    kind, scope      what differs between the source's prompt and this one; None on a miss
    phrases          (the source's, this prompt's) words for what differs
    tokens           the text slots that were amplified
    gains            (gamma_k, gamma_o) of each computed step
    visible          share of the tokens that each computed step computed
    regions          sha256 (hex) of the masks, None where there was no stage 2
    forward_passes   calls of the transformer in which a block ran, both guidance branches
    tokens_*         tokens that went through the transformer's blocks, over all passes; total = without any reuse.
                     Where a step cache lets some blocks of a pass run, it's the mean over the blocks
    flops_*          floating point operations of the transformer, counted from shapes; total = without any reuse
    prompt_tokens    tokens of the prompt, before cutting it to the model's text slots
    seconds          per phase: encode, denoise, and what the caller adds (decode, mux, upload ...)
    step_seconds     per computed step
    compilations     how often torch.compile compiled a block for this generation; None where it isn't used
    peak_memory      bytes: of the device where it can tell, else of the process
    backend          device, dtype, attention, threads and library versions
    """

    cache_result: str
    entry: int | str | None
    m: float | None
    k1: int
    k2: int
    kind: str | None
    scope: str | None
    phrases: tuple[str, str] | None
    tokens: tuple[int, ...]
    gains: tuple[tuple[float, float], ...]
    visible: tuple[float, ...]
    regions: str | None
    steps_total: int
    steps_computed: int
    steps_skipped: int
    forward_passes: int
    tokens_computed: int
    tokens_total: int
    flops_computed: int
    flops_total: int
    prompt_tokens: int
    prompt_truncated: bool
    seconds: Mapping[str, float]
    step_seconds: tuple[float, ...]
    peak_memory: int
    backend: Mapping[str, str | int] = field(default_factory=dict)
    compilations: int | None = None

    def timed(self, **seconds: float) -> Trace:
        """The same trace with further phases timed, e.g. `trace.timed(decode=0.01, mux=0.02)`."""
        return dataclasses.replace(self, seconds={**self.seconds, **seconds})

    def details(self) -> dict[str, Any]:
        """What reuse consisted of, as plain values: the part that has no columns of its own in a database."""
        names = (
            "phrases",
            "tokens",
            "gains",
            "visible",
            "regions",
            "prompt_tokens",
            "prompt_truncated",
            "step_seconds",
        )
        record = self.as_dict()
        counted = {} if self.compilations is None else {"compilations": self.compilations}
        return {name: record[name] for name in names} | counted

    def as_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return record | {
            "seconds": dict(self.seconds),
            "step_seconds": list(self.step_seconds),
            "phrases": None if self.phrases is None else list(self.phrases),
            "tokens": list(self.tokens),
            "gains": [list(pair) for pair in self.gains],
            "visible": list(self.visible),
            "backend": dict(self.backend),
        }
