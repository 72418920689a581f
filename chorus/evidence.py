"""Evidence: where in its video each word of a prompt was drawn, read from the run's own cross-attention.

Recorded while a source is generated, for its content words, averaged over heads, some middle layers and some steps;
kept beside its latents. It needs no other model and no extra pass (engine: README, "Method").
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch

from . import lexicon
from .attention import Watch

Span = tuple[int, int]


def content_words(prompt: str) -> list[Span]:
    """The spans of the words that may name something to be seen: all but function words."""
    return [span for span, word in lexicon.words_of(prompt) if word not in lexicon.FUNCTION_WORDS]


def recorded_layers(layers: int) -> frozenset[int]:
    """The middle third: early layers don't know yet what is where, late ones draw."""
    return frozenset(range(layers // 3, layers - layers // 3))


def recorded_steps(sigmas: Sequence[float]) -> frozenset[int]:
    """The steps from the noise level at which objects have their places to where only detail is left."""
    return frozenset(k for k, sigma in enumerate(sigmas[:-1]) if 0.4 <= sigma <= 0.9) or frozenset({len(sigmas) - 2})


@dataclass(frozen=True, eq=False)
class Evidence:
    """Maps [words, T, h, w] on the token grid, uint8, each from 0 to 255 over its own range; `spans` of the words."""

    spans: tuple[Span, ...]
    maps: torch.Tensor

    def of(self, spans: Sequence[Span]) -> torch.Tensor | None:
        """The mean map [T, h, w], float32 in 0..1, of the words that overlap `spans`; None if there's none."""
        chosen = [i for i, (a, b) in enumerate(self.spans) if any(a < end and start < b for start, end in spans)]
        if not chosen:
            return None
        return self.maps[chosen].float().mean(0) / 255


@dataclass(frozen=True)
class Word:
    """A word of the prompt: its characters' span, and the text tokens that it became."""

    span: Span
    tokens: tuple[int, ...]


class Recorder:
    """Sums up attention maps during one run."""

    def __init__(self, words: Sequence[Word], layers: Set[int], steps: Set[int]) -> None:
        self._words = [word for word in words if word.tokens]
        self._layers = layers
        self._steps = steps
        self.sum: torch.Tensor | None = None  # the maps so far, [words, N] float32: what a checkpoint has to keep

    def at(self, step: int) -> Watch | None:
        """What watches the conditional pass of a step; None where nothing is to be recorded."""
        return self._add if self._words and step in self._steps else None

    def evidence(self, grid: tuple[int, int, int]) -> Evidence | None:
        """What was recorded, on the token grid; None if nothing was."""
        if self.sum is None:
            return None
        least, most = self.sum.amin(1, keepdim=True), self.sum.amax(1, keepdim=True)
        scaled = (self.sum - least) / (most - least).clamp_min(torch.finfo(torch.float32).tiny)
        # Outside inference mode, or the copy couldn't be changed in place by its owner.
        with torch.inference_mode(False):
            maps = (scaled * 255).round().to("cpu", torch.uint8, copy=True).reshape(-1, *grid)
        return Evidence(tuple(word.span for word in self._words), maps)

    def _add(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> None:
        if layer not in self._layers:
            return
        share = torch.zeros(key.shape[1], query.shape[1], device=query.device)
        # Head by head: all at once would be gigabytes for a large model.
        for head in range(query.shape[2]):
            scores = query[0, :, head].float() @ key[0, :, head].float().T / query.shape[3] ** 0.5
            share += scores.softmax(1).T
        maps = torch.stack([share[list(word.tokens)].mean(0) for word in self._words])
        self.sum = maps if self.sum is None else self.sum + maps
