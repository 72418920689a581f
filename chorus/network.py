"""A Wan transformer, walked module by module: all tokens, or only those of a region (selective region denoising).

The work shrinks, it isn't masked: the tokens of a region are gathered once before the first block, with their own
rotary positions, all blocks run on the short sequence, and the result is scattered back once (Chorus, section 4).
For all tokens it computes what `WanTransformer3DModel.forward` does, in the same order: the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from chorus_batch.kernels.modulate import modulate

from .attention import Gain, Passing, SelfAttention, Text, TextAttention, Watch
from .block import CompiledBlock, run_block
from .errors import RegionError, UnsupportedSettings

if TYPE_CHECKING:
    from .stepcache import StepCache


@dataclass(frozen=True)
class Visible:
    """The tokens that a pass computes: their places in the sequence [n], None for all, and their (cos, sin)."""

    places: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor]


class Network:
    """The transformer as the denoising loop calls it. Not for several threads at once."""

    def __init__(self, transformer: Any) -> None:
        """Puts this project's attention processors in. Raises UnsupportedSettings for an image-to-video model."""
        if transformer.config.added_kv_proj_dim is not None:
            raise UnsupportedSettings("image-to-video transformers aren't supported", hint="use a text-to-video model")
        self.transformer = transformer
        self.compiled: CompiledBlock | None = None
        """Runs the blocks where it's given, but for passes with a step cache: their hooks are in the modules' calls."""
        self._passing = Passing()
        for layer, block in enumerate(transformer.blocks):
            # A backend that was chosen before stays chosen.
            ours: tuple[Any, Any] = (SelfAttention(), TextAttention(layer, self._passing))
            for attention, processor in zip((block.attn1, block.attn2), ours, strict=True):
                processor._attention_backend = attention.processor._attention_backend
                attention.set_processor(processor)

    def use_attention(self, backend: str) -> None:
        """Attention by a backend of diffusers' dispatcher. Raises UnsupportedSettings if it can't run here."""
        with _refused(f"attention backend {backend!r}", "leave CHORUS_ATTENTION_BACKEND out, or use native"):
            self.transformer.set_attention_backend(backend)
            self._try_out()

    def use_compiler(self, backend: str = "inductor") -> None:
        """Blocks as a backend of torch.compile makes them. Raises UnsupportedSettings where nothing can be compiled."""
        hint = "install a C++ compiler (g++), for a GPU triton and gcc too, or leave CHORUS_COMPILE out"
        self.compiled = CompiledBlock(backend)
        with _refused("torch.compile", hint):
            self._try_out()

    def _try_out(self) -> None:
        """A pass over four tokens: whether what runs the blocks can run here at all."""
        config = self.transformer.config
        t, h, w = config.patch_size
        device = next(self.transformer.parameters()).device
        with torch.inference_mode():
            latents = torch.zeros(1, config.in_channels, t, 2 * h, 2 * w, device=device, dtype=self.dtype)
            text = self.text(torch.zeros(1, 8, config.text_dim, device=device, dtype=self.dtype))
            times = self.times(torch.zeros(1, device=device))
            self.velocity(latents, times, text, self.visible(latents))

    @property
    def dtype(self) -> torch.dtype:
        """Of the latents that a pass reads."""
        dtype: torch.dtype = self.transformer.dtype
        return dtype

    def text(self, features: torch.Tensor) -> Text:
        """A branch's text, from the text encoder's features [1, S, text_dim]; for one request."""
        return Text(self.transformer.condition_embedder.text_embedder(features))

    def visible(self, latents: torch.Tensor, see: torch.Tensor | None = None) -> Visible:
        """All tokens of latents [1, C, T, H, W], or those of `see`, bool on the token grid. Raises RegionError.

        Where blocks are compiled, a `see` of everything isn't gathered: it would be compiled a second time.
        """
        cos, sin = self.transformer.rope(latents)
        if see is None:
            return Visible(None, (cos, sin))
        grid = tuple(n // p for n, p in zip(latents.shape[2:], self.transformer.config.patch_size, strict=True))
        if tuple(see.shape) != grid or see.dtype != torch.bool:
            raise RegionError(f"the region is {see.dtype} {tuple(see.shape)}, the token grid is {grid}")
        if self.compiled is not None and bool(see.all()):
            return Visible(None, (cos, sin))
        places = see.flatten().nonzero()[:, 0].to(latents.device)
        return Visible(places, (cos[:, places], sin[:, places]))

    def velocity(
        self,
        latents: torch.Tensor,
        times: tuple[torch.Tensor, torch.Tensor],
        text: Text,
        visible: Visible,
        *,
        branch: str = "cond",
        cache: StepCache | None = None,
        gain: Gain | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """One pass: the velocity [1, C, T, H, W] in float32 of latents [1, C, T, H, W]; 0 where a token isn't visible.

        `times` is what `times` made of the step's time. `branch` names the guidance branch for `cache`, the step cache
        that is enabled on the transformer.
        """
        model = self.transformer
        embedded, projected = times
        hidden = model.patch_embedding(latents).flatten(2).transpose(1, 2)
        tokens = hidden.shape[1]
        # A copy in the blocks' layout, of what they need.
        hidden = hidden.contiguous() if visible.places is None else hidden.index_select(1, visible.places)
        compiled = (
            self.compiled if cache is None and self.compiled is not None and self.compiled.takes(hidden) else None
        )
        skipping = cache.passing(branch, latents) if cache is not None else nullcontext()
        with self._pass(text, gain, watch), skipping:
            for layer, block in enumerate(model.blocks):
                if compiled is not None:
                    key, value = block.attn2.processor.keys_and_values(block.attn2, text.features)
                    # A tensor, for a number would be compiled in.
                    lift = hidden.new_full((), gain.output if gain is not None else 1.0)
                    hidden, query = compiled(block, hidden, key, value, lift, projected, visible.rotary)
                    if watch is not None:
                        watch(layer, query, key)
                elif hidden.is_cuda and cache is None:
                    read = partial(block.attn2, encoder_hidden_states=text.features)
                    hidden = run_block(block, hidden, read, projected, visible.rotary)
                else:
                    hidden = block(hidden, text.features, projected, visible.rotary)
        shift, scale = (model.scale_shift_table + embedded.unsqueeze(1)).chunk(2, dim=1)
        hidden = model.proj_out(modulate(hidden, scale, shift, model.norm_out.eps))
        if visible.places is not None:
            hidden = hidden.new_zeros(1, tokens, hidden.shape[2]).index_copy_(1, visible.places, hidden)
        velocity: torch.Tensor = self._latents(hidden, latents.shape).float()
        return velocity

    def times(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The embedding of a time [1], and its projection [1, 6, dim] for the blocks: the same in all passes of a step.

        It's what the transformer's `condition_embedder` computes beside the text.
        """
        embedder = self.transformer.condition_embedder
        dtype = next(iter(embedder.time_embedder.parameters())).dtype
        embedded = embedder.time_embedder(embedder.timesteps_proj(timestep).to(dtype)).to(self.dtype)
        return embedded, embedder.time_proj(embedder.act_fn(embedded)).unflatten(1, (6, -1))

    @contextmanager
    def _pass(self, text: Text, gain: Gain | None, watch: Watch | None) -> Iterator[None]:
        passing = self._passing
        passing.text, passing.gain, passing.watch = text, gain, watch
        try:
            yield
        finally:
            passing.text = passing.gain = passing.watch = None

    def _latents(self, hidden: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Patches [1, N, pT*pH*pW*C] back to latents [1, C, T, H, W]."""
        patch = self.transformer.config.patch_size
        grid = [n // p for n, p in zip(shape[2:], patch, strict=True)]
        patches: torch.Tensor = hidden.reshape(1, *grid, *patch, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return patches.flatten(6, 7).flatten(4, 5).flatten(2, 3)


@contextmanager
def _refused(what: str, hint: str) -> Iterator[None]:
    """What can't run here is named. Running out of memory and losing the device stay what they are."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        # What follows the first empty line is advice to developers.
        cause = " ".join(str(error).strip().partition("\n\n")[0].split())
        raise UnsupportedSettings(f"{what} can't run here: {cause}", hint=hint) from error
