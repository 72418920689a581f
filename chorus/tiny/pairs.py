"""How much of a trajectory another prompt may reuse, by kind of difference: `python -m chorus_batch.chorus.tiny.pairs`.

Each pair of prompts differs in one attribute. The second prompt starts from the point that the first had reached after
K1 steps and walks the rest alone, without any repair: the yardstick for everything that is meant to do better.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .captions import caption
from .checker import ATTRIBUTES, Reading, read_videos
from .checkpoint import load_transformer
from .codec import CHANNELS, PATCH
from .decoder import load_codec
from .evaluate import Generator, Question, Sampling
from .features import SLOTS, BatchEncoder
from .flow import sigma_grid, walk
from .model import WEIGHTS
from .options import add_options, read_options
from .world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, TEXTURES, Curriculum, Scene, draw_scenes, is_held_out

KINDS = {
    "colour": tuple(COLOURS),
    "background": tuple(BACKGROUNDS),
    "motion": MOTIONS,
    "shape": SHAPES,
    "texture": TEXTURES,
}


@dataclass(frozen=True)
class Pair:
    """Two questions in the same words, but for what tells `kind`."""

    kind: str
    source: Question
    target: Question


def draw_pairs(kind: str, count: int, seed: int, curriculum: Curriculum | None = None) -> list[Pair]:
    """Pairs from seeds that training does not use."""
    rng = np.random.default_rng((seed, 77, list(KINDS).index(kind)))
    pairs: list[Pair] = []
    while len(pairs) < count:
        source = draw_scenes(1, rng, curriculum)[0]
        changed = _changed(source, kind, rng)
        wording = int(rng.integers(2**31))
        questions = [Question(s, caption(s, np.random.default_rng(wording))) for s in (source, changed)]
        pairs.append(Pair(kind, *questions))
    return pairs


def _changed(scene: Scene, kind: str, rng: np.random.Generator) -> Scene:
    while True:
        value = KINDS[kind][int(rng.integers(len(KINDS[kind])))]
        colour = value if kind == "colour" else scene.colour
        background = value if kind == "background" else scene.background
        shape = value if kind == "shape" else scene.shape
        near = scene.neighbour.colour if scene.neighbour else ""
        if value == getattr(scene, kind) or colour == background or near in (colour, background):
            continue
        if not is_held_out(colour, shape):
            changes: dict[str, Any] = {kind: value}
            return replace(scene, **changes)


@dataclass(frozen=True)
class Outcome:
    """Whether a target's video is right in the attribute that differs, and in all others of the five."""

    changed: bool
    kept: bool


@torch.no_grad()
def reuse(
    generator: Generator, pairs: Sequence[Pair], sampling: Sampling, depths: Sequence[int]
) -> dict[int, list[Outcome]]:
    """By K1: the outcome of each pair."""
    side = sampling.canvas // PATCH
    noise = torch.randn(len(pairs), CHANNELS, 3, side, side, generator=torch.Generator().manual_seed(sampling.seed)).to(
        generator.encoder.device
    )
    empty = generator.encoder.encode_all([""])
    sources, targets = (
        generator.encoder.encode_all([getattr(p, end).caption for p in pairs]) for end in ("source", "target")
    )
    sigmas = sigma_grid(sampling.steps, sampling.shift)
    path = walk(generator.model, noise, sources, empty, sigmas, sampling.guidance)
    outcomes = {}
    for depth in depths:
        latents = walk(generator.model, path[depth], targets, empty, sigmas[depth:], sampling.guidance)[-1]
        readings = read_videos(generator.codec.decode(latents))
        outcomes[depth] = [outcome_of(r, p) for r, p in zip(readings, pairs, strict=True)]
    return outcomes


def outcome_of(reading: Reading, pair: Pair) -> Outcome:
    """What a reading of the target's video says."""
    agreed, kind = reading.agrees(pair.target.scene), pair.kind
    return Outcome(agreed[kind], all(agreed[name] for name in ATTRIBUTES[:5] if name != kind))


def shares(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The share of targets right in the changed attribute, in the other four, and in all five."""
    return {
        "changed": float(np.mean([o.changed for o in outcomes])),
        "kept": float(np.mean([o.kept for o in outcomes])),
        "all": float(np.mean([o.changed and o.kept for o in outcomes])),
    }


def deepest(outcomes: Mapping[int, Sequence[Outcome]], tolerance: float) -> int:
    """The largest K1 up to which no depth loses more than `tolerance` of what the shallowest gets all right."""
    depths = sorted(outcomes)
    right = {depth: shares(outcomes[depth])["all"] for depth in depths}
    fine = itertools.takewhile(lambda depth: right[depth] >= right[depths[0]] - tolerance - 1e-9, depths)
    return max(fine)


def main(arguments: list[str] | None = None) -> None:
    """The command: a JSON line for each kind and depth, then the depth that every other pair would
    choose and what it gets right in the pairs left."""
    parser = argparse.ArgumentParser(description="Accuracy against reused steps, by kind of difference.")
    parser.add_argument("--model", type=Path, default=WEIGHTS / "transformer")
    parser.add_argument("--codec", type=Path, default=WEIGHTS / "codec.safetensors")
    parser.add_argument("--decoder", type=Path, default=WEIGHTS / "decoder.safetensors")
    parser.add_argument("--text-slots", type=int, default=SLOTS, help="as the model was trained")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 4, 8, 12, 14, 16])
    parser.add_argument("--count", type=int, default=32, help="pairs of each kind")
    parser.add_argument("--tolerance", type=float, default=0.02)
    add_options(parser, Sampling)
    parser.set_defaults(seed=2000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    encoder = BatchEncoder(slots=options.text_slots)
    generator = Generator(load_transformer(options.model), load_codec(options.codec, options.decoder), encoder)
    sampling = read_options(options, Sampling)
    for kind in options.kinds:
        outcomes = reuse(generator, draw_pairs(kind, options.count, options.seed), sampling, options.depths)
        for depth, found in outcomes.items():
            _print({"kind": kind, "k1": depth}, found)
        chosen = deepest({depth: found[::2] for depth, found in outcomes.items()}, options.tolerance)
        _print({"kind": kind, "chosen": chosen, "pairs": "left"}, outcomes[chosen][1::2])


def _print(what: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    rounded = {name: round(value, 3) for name, value in shares(outcomes).items()}
    print(json.dumps(what | rounded | {"count": len(outcomes)}), flush=True)


if __name__ == "__main__":
    main()
