"""Segmenters: where in a source's video is that which differs? A region on the token grid, bool [T, h, w]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from .differ import Difference, Scope
from .evidence import Evidence
from .regions import complement


@dataclass(frozen=True, eq=False)
class Video:
    """A finished video: frames, uint8 [F, H, W, 3], RGB; `grid` is its token grid [T, h, w]."""

    frames: npt.NDArray[np.uint8]
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Source:
    """What a segmenter may look at: the source's prompt; its evidence, where it was recorded; its video, when asked.

    `video` fetches and decodes, so it's called by who needs it only; None where the video is lost. `entry` names the
    source's entry, for who keeps what was found: the sha256 (hex) of its object.
    """

    prompt: str
    evidence: Evidence | None
    video: Callable[[], Video | None] | None = None
    entry: str = ""


class Segmenter(Protocol):
    """Finds regions."""

    def region(self, source: Source, difference: Difference) -> torch.Tensor | None:
        """M_base of the difference (Chorus, SRD), bool [T, h, w]; None where it can't be told.

        For a background it is what no object covers.
        """


class EvidenceSegmenter:
    """From the cross-attention of the source's own run: no other model, no extra pass."""

    def region(self, source: Source, difference: Difference) -> torch.Tensor | None:
        """M_base, bool [T, h, w], or None without evidence for the words."""
        if source.evidence is None or difference.scope is Scope.everything:
            return None
        found = source.evidence.of(difference.source_spans)
        if found is None:
            return None
        region = found > threshold(found)
        # Where the background differs the spans name what stays.
        return complement(region) if difference.scope is Scope.background else region


def threshold(values: torch.Tensor, bins: int = 64) -> float:
    """Otsu's threshold of values in 0..1: the one that parts them into the two most different classes."""
    counts = torch.histc(values.float(), bins, 0.0, 1.0).double()
    centers = (torch.arange(bins, dtype=torch.float64) + 0.5) / bins
    below, total = counts.cumsum(0), counts.sum()
    mean_below = (counts * centers).cumsum(0)
    above = total - below
    between = (
        below * above * (mean_below / below.clamp_min(1) - (mean_below[-1] - mean_below) / above.clamp_min(1)) ** 2
    )
    return float(centers[int(between.argmax())]) + 0.5 / bins
