"""Train the built-in model: `python -m chorus_batch.chorus.tiny.train --help`.

Resumable: a run started again with the same `--out` goes on where its last checkpoint was. Several processes (start
with `torchrun`) share each batch. Judge a run by its checker scores and contact sheets, never by the loss.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional

from .checkpoint import load_checkpoint, load_transformer, save_checkpoint, save_transformer
from .dataset import draw_batch
from .decoder import load_codec
from .evaluate import Generator, Sampling, draw_questions
from .features import BatchEncoder
from .flow import draw_shifts, draw_sigmas, noised, predict, spread
from .learner import Learner
from .options import parse
from .processes import Processes
from .window import corners, cut
from .world import Curriculum

WINDOWS = (0.5, 0.75)  # of the canvas, each way
WINDOW_SHIFT = 4.0  # at most: where regions are denoised, the source's video is half there


@dataclass(frozen=True)
class Training:
    """One run. The batch is shared by all processes; `steps` counts from the run's first start."""

    out: str
    initial: str  # a diffusers transformer folder or another run's folder
    codec: str
    decoder: str = ""  # the detail decoder, for contact sheets and scores
    canvas: int = 64
    windows: bool = False  # every other batch sees only a window of each video, in less noise
    batch: int = 24
    steps: int = 100_000
    shift: float = 3.0
    least_shift: float = 0.0  # if any: each video's sigma has a shift of its own, from this to `shift`
    muon_lr: float = 0.01
    adam_lr: float = 1e-3
    warmup: int = 50
    decay: int = 500  # the last steps, over which both rates fall to a tenth
    average: float = 0.996
    object_weight: float = 2.0
    coarse_weight: float = 0.0  # of the error's means over squares of 16 and 32 pixels: where things are
    textured: float = 0.5
    patterned: float = 0.3
    neighbour: float = 0.2
    stars: float = 0.2  # not "star": torchrun would take --star for its own --start-method
    rings: float = 0.0  # added to their share, as stripes
    stripes: float = 0.0
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    compile: bool = False
    bfloat16: bool = False  # matrix products and attention; pays on processors and GPUs with bfloat16 units
    save_seconds: float = 300.0
    log_every: int = 25
    evaluate_every: int = 0  # 0: never
    evaluate_count: int = 48
    evaluate_steps: int = 20
    evaluate_guidance: float = 2.5

    @property
    def curriculum(self) -> Curriculum:
        """How often the harder parts of the world are drawn."""
        return Curriculum(
            self.textured, self.patterned, self.neighbour, star=self.stars, ring=self.rings, striped=self.stripes
        )


class Trainer:
    """The state of a run, its steps and its records."""

    def __init__(self, training: Training, processes: Processes) -> None:
        """Loads everything but the run's own state."""
        self.training, self.processes = training, processes
        decoder = Path(training.decoder) if training.decoder else None
        self.codec = load_codec(Path(training.codec), decoder, training.device)
        self.text = BatchEncoder(training.device)
        self.average = load_transformer(Path(training.initial), training.device)
        self.learner = Learner(
            copy.deepcopy(self.average), training.muon_lr, training.adam_lr, compiled=training.compile
        )
        self.step = 0

    def state(self) -> dict[str, Any]:
        """What a run needs to go on: weights, average, optimizers, step; and its options, for the curious."""
        return self.learner.state() | {
            "average": self.average.state_dict(),
            "step": self.step,
            "training": asdict(self.training),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes up a `state`."""
        self.learner.load(state)
        self.average.load_state_dict(state["average"])
        self.step = int(state["step"])

    def save(self) -> None:
        """Leaves the state and the averaged weights in `out`."""
        if self.processes.rank == 0:
            save_checkpoint(Path(self.training.out), self.state())
            save_transformer(self.average, Path(self.training.out))

    def run(self) -> None:
        """Trains up to `steps` from the checkpoint in `out`, if any; logs, saves and evaluates on the way."""
        training = self.training
        if state := load_checkpoint(Path(training.out)):
            self.load(state)
        saved = logged = time.monotonic()
        losses: list[float] = []
        while self.step < training.steps:
            losses.append(self.train_step())
            if self.step % training.log_every == 0:
                now = time.monotonic()
                self.log(loss=sum(losses) / len(losses), rate=len(losses) * training.batch / (now - logged))
                losses, logged = [], now
            if training.evaluate_every and self.step % training.evaluate_every == 0:
                self.evaluate()
                logged = time.monotonic()
            if time.monotonic() - saved > training.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    def train_step(self) -> float:
        """One batch over all processes; returns this process's loss."""
        training, processes = self.training, self.processes
        size = training.batch // processes.count
        loss = self.backward(size, training.canvas, (training.seed, processes.rank, self.step))
        processes.average_gradients(self.learner.model.parameters())
        self.update()
        return loss

    def backward(self, size: int, canvas: int, seed: tuple[int, ...]) -> float:
        """Gradients of the flow-matching loss on `size` fresh videos; returns the loss."""
        training = self.training
        batch = draw_batch(self.codec, size, canvas, seed, curriculum=training.curriculum, device=training.device)
        generator = torch.Generator().manual_seed(hash((*seed, 1)) % 2**62)
        part = WINDOWS[self.step // 2 % len(WINDOWS)] if training.windows and self.step % 2 else 1.0
        most = training.shift if part == 1.0 else WINDOW_SHIFT
        sigma = draw_sigmas(draw_shifts(size, training.least_shift or most, most, generator), generator)
        latents, cover = batch.latents, batch.cover
        if part < 1.0:
            side = round(part * latents.shape[-1])
            where = corners(cover, side, generator)
            latents, cover = cut(latents, where, side), cut(cover, where, side)
        sigma = sigma.to(training.device)
        noise = torch.randn(latents.shape, generator=generator).to(training.device)
        noisy = noised(latents, noise, sigma)
        texts = self.text.encode_all(batch.captions)
        with self.precision():
            v = predict(self.learner.forward, noisy, sigma, texts)
        weight = object_weights(cover, spread(sigma), training.object_weight)
        error = v - (noise - latents)
        loss = (error.square() * weight).mean() / weight.mean()
        if training.coarse_weight:
            loss = loss + training.coarse_weight * coarse(error)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def precision(self) -> torch.autocast:
        """Where the model's matrix products are in bfloat16, if the training says so."""
        device = torch.device(self.training.device).type
        return torch.autocast(device, torch.bfloat16, enabled=self.training.bfloat16)

    def update(self) -> None:
        """One step of both optimizers and of the average."""
        self.learner.update(learning_rate_factor(self.step, self.training))
        self.step += 1
        # A young average must not remember where it started.
        keep = min(self.training.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for mean, new in zip(self.average.parameters(), self.learner.model.parameters(), strict=True):
                mean.lerp_(new, 1 - keep)

    def evaluate(self) -> None:
        """Logs the averaged weights' checker scores and leaves a contact sheet."""
        training, processes = self.training, self.processes
        share = training.evaluate_count // processes.count
        sheet = Path(training.out) / f"sheet-{self.step:06d}.png" if processes.rank == 0 else None
        seed = 1000 + processes.rank
        sampling = Sampling(training.canvas, training.evaluate_steps, training.evaluate_guidance, training.shift, seed)
        questions = draw_questions("world", share, seed, training.curriculum)
        generator = Generator(self.average, self.codec, self.text)
        scores = generator.evaluate(questions, sampling, sheet).shares()
        means = {f"score_{k}": processes.mean(v) for k, v in scores.items()}
        self.log(**{k: v for k, v in means.items() if not math.isnan(v)})

    def log(self, **values: float) -> None:
        """One JSON line in `log.jsonl`."""
        if self.processes.rank == 0:
            path = Path(self.training.out) / "log.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                line = {"step": self.step, "time": round(time.time(), 1)} | {k: round(v, 5) for k, v in values.items()}
                file.write(json.dumps(line) + "\n")


def object_weights(cover: torch.Tensor, sigma: torch.Tensor, weight: float) -> torch.Tensor:
    """Of each latent pixel's loss: up to `weight` on objects and on what touches them; `cover` [n, 1, t, h, w],
    `sigma` [n, 1, 1, 1, 1].

    Not where noise hides the object: there the weight would move the mean that the model learns towards objects, and
    two places that are half likely would both become one.
    """
    near = functional.max_pool3d(cover, (1, 3, 3), stride=1, padding=(0, 1, 1))
    return 1 + (weight - 1) * near * (1 - sigma) ** 2


def coarse(error: torch.Tensor) -> torch.Tensor:
    """The mean square of an error's means over 4x4 and 8x8 latents; `error` [n, C, t, h, w], h and w multiples of 8.

    Added to the loss it stresses where objects are: a large canvas is soon filled well and long filled twice
    (simple diffusion, arXiv 2301.11093, sums losses over resolutions: "multiscale training loss").
    """
    frames = error.flatten(0, 2)[:, None]
    return torch.stack([functional.avg_pool2d(frames, side).square().mean() for side in (4, 8)]).sum()


def learning_rate_factor(step: int, training: Training) -> float:
    """A linear rise, a plateau and a linear fall at the very end."""
    rise = min(1.0, (step + 1) / training.warmup)
    return rise * learning_rate_fall(step, training)


def learning_rate_fall(step: int, training: Training) -> float:
    """The plateau and the fall alone."""
    return max(0.1, min(1.0, (training.steps - step) / max(training.decay, 1)))


Options = TypeVar("Options", bound=Training)


def command(
    trainer: Callable[[Options, Processes], Trainer],
    options: type[Options],
    description: str,
    arguments: list[str] | None,
) -> None:
    """A run of `trainer` with options from the command line, in this process or in `torchrun`'s."""
    training = parse(options, description, arguments)
    torch.set_num_threads(training.threads)
    with Processes.join() as processes:
        trainer(training, processes).run()


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    command(Trainer, Training, "Train the built-in model; goes on from --out's checkpoint if any.", arguments)


if __name__ == "__main__":
    main()
