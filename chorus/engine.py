"""The engine: one request in, one video's latents out, with everything counted.

Deterministic: on one machine, with the same number of threads and library versions, the same request gives the same
latents bit for bit. The noise comes from the request's seed by a CPU generator of its own, so it's the same on every
device and whatever ran before.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .cost import forward_flops, tokens_of
from .denoise import Denoised, Guidance, denoise, independent
from .errors import (
    ConstantOutput,
    CorruptLatents,
    DomainMismatch,
    MissingStep,
    NotFinite,
    UnsupportedSettings,
    WeightsError,
)
from .model import VideoModel
from .request import Request, Result, Reuse
from .schedule import make_scheduler
from .trace import Trace

BUILTIN = "builtin"
CACHED_TEXTS = 256


class Engine:
    """One model on one device. Not for several threads at once."""

    def __init__(self, model: VideoModel) -> None:
        self.model = model
        self._device = next(model.transformer.parameters()).device
        self._versions = {name: version(name) for name in ("torch", "diffusers", "transformers")}
        self._texts: OrderedDict[str, torch.Tensor] = OrderedDict()

    @classmethod
    def load(cls, source: str | Path = BUILTIN, *, device: str = "cpu", threads: int | None = 1) -> Engine:
        """Load the built-in model, or a folder in its layout, verifying the weights. Raises WeightsError.

        `threads` sets torch's number of CPU threads for the whole process (None leaves it alone): results depend on it
        in the last bit. One is the default, for the built-in model's matrices are small: on two cores that others use
        too, two threads wait for each other and were ten times slower; run two workers instead.
        """
        # Here, for the model's imports take seconds, and an engine may be given another model.
        from .tiny.model import WEIGHTS, TinyModel

        if threads is not None:
            torch.set_num_threads(threads)
        folder = WEIGHTS if str(source) == BUILTIN else Path(source)
        if not folder.is_dir():
            raise WeightsError(
                f"{source} is neither a built-in model nor a folder", hint=f"the built-in one is {BUILTIN}"
            )
        return cls(TinyModel(folder, device))

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the weights, text encoder included."""
        return self.model.fingerprint

    def generate(
        self,
        request: Request,
        reuse: Reuse | None = None,
        *,
        keep: Set[int] = frozenset(),
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[int, int], None] = lambda done, steps: None,
    ) -> Result:
        """Make the latents of one request, from noise or, with `reuse`, from the source's x[k1].

        `keep` names the steps whose x[k] the result shall hold. `should_stop` is asked before each step (then raises
        Stopped); `on_step(done, steps)` is called after each. Raises UnsupportedSettings, DomainMismatch, MissingStep,
        CorruptLatents, NotFinite, ConstantOutput.
        """
        settings = request.settings
        self.model.check(settings)
        shape = self.model.latent_shape(settings)
        if not all(0 <= k <= settings.steps for k in keep):
            raise UnsupportedSettings(f"steps to keep must be inside 0..{settings.steps}, not {sorted(keep)}")
        start = 0 if reuse is None else _checked_start(request, reuse, shape)
        self._reset_peak()
        with torch.inference_mode():
            began = time.perf_counter()
            guidance = self._guidance(request)
            encoded = time.perf_counter()
            latents = _noise(request.seed, shape) if reuse is None or start == 0 else reuse.latents[start][None]
            done = denoise(
                self.model.transformer,
                make_scheduler(settings.scheduler, settings.shift),
                latents.to(self._device, torch.float32),
                guidance,
                settings.steps,
                start=start,
                keep=keep,
                should_stop=should_stop,
                on_step=on_step,
            )
            final = independent(done.latents)
            denoised = time.perf_counter()
        _check_output(final)
        seconds = {"encode": encoded - began, "denoise": denoised - encoded}
        return Result(final, self._trace(request, reuse, start, done, shape, seconds), done.kept)

    def decode(self, latents: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Frames [F, H, W, 3], uint8, of latents [C, T, H, W]. Raises NotFinite and ConstantOutput."""
        with torch.inference_mode():
            pixels = self.model.decode(latents)
            if not bool(torch.isfinite(pixels).all()):
                raise NotFinite("the decoded video holds NaN or infinity")
            frames: npt.NDArray[np.uint8] = (pixels * 255).round().to("cpu", torch.uint8).contiguous().numpy()
        if frames.min() == frames.max():
            raise ConstantOutput("the decoded video is one value everywhere")
        return frames

    def _guidance(self, request: Request) -> Guidance:
        unconditional = self._encode(request.negative_prompt) if request.settings.guided else None
        return Guidance(self._encode(request.prompt), unconditional, request.settings.guidance_scale)

    def _encode(self, text: str) -> torch.Tensor:
        """Features of a text; the last used ones are kept, for many requests share prompts and all the negative one."""
        if text in self._texts:
            self._texts.move_to_end(text)
        else:
            self._texts[text] = self.model.encode(text)
            if len(self._texts) > CACHED_TEXTS:
                self._texts.popitem(last=False)
        return self._texts[text]

    def _trace(
        self,
        request: Request,
        reuse: Reuse | None,
        start: int,
        done: Denoised,
        shape: tuple[int, ...],
        seconds: dict[str, float],
    ) -> Trace:
        config, steps = self.model.transformer.config, request.settings.steps
        tokens = tokens_of(config, shape)
        flops = forward_flops(config, tokens, self.model.text_slots)
        all_passes = steps * (2 if request.settings.guided else 1)
        prompt_tokens = self.model.count_tokens(request.prompt)
        hit = reuse is not None and start > 0
        return Trace(
            cache_result="hit" if hit else "miss",
            entry=reuse.entry_id if reuse is not None and hit else None,
            m=reuse.similarity if reuse is not None and hit else None,
            k1=start,
            k2=start,
            steps_total=steps,
            steps_computed=len(done.step_seconds),
            steps_skipped=start,
            forward_passes=done.forward_passes,
            tokens_computed=done.forward_passes * tokens,
            tokens_total=all_passes * tokens,
            flops_computed=done.forward_passes * flops,
            flops_total=all_passes * flops,
            prompt_tokens=prompt_tokens,
            prompt_truncated=prompt_tokens > self.model.text_slots,
            seconds=seconds,
            step_seconds=done.step_seconds,
            peak_memory=self._peak(),
            backend=self._backend(),
        )

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak(self) -> int:
        """Bytes: the device's peak during this request, or on a CPU the process's so far."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def _backend(self) -> dict[str, str | int]:
        cuda = self._device.type == "cuda"
        return {
            "device": str(self._device),
            "device_name": torch.cuda.get_device_name(self._device) if cuda else platform.machine(),
            "dtype": str(self.model.transformer.dtype).removeprefix("torch."),
            "attention": _attention_backend(),
            "threads": torch.get_num_threads(),
            "fingerprint": self.fingerprint,
            **self._versions,
        }


def _noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """x[0], [1, C, T, H, W], as diffusers draws it: CPU generator, float32."""
    return torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)


def _checked_start(request: Request, reuse: Reuse, shape: tuple[int, ...]) -> int:
    """k1, after everything that makes the reuse legal was checked."""
    steps = request.settings.steps
    if reuse.domain_key != request.domain_key:
        raise DomainMismatch(
            f"entry {reuse.entry_id} belongs to another domain than the request",
            hint="weights, settings or embedder differ: generate without reuse",
        )
    if not 0 <= reuse.k1 <= reuse.k2 <= steps:
        raise UnsupportedSettings(f"0 <= k1 <= k2 <= {steps} doesn't hold for k1={reuse.k1}, k2={reuse.k2}")
    if reuse.k1 == 0:
        return 0
    if reuse.k1 not in reuse.latents:
        raise MissingStep(
            f"entry {reuse.entry_id} holds no latents of step {reuse.k1}, only of {sorted(reuse.latents)}",
            hint="generate without reuse; the entry was stored for other boundaries",
        )
    latents = reuse.latents[reuse.k1]
    if tuple(latents.shape) != shape or not latents.is_floating_point():
        raise CorruptLatents(f"entry {reuse.entry_id}: x[{reuse.k1}] is {tuple(latents.shape)}, not {shape}")
    if not bool(torch.isfinite(latents).all()):
        raise CorruptLatents(f"entry {reuse.entry_id}: x[{reuse.k1}] holds NaN or infinity", hint="evict the entry")
    return reuse.k1


def _check_output(latents: torch.Tensor) -> None:
    if not bool(torch.isfinite(latents).all()):
        raise NotFinite("the latents hold NaN or infinity", hint="check the weights with `doctor`, and the dtype")
    if bool(latents.min() == latents.max()):
        raise ConstantOutput("the latents are one value everywhere", hint="check the weights with `doctor`")


def _attention_backend() -> str:
    """The attention that diffusers' dispatcher runs: its own name for it."""
    # Private in diffusers, but nothing public tells which backend really runs.
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    registry: Any = _AttentionBackendRegistry
    return str(registry.get_active_backend()[0].value)
