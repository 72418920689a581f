"""Scores of a model by the checker: `python -m chorus_batch.chorus.tiny.evaluate --help`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .captions import SAY_SIZE, caption, plain_caption
from .checker import Reading, read_videos, shares
from .checkpoint import load_transformer
from .codec import CHANNELS, PATCH
from .decoder import SharpCodec, load_codec
from .features import SLOTS, BatchEncoder
from .flow import sample
from .options import add_options, read_options
from .sheet import save_sheet
from .world import Curriculum, Scene, draw_scenes

# What is asked: "starter" is the part of the world that the first weights were trained on.
SUITES = ("starter", "world", "combinations", "templates")
STARTER = Curriculum(textured=0.0, patterned=0.0, neighbour=0.0, bounce=0.0, star=0.0)


@dataclass(frozen=True)
class Question:
    """A scene and the words that ask for it; `says_size`: whether they tell the object's size."""

    scene: Scene
    caption: str
    says_size: bool = True


@dataclass(frozen=True)
class Evaluation:
    """What was asked and what the videos show."""

    questions: list[Question]
    readings: list[Reading]

    def shares(self) -> dict[str, float]:
        """The share right in each attribute (see `checker.shares`); of size, where the caption tells it."""
        result = shares(self.readings, [q.scene for q in self.questions])
        said = [r.size == q.scene.size for q, r in zip(self.questions, self.readings, strict=True) if q.says_size]
        return result | {"size": float(np.mean(said)) if said else math.nan}

    def scores(self) -> dict[str, float]:
        """The shares to report: rounded, and without what no caption told."""
        return {name: round(share, 4) for name, share in self.shares().items() if not math.isnan(share)}


def draw_questions(suite: str, count: int, seed: int, curriculum: Curriculum | None = None) -> list[Question]:
    """Scenes and captions from seeds that training does not use; two of the suites ask for what it held out."""
    rng = np.random.default_rng((seed, 99, SUITES.index(suite)))
    curriculum = STARTER if suite == "starter" else curriculum or Curriculum(held_out=suite == "combinations")
    scenes = draw_scenes(count, rng, curriculum)
    if suite == "starter":
        return [Question(s, plain_caption(s, say_size=False), says_size=False) for s in scenes]
    said = rng.random(count) < SAY_SIZE
    return [
        Question(s, caption(s, rng, held_out=suite == "templates", say_size=float(say)), bool(say))
        for s, say in zip(scenes, said, strict=True)
    ]


@dataclass(frozen=True)
class Sampling:
    """How videos are made, as the shipped model's card says unless told otherwise; `seed` names the noise."""

    canvas: int = 128
    steps: int = 20
    guidance: float = 2.0
    shift: float = 5.0
    seed: int = 1000
    batch: int = 16


@dataclass(frozen=True)
class Generator:
    """Captions to videos: plain sampling, everything in batches."""

    model: torch.nn.Module
    codec: SharpCodec
    encoder: BatchEncoder

    @torch.no_grad()
    def answer(self, captions: Sequence[str], sampling: Sampling) -> torch.Tensor:
        """Videos [n, 3, 9, canvas, canvas] in -1..1, on the CPU."""
        device, side = self.encoder.device, sampling.canvas // PATCH
        empty = self.encoder.encode_all([""])
        generator = torch.Generator().manual_seed(sampling.seed)
        videos = []
        for start in range(0, len(captions), sampling.batch):
            text = self.encoder.encode_all(captions[start : start + sampling.batch])
            noise = torch.randn(len(text), CHANNELS, 3, side, side, generator=generator).to(device)
            latents = sample(
                self.model,
                noise,
                text,
                empty,
                steps=sampling.steps,
                guidance=sampling.guidance,
                shift=sampling.shift,
            )
            videos.append(self.codec.decode(latents).clamp(-1, 1).cpu())
        return torch.cat(videos)

    def evaluate(self, questions: Sequence[Question], sampling: Sampling, sheet: Path | None = None) -> Evaluation:
        """Readings of the answers; `sheet`: where to leave a contact sheet of the first 24."""
        videos = self.answer([q.caption for q in questions], sampling)
        if sheet is not None:
            save_sheet(videos[:24], sheet)
        return Evaluation(list(questions), read_videos(videos))


def interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share seen in `count` trials."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return middle - half, middle + half


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Checker scores of a model, one JSON line.")
    parser.add_argument("--model", type=Path, required=True, help="a diffusers transformer folder or a training folder")
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--decoder", type=Path)
    parser.add_argument("--suite", choices=SUITES, default="world")
    parser.add_argument("--count", type=int, default=96)
    add_options(parser, Sampling)
    parser.add_argument("--text-slots", type=int, default=SLOTS, help="as the model was trained")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet of the first 24 videos")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    generator = Generator(
        load_transformer(options.model, options.device),
        load_codec(options.codec, options.decoder, options.device),
        BatchEncoder(options.device, options.text_slots),
    )
    questions = draw_questions(options.suite, options.count, options.seed)
    evaluation = generator.evaluate(questions, read_options(options, Sampling), options.sheet)
    scores = evaluation.scores()
    low, high = interval(scores["all"], options.count)
    print(json.dumps(scores | {"all_95": [round(low, 3), round(high, 3)], "count": options.count}))


if __name__ == "__main__":
    main()
