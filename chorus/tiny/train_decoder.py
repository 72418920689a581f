"""Train the detail decoder on true videos: `python -m chorus_batch.chorus.tiny.train_decoder --help`.

The linear encoder is fixed, so the transformer's latents stay what they are, and both can be trained at once. Some
latents get noise, as a guard against the small errors of generated ones. Resumable like `train`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from .checkpoint import load_checkpoint, save_checkpoint
from .codec import LinearCodec
from .decoder import DetailDecoder, SharpCodec
from .muon import Muon, split_parameters, step_all
from .options import add_options, read_options
from .render import place, render
from .world import draw_scenes

# Muon on the kernels gains .8 dB over AdamW in 300 steps.
KERNEL_RATE = 0.03
RATE = 2e-3
MOST_NOISE = 0.08


def draw_videos(count: int, canvas: int, seed: tuple[int, ...], frames: int = 9) -> torch.Tensor:
    """[count, 3, frames, canvas, canvas] in -1..1."""
    rng = np.random.default_rng(seed)
    scenes, placement = place(draw_scenes(count, rng), rng, canvas, frames)
    return render(scenes, placement, canvas)


@torch.no_grad()
def measure_psnr(codec: SharpCodec, count: int, canvas: int, seed: int) -> float:
    """Decibels over `count` videos, pixels clipped to their range (peak to peak 2)."""
    videos = draw_videos(count, canvas, (seed, 1))
    error = float((codec.decode(codec.encode(videos)).clamp(-1, 1) - videos).square().mean())
    return 10 * math.log10(4 / error)


@dataclass(frozen=True)
class DecoderTraining:
    """One run."""

    out: Path
    codec: Path  # codec.safetensors of the linear codec
    steps: int = 6000
    batch: int = 8
    canvas: int = 64
    seed: int = 7
    save_seconds: float = 120.0


def train_decoder(training: DecoderTraining) -> DetailDecoder:
    """Trains up to `steps`, going on from a checkpoint in `out`; leaves `decoder.safetensors` (float16) there."""
    decoder, step = DetailDecoder(), 0
    codec = SharpCodec(LinearCodec(training.codec, "cpu"), decoder)
    kernels, others = split_parameters(decoder, lambda name, p: p.ndim == 4 and not name.endswith("leave.weight"))
    optimizers: dict[str, tuple[torch.optim.Optimizer, float]] = {
        "muon": (Muon(kernels), KERNEL_RATE),
        "adam": (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), RATE),
    }
    if state := load_checkpoint(training.out):
        decoder.load_state_dict(state["model"])
        for name, (optimizer, _) in optimizers.items():
            optimizer.load_state_dict(state[name])
        step = int(state["step"])
    saved, losses = time.monotonic(), []
    while step < training.steps:
        losses.append(_backward(codec, training, step))
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 0.5)
        step_all(optimizers.values(), _rate_factor(step, training.steps))
        step += 1
        if step % 250 == 0 or step == training.steps:
            psnr = measure_psnr(codec, 24, training.canvas, training.seed + 1)
            _log(training.out, step, sum(losses) / len(losses), psnr)
            losses = []
        if time.monotonic() - saved > training.save_seconds or step == training.steps:
            states = {name: optimizer.state_dict() for name, (optimizer, _) in optimizers.items()}
            save_checkpoint(training.out, {"model": decoder.state_dict(), "step": step} | states)
            halves = {k: v.half().contiguous() for k, v in decoder.state_dict().items()}
            save_file(halves, training.out / "decoder.safetensors")
            saved = time.monotonic()
    return decoder


def _rate_factor(step: int, steps: int) -> float:
    """A short rise, then half a cosine."""
    return min(1.0, (step + 1) / 100) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))


def _backward(codec: SharpCodec, training: DecoderTraining, step: int) -> float:
    """Gradients of the squared error on fresh videos; returns it."""
    videos = draw_videos(training.batch, training.canvas, (training.seed, 0, step))
    latents = codec.encode(videos)
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
    # Half of the videos stay clean.
    amount = (torch.rand(training.batch, 1, 1, 1, 1, generator=generator) * 2 - 1).clamp(0, 1) * MOST_NOISE
    noisy = latents + amount * torch.randn(latents.shape, generator=generator)
    loss = (codec.decode(noisy) - videos).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _log(out: Path, step: int, loss: float, psnr: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    line = {"step": step, "time": round(time.time(), 1), "loss": round(loss, 6), "psnr": round(psnr, 2)}
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Train the detail decoder; goes on from --out's checkpoint if any.")
    add_options(parser, DecoderTraining)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    train_decoder(read_options(options, DecoderTraining))


if __name__ == "__main__":
    main()
