"""Distil the guided many-step model into a few-step one: `python -m chorus_batch.chorus.tiny.distill --help`.

The student walks its own few Euler steps without guidance; from each point that it reaches, the teacher walks the same
stretch of sigmas in several guided steps, and where the teacher arrives is the student's target. Learning on its own
path, it also learns to correct its own errors. `--initial` names the teacher; the student starts as its copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .captions import caption
from .checkpoint import load_transformer
from .flow import guided, predict, sigma_grid
from .processes import Processes
from .train import Trainer, Training, command
from .world import draw_scenes


@dataclass(frozen=True)
class Distillation(Training):
    """`shift` is the student's: the sigmas that four-step domains use."""

    shift: float = 5.0
    student_steps: int = 4
    substeps: int = 8  # the teacher's from noise to video, shared by length in sigma; at least two a stretch
    guidance: float = 2.5
    muon_lr: float = 0.004
    adam_lr: float = 4e-4
    average: float = 0.99
    batch: int = 16
    evaluate_steps: int = 4
    evaluate_guidance: float = 1.0


class Distiller(Trainer):
    """A trainer whose loss is the distance to the guided teacher."""

    training: Distillation

    def __init__(self, distillation: Distillation, processes: Processes) -> None:
        """The student and its teacher, both from `initial`."""
        super().__init__(distillation, processes)
        teacher = load_transformer(Path(distillation.initial), distillation.device)
        self.teacher: Any = torch.compile(teacher, dynamic=False) if distillation.compile else teacher
        self.empty = self.text.encode_all([""])

    def backward(self, size: int, canvas: int, seed: tuple[int, ...]) -> float:
        """Gradients along one walk of the student; returns the mean loss of its steps."""
        x, text, _ = self.draw(size, canvas, seed)
        total = 0.0
        for now, then in pairwise(self.sigmas()):
            loss, v = self.regress(x, now, then, text)
            loss = loss / self.training.student_steps
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            x = x + (then - now) * v
        return total

    def sigmas(self) -> torch.Tensor:
        """[student_steps + 1], the student's own."""
        return sigma_grid(self.training.student_steps, self.training.shift).to(self.training.device)

    def draw(self, size: int, canvas: int, seed: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
        """Where `size` walks start: noise [size, 16, 3, canvas/4, canvas/4], text [size, slots, d], and the generator
        of what else is random in them."""
        options, rng = self.training, np.random.default_rng(seed)
        scenes = draw_scenes(size, rng, options.curriculum)
        text = self.text.encode_all([caption(s, rng, drop_words=0.1) for s in scenes])
        generator = torch.Generator().manual_seed(hash((*seed, 2)) % 2**62)
        noise = torch.randn((size, 16, 3, canvas // 4, canvas // 4), generator=generator)
        return noise.to(options.device), text, generator

    def regress(
        self, x: torch.Tensor, now: torch.Tensor, then: torch.Tensor, text: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The student's squared distance from the teacher's mean velocity over a stretch of sigmas, and its own
        velocity there, without gradients."""
        with self.precision():
            target = (self.arrive(x, now, then, text) - x) / (then - now)
            v = predict(self.learner.forward, x, now.expand(len(x)), text)
        return (v - target).square().mean(), v.detach()

    @torch.no_grad()
    def arrive(self, x: torch.Tensor, start: torch.Tensor, end: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Where the guided teacher gets from `x` at sigma `start`, at sigma `end`."""
        options = self.training
        # Even in u, like the sampler's own grid, so that the last stretch is not one leap.
        u = [s / (options.shift - (options.shift - 1) * s) for s in (start, end)]
        count = max(2, round(options.substeps * float(start - end)))
        for i in range(count):
            a, b = (u[0] + (u[1] - u[0]) * j / count for j in (i, i + 1))
            now, then = (options.shift * p / (1 + (options.shift - 1) * p) for p in (a, b))
            x = x + (then - now) * guided(self.teacher, x, now.expand(len(x)), text, self.empty, options.guidance)
        return x


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    description = "Distil the guided teacher (--initial) into a few steps without guidance."
    command(Distiller, Distillation, description, arguments)


if __name__ == "__main__":
    main()
