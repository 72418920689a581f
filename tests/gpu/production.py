"""What only a GPU can tell, on random weights of Wan2.1 1.3B's shapes at 480p and 81 frames; nothing is downloaded.

    uv run --extra dev --extra gpu python -m tests.gpu.production [--minutes 8] [--json FILE]

In this order, as far as the minutes reach: the Triton programs against their references, a step at three visible shares
against its ideal, attention backends, determinism, SIGTERM and resume, decoding whole and in tiles; seconds and peak
memory of each. `--smoke` walks the same path on a CPU with tiny shapes and decides nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from chorus_batch.chorus.cost import forward_flops, split_flops
from chorus_batch.chorus.denoise import Denoised, Guidance, Walk, denoise
from chorus_batch.chorus.errors import Stopped
from chorus_batch.chorus.network import Network
from chorus_batch.chorus.schedule import make_scheduler
from tests.bench import kernels

SHARES = (0.25, 0.5, 1.0)
PAPER = 1.5  # times faster at half of the tokens (arXiv 2604.04451, table 3's text)
BACKENDS = ("native", "_native_cudnn", "flash", "_flash_3", "sage")
STEPS = 3

Section = Callable[["Machine"], dict[str, Any]]


@dataclass(frozen=True)
class Shapes:
    """A transformer and a video: `latents` [1, C, T, H, W]."""

    transformer: dict[str, Any]
    vae: dict[str, Any]
    latents: tuple[int, ...]
    text: tuple[int, int]  # slots, width
    dtype: torch.dtype
    rounds: int


PATCH = (1, 2, 2)
COMMON = {"patch_size": PATCH, "in_channels": 16, "out_channels": 16, "freq_dim": 256, "cross_attn_norm": True,
          "qk_norm": "rms_norm_across_heads"}  # fmt: skip
WAN_1_3B = Shapes(
    {**COMMON, "num_attention_heads": 12, "attention_head_dim": 128, "text_dim": 4096, "ffn_dim": 8960,
     "num_layers": 30, "rope_max_seq_len": 1024},
    {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
     "temperal_downsample": [False, True, True]},
    (1, 16, 21, 60, 104), (512, 4096), torch.bfloat16, 5,
)  # fmt: skip
SMOKE = Shapes(
    {**COMMON, "num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "ffn_dim": 32, "num_layers": 2,
     "rope_max_seq_len": 64},
    {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1,
     "temperal_downsample": [False, True, True]},
    (1, 16, 3, 8, 8), (16, 32), torch.bfloat16, 1,
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """The device, and the model that is on it."""

    device: str
    shapes: Shapes
    network: Network
    latents: torch.Tensor
    guidance: Guidance

    @classmethod
    def made(cls, device: str, shapes: Shapes) -> Machine:
        """Random weights: what is measured doesn't depend on what they say."""
        torch.manual_seed(0)
        with torch.device("meta"):
            transformer: Any = WanTransformer3DModel(**shapes.transformer)
        filled(transformer.to_empty(device=device))
        for name, parameter in transformer.named_parameters():  # as loading does it
            if not any(kept in name for kept in transformer._keep_in_fp32_modules):
                parameter.data = parameter.data.to(shapes.dtype)
        # What isn't a parameter was lost with the meta device.
        transformer.rope = type(transformer.rope)(
            shapes.transformer["attention_head_dim"], PATCH, shapes.transformer["rope_max_seq_len"]
        ).to(device)
        noise = torch.randn(shapes.latents, generator=torch.Generator().manual_seed(1)).to(device)
        text = torch.randn((1, *shapes.text), dtype=shapes.dtype, device=device)
        network = Network(transformer.eval().requires_grad_(False))
        return cls(device, shapes, network, noise, Guidance(text, None, 1.0))

    def walk(self, **more: Any) -> Denoised:
        """A few steps of Euler, as a 4-step distilled model takes them."""
        walk = Walk(STEPS, self.guidance, identity="check")
        return denoise(self.network, lambda: make_scheduler("euler", 5.0), self.latents, walk, **more)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median of a few runs, after one that warms up."""
        work()
        found = []
        for _ in range(self.shapes.rounds):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def step(self, share: float) -> tuple[Callable[[], Any], int]:
        """One pass over so large a share of the tokens, at random places; and how many these are."""
        text = self.network.text(self.guidance.conditional)
        times = self.network.times(torch.tensor([500.0], device=self.device))
        inputs = self.latents.to(self.network.dtype)
        grid = tuple(n // p for n, p in zip(self.shapes.latents[2:], PATCH, strict=True))
        tokens = grid[0] * grid[1] * grid[2]
        see = torch.zeros(tokens, dtype=torch.bool)
        see[torch.randperm(tokens, generator=torch.Generator().manual_seed(2))[: round(share * tokens)]] = True
        visible = (
            self.network.visible(self.latents) if share == 1 else self.network.visible(self.latents, see.view(grid))
        )
        return lambda: self.network.velocity(inputs, times, text, visible), int(see.sum())


def filled(module: torch.nn.Module) -> None:
    """Small random weights; norms leave what they get as it is."""
    for name, parameter in module.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)


def programs(machine: Machine) -> dict[str, Any]:
    """The Triton programs agree with their references (asserted), and which of them are faster."""
    if machine.device != "cuda":
        return {"skipped": "tests.bench.kernels --smoke runs them interpreted"}
    return {"verdicts": kernels.verdicts(kernels.measure("cuda", smoke=False))}


def shares(machine: Machine) -> dict[str, Any]:
    """A step's time at a visible share, against a whole step's."""
    config, slots = machine.network.transformer.config, machine.shapes.text[0]
    quadratic, linear = split_flops(config, slots)
    whole_step, tokens = machine.step(1.0)
    whole = machine.seconds(whole_step)
    found: dict[str, Any] = {"tokens": tokens, "whole_s": whole, "paper_at_half": PAPER}
    found["tflop_per_s"] = forward_flops(config, tokens, slots) / whole / 1e12
    for share in SHARES[:-1]:
        step, seen = machine.step(share)
        ideal = (quadratic * seen**2 + linear * seen) / (quadratic * tokens**2 + linear * tokens)
        ratio = machine.seconds(step) / whole
        found[f"{share}"] = {"ratio": ratio, "ideal": ideal, "over_ideal": ratio / ideal - 1, "faster": 1 / ratio}
    return found


def backends(machine: Machine) -> dict[str, Any]:
    """Seconds of a whole step by attention backend, and how far its output is from the native one's."""
    transformer = machine.network.transformer
    found: dict[str, Any] = {}
    reference: torch.Tensor | None = None
    for name in BACKENDS:
        try:
            transformer.set_attention_backend(name)
            step, _ = machine.step(1.0)
            output = step().float()
        except (ImportError, RuntimeError, ValueError) as error:
            found[name] = f"can't run here: {str(error).splitlines()[0][:80]}"
            continue
        reference = output if reference is None else reference
        found[name] = {"s": machine.seconds(step), "rms_off": float((output - reference).square().mean().sqrt())}
    transformer.set_attention_backend("native")
    return found


def determinism(machine: Machine) -> dict[str, Any]:
    """The same noise twice gives the same bits."""
    return {"equal": torch.equal(machine.walk().latents, machine.walk().latents)}


def resume(machine: Machine) -> dict[str, Any]:
    """SIGTERM between two steps; what goes on from the checkpoint equals what was never stopped, bit for bit."""
    stopping = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stopping.set())

    def on_step(done: int, steps: int) -> None:
        if done == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        began = time.perf_counter()
        machine.walk(should_stop=stopping.is_set, on_step=on_step)
    except Stopped as stopped:
        spent, checkpoint = time.perf_counter() - began, stopped.checkpoint
        assert checkpoint is not None
        equal = torch.equal(machine.walk(resume=checkpoint).latents, machine.walk().latents)
        return {"stopped_before_step": stopped.step, "after_s": spent, "equal": equal}
    finally:
        signal.signal(signal.SIGTERM, before)
    raise AssertionError("it wasn't stopped")


def decoding(machine: Machine) -> dict[str, Any]:
    """The VAE in float32, whole and in tiles: seconds, peak memory, and how far the two are apart."""
    torch.manual_seed(3)
    vae: Any = AutoencoderKLWan(**machine.shapes.vae).to(machine.device).eval().requires_grad_(False)
    filled(vae)
    found: dict[str, Any] = {}
    frames = []
    for name in ("whole", "tiles"):
        if name == "tiles":
            vae.enable_tiling()
        with peak(machine) as memory:
            began = time.perf_counter()
            frames.append(vae.decode(machine.latents, return_dict=False)[0].cpu())
            machine.synchronize()
            found[name] = {"s": time.perf_counter() - began}
        found[name] |= memory
    found["rms_off"] = float((frames[0] - frames[1]).square().mean().sqrt())
    return found


@contextmanager
def peak(machine: Machine) -> Iterator[dict[str, float]]:
    """GiB at most in use inside, on the device."""
    found: dict[str, float] = {}
    if machine.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield found
    if machine.device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30


SECTIONS: dict[str, Section] = {
    "programs": programs,
    "shares": shares,
    "determinism": determinism,
    "resume": resume,
    "decoding": decoding,
    "backends": backends,
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU; decides nothing")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke walks the same path on a CPU")
    end = time.monotonic() + 60 * options.minutes
    device = "cpu" if options.smoke else "cuda"
    found: dict[str, Any] = {"torch": torch.__version__, "device": "cpu"}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
    with torch.inference_mode():
        machine = Machine.made(device, SMOKE if options.smoke else WAN_1_3B)
        for name, section in SECTIONS.items():
            if time.monotonic() > end:
                found[name] = "no time left"
                continue
            with peak(machine) as memory:
                found[name] = section(machine)
            found[name] |= memory
            print(name, json.dumps(found[name]), flush=True)
    text = json.dumps(found)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
