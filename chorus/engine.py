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
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .attention import Gain, fast_backends
from .checkpoint import Checkpoint
from .cost import Work, forward_flops, text_flops, tokens_of, work_flops
from .denoise import Denoised, Guidance, RegionStage, Walk, denoise, independent
from .differ import token_indices
from .errors import (
    CheckpointMismatch,
    ConstantOutput,
    CorruptLatents,
    DomainMismatch,
    MissingStep,
    NotFinite,
    RegionError,
    UnsupportedSettings,
    WeightsError,
)
from .evidence import Recorder, Word, content_words, recorded_layers, recorded_steps
from .model import BUILTIN, VideoModel
from .network import Network
from .regions import widen
from .request import Request, Result, Reuse, identity
from .schedule import make_scheduler, noise_levels
from .stepcache import step_cache
from .trace import Trace

CACHED_TEXTS = 256


class Engine:
    """One model on one device. Not for several threads at once."""

    def __init__(self, model: VideoModel) -> None:
        self.model = model
        self.network = Network(model.transformer)
        self._device = next(model.transformer.parameters()).device
        self._versions = {name: version(name) for name in ("torch", "diffusers", "transformers")}
        self._texts: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._features: Callable[[str], torch.Tensor] = model.encode

    @classmethod
    def load(cls, source: str | Path = BUILTIN, *, device: str = "cpu", threads: int | None = 1) -> Engine:
        """Load a built-in model by its name, or the one of a folder in its layout, verifying the weights. Raises
        WeightsError.

        `threads` sets torch's number of CPU threads for the whole process (None leaves it alone): results depend on it
        in the last bit. One is the default, for the built-in model's matrices are small: on two cores that others use
        too, two threads wait for each other and were ten times slower; run two workers instead.
        """
        # Here, for the model's imports take seconds, and an engine may be given another model.
        from .tiny.model import WEIGHTS, TinyModel, model_names

        if threads is not None:
            torch.set_num_threads(threads)
        names = model_names()
        if str(source) in names:
            return cls(TinyModel(WEIGHTS, device, str(source)))
        if not Path(source).is_dir():
            raise WeightsError(
                f"{source} is neither a built-in model nor a folder", hint=f"built-in: {', '.join(names)}"
            )
        return cls(TinyModel(Path(source), device))

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the weights, text encoder included."""
        return self.model.fingerprint

    def use_attention(self, backend: str | None) -> None:
        """Attention by a backend of diffusers' dispatcher: native, flash, _flash_3, sage ...

        None: FlashAttention where it is installed and the device can run it, else SDPA. Raises UnsupportedSettings for
        one that isn't known or can't run here.
        """
        if backend is not None:
            self.network.use_attention(backend)
            return
        cuda = self._device.type == "cuda"
        capability = torch.cuda.get_device_capability(self._device) if cuda else None
        for fast in fast_backends(capability, self.network.dtype):
            try:
                self.network.use_attention(fast)
                return
            except UnsupportedSettings:
                # It may be half chosen: diffusers has a choice of the whole process beside each module's.
                self.model.transformer.set_attention_backend("native")

    def use_compiler(self, backend: str = "inductor") -> None:
        """Run the transformer's blocks as torch.compile makes them; `backend` is one of its own.

        Regions are widened to few sizes then (`regions.widen`), for every number of tokens is compiled anew. A
        generation with a step cache runs as without it. Raises UnsupportedSettings where nothing can be compiled.
        """
        self.network.use_compiler(backend)

    def use_features(self, source: Callable[[str], torch.Tensor]) -> None:
        """Take text features [1, slots, D] from `source`, which gives what the model's `encode` would, bit for bit."""
        self._features = source

    def generate(
        self,
        request: Request,
        reuse: Reuse | None = None,
        *,
        keep: Set[int] = frozenset(),
        evidence: bool = False,
        resume: Checkpoint | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        on_step: Callable[[int, int], None] = lambda done, steps: None,
    ) -> Result:
        """Make the latents of one request, from noise or, with `reuse`, from the source's x[k1].

        `keep` names the steps whose x[k] the result shall hold; `evidence` asks for the maps of the prompt's words
        (from noise only). `should_stop` is asked before each step, and then raises Stopped with a checkpoint; given
        back as `resume`, with the same request, the result is the same bit for bit. `on_step(done, steps)` is called
        after each. Raises UnsupportedSettings, DomainMismatch, MissingStep, CorruptLatents, RegionError,
        CheckpointMismatch, NotFinite, ConstantOutput.
        """
        settings = request.settings
        self.model.check(settings)
        shape = self.model.latent_shape(settings)
        if not all(0 <= k <= settings.steps for k in keep):
            raise UnsupportedSettings(f"steps to keep must be inside 0..{settings.steps}, not {sorted(keep)}")
        if reuse is not None:
            _check_reuse(request, reuse, shape)
            if reuse.k1 == 0:
                reuse = None
            elif reuse.regions is not None and self.network.compiled is not None:
                reuse = replace(reuse, regions=widen(reuse.regions))
        name = identity(request, reuse, frozenset(keep), self.fingerprint)
        if resume is not None and resume.identity != name:
            raise CheckpointMismatch("the checkpoint belongs to another generation", hint="start from the beginning")
        self._reset_peak()
        compiled = self.network.compiled
        before = compiled.compilations if compiled is not None else 0
        caching = step_cache(settings.step_cache, self.model.transformer, self.fingerprint, settings.steps)
        with torch.inference_mode(), caching as cache:
            began = time.perf_counter()
            walk = Walk(
                settings.steps,
                self._guidance(request),
                start=reuse.k1 if reuse is not None else 0,
                region=_region_stage(reuse),
                gain=_gain(reuse, settings.steps),
                keep=keep,
                recorder=self._recorder(request) if evidence and reuse is None else None,
                cache=cache,
                identity=name,
            )
            encoded = time.perf_counter()
            latents = _noise(request.seed, shape) if reuse is None else reuse.latents[reuse.k1][None]
            done = denoise(
                self.network,
                lambda: make_scheduler(settings.scheduler, settings.shift),
                latents.to(self._device, torch.float32),
                walk,
                resume=resume,
                should_stop=should_stop,
                on_step=on_step,
            )
            final = independent(done.latents)
            denoised = time.perf_counter()
        _check_output(final)
        seconds = {"encode": encoded - began, "denoise": denoised - encoded}
        maps = walk.recorder.evidence(self.grid(shape)) if walk.recorder is not None else None
        trace = self._trace(request, reuse, walk, done, shape, seconds)
        if compiled is not None:
            trace = replace(trace, compilations=compiled.compilations - before)
        return Result(final, trace, done.kept, maps)

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """The token grid [T, h, w] of latents [C, T, H, W]."""
        t, h, w = (n // p for n, p in zip(shape[1:], self.model.transformer.config.patch_size, strict=True))
        return t, h, w

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
            self._texts[text] = self._features(text)
            if len(self._texts) > CACHED_TEXTS:
                self._texts.popitem(last=False)
        return self._texts[text]

    def _recorder(self, request: Request) -> Recorder:
        offsets = self.model.token_offsets(request.prompt)
        words = [Word(span, token_indices([span], offsets)) for span in content_words(request.prompt)]
        settings = request.settings
        steps = recorded_steps(noise_levels(settings.steps, settings.shift))
        return Recorder(words, recorded_layers(self.model.transformer.config.num_layers), steps)

    def _trace(
        self,
        request: Request,
        reuse: Reuse | None,
        walk: Walk,
        done: Denoised,
        shape: tuple[int, ...],
        seconds: dict[str, float],
    ) -> Trace:
        config, steps, slots = self.model.transformer.config, request.settings.steps, self.model.text_slots
        tokens = tokens_of(config, shape)
        branches = 2 if request.settings.guided else 1
        text = branches * text_flops(config, slots)
        prompt_tokens = self.model.count_tokens(request.prompt)
        difference = reuse.difference if reuse is not None else None
        gains = [walk.gain(k) for k in range(walk.start, steps)]
        regions = reuse.regions if reuse is not None and reuse.k2 > reuse.k1 else None
        ran = done.ran or (Work.whole(config.num_layers),) * len(done.passes)
        worked = list(zip(done.passes, ran, strict=True))
        return Trace(
            cache_result="miss" if reuse is None else "hit",
            entry=reuse.entry_id if reuse is not None else None,
            m=reuse.similarity if reuse is not None else None,
            k1=walk.start,
            k2=reuse.k2 if reuse is not None else 0,
            kind=difference.kind.value if difference is not None else None,
            scope=difference.scope.value if difference is not None else None,
            phrases=(difference.source_phrase, difference.target_phrase) if difference is not None else None,
            tokens=reuse.tokens if reuse is not None else (),
            gains=tuple((gain.key, gain.output) if gain is not None else (1.0, 1.0) for gain in gains),
            visible=tuple(passed / tokens for passed in done.passes[::branches]),
            regions=regions.digest if regions is not None else None,
            steps_total=steps,
            steps_computed=len(done.step_seconds),
            steps_skipped=walk.start,
            forward_passes=sum(work.blocks > 0 for work in ran),
            tokens_computed=sum(passed * work.blocks for passed, work in worked) // config.num_layers,
            tokens_total=branches * steps * tokens,
            flops_computed=text + sum(work_flops(config, passed, slots, work) for passed, work in worked),
            flops_total=text + branches * steps * forward_flops(config, tokens, slots),
            prompt_tokens=prompt_tokens,
            prompt_truncated=prompt_tokens > slots,
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

    def _attention_backend(self) -> str:
        """The attention that diffusers' dispatcher runs: its own name for it."""
        # Private in diffusers, but nothing public tells which backend really runs.
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry

        registry: Any = _AttentionBackendRegistry
        chosen = self.model.transformer.blocks[0].attn1.processor._attention_backend
        return str((chosen or registry.get_active_backend()[0]).value)

    def _backend(self) -> dict[str, str | int]:
        cuda = self._device.type == "cuda"
        return {
            "device": str(self._device),
            "device_name": torch.cuda.get_device_name(self._device) if cuda else platform.machine(),
            "dtype": str(self.model.transformer.dtype).removeprefix("torch."),
            "attention": self._attention_backend(),
            "compiler": "none" if self.network.compiled is None else self.network.compiled.backend,
            "threads": torch.get_num_threads(),
            "fingerprint": self.fingerprint,
            **self._versions,
        }


def _noise(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """x[0], [1, C, T, H, W], as diffusers draws it: CPU generator, float32."""
    return torch.randn((1, *shape), generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32)


def _region_stage(reuse: Reuse | None) -> RegionStage | None:
    if reuse is None or reuse.k2 == reuse.k1 or reuse.regions is None:
        return None
    return RegionStage(reuse.k2, reuse.regions, reuse.latents)


def _gain(reuse: Reuse | None, steps: int) -> Callable[[int], Gain | None]:
    """Amplification is for reuse alone: a step that began from noise has nothing to overcome."""
    if reuse is None or not reuse.tokens:
        return lambda k: None
    hit = reuse

    def gain(k: int) -> Gain | None:
        key, output = hit.gains.at(k, k1=hit.k1, steps=steps, m=hit.similarity)
        return None if key == output == 1.0 else Gain(hit.tokens, key, output)

    return gain


def _check_reuse(request: Request, reuse: Reuse, shape: tuple[int, ...]) -> None:
    """Everything that makes the reuse legal and possible."""
    steps = request.settings.steps
    if reuse.domain_key != request.domain_key:
        raise DomainMismatch(
            f"entry {reuse.entry_id} belongs to another domain than the request",
            hint="weights, settings or embedder differ: generate without reuse",
        )
    if not 0 <= reuse.k1 <= reuse.k2 <= steps:
        raise UnsupportedSettings(f"0 <= k1 <= k2 <= {steps} doesn't hold for k1={reuse.k1}, k2={reuse.k2}")
    if reuse.k1 == 0:
        return
    if reuse.k2 > reuse.k1 and reuse.regions is None:
        raise RegionError(f"steps {reuse.k1} to {reuse.k2} are to be computed by region, and there is none")
    for k in range(reuse.k1, reuse.k2 + 1):
        _check_latents(reuse, k, shape)


def _check_latents(reuse: Reuse, k: int, shape: tuple[int, ...]) -> None:
    if k not in reuse.latents:
        raise MissingStep(
            f"entry {reuse.entry_id} holds no latents of step {k}, only of {sorted(reuse.latents)}",
            hint="generate without reuse; the entry was stored for other boundaries",
        )
    latents = reuse.latents[k]
    if tuple(latents.shape) != shape or not latents.is_floating_point():
        raise CorruptLatents(f"entry {reuse.entry_id}: x[{k}] is {tuple(latents.shape)}, not {shape}")
    if not bool(torch.isfinite(latents).all()):
        raise CorruptLatents(f"entry {reuse.entry_id}: x[{k}] holds NaN or infinity", hint="evict the entry")


def _check_output(latents: torch.Tensor) -> None:
    if not bool(torch.isfinite(latents).all()):
        raise NotFinite("the latents hold NaN or infinity", hint="check the weights with `doctor`, and the dtype")
    if bool(latents.min() == latents.max()):
        raise ConstantOutput("the latents are one value everywhere", hint="check the weights with `doctor`")
