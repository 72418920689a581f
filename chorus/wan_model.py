"""Wan2.1 text-to-video from a folder in diffusers' layout, as released or distilled, with or without a LoRA."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import lora, wan
from .config import GenerationSettings
from .errors import OutOfMemory, UnsupportedSettings, WeightsError
from .wan_codec import WanCodec
from .wan_text import SLOTS, WanText

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class WanSource:
    """Where a model's weights lie, and their sha256 (hex) as whoever found them computed it.

    `checkpoint`, a .safetensors file or a folder of them, takes the place of the folder's transformer; `lora` is added
    to the transformer, times `lora_strength`.
    """

    folder: Path
    fingerprint: str
    checkpoint: Path | None = None
    lora: Path | None = None
    lora_strength: float = 1.0


class WanModel:
    """A Wan2.1 on one device. See `chorus.model.VideoModel` for what each method promises.

    Transformer and text encoder have the dtype that is asked for, the codec is float32.
    """

    def __init__(
        self,
        name: str,
        source: WanSource,
        device: str = "cpu",
        dtype: str = "bfloat16",
        slots: int = SLOTS,
        *,
        text_later: bool = False,
        turns: bool = False,
    ) -> None:
        """Loads everything; with `text_later` the text encoder when a text is first encoded.

        `turns` is for a device without room for both: transformer and text encoder are never on it at once. Raises
        WeightsError, UnsupportedSettings and OutOfMemory, and then keeps nothing.
        """
        self._device, self._turns, self._encoding = device, turns, False
        self.name = name
        self.fingerprint = source.fingerprint
        parts = _loaded(source, device, _usable(dtype, device), slots, text_later or turns)
        if parts is None:
            # Raised here, where no traceback holds on to what was loaded.
            gc.collect()
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
            raise OutOfMemory(
                f"{device} has no room for {name} in {dtype}",
                hint="free the device, or give the worker one with more memory",
            )
        self.transformer, self.text, self.codec = parts

    def check(self, settings: GenerationSettings) -> None:
        """Raise UnsupportedSettings for a size that the latents can't hold."""
        patch = self.transformer.config.patch_size
        for name, size, step in (
            ("width", settings.width, self.codec.spatial * patch[2]),
            ("height", settings.height, self.codec.spatial * patch[1]),
        ):
            if size % step:
                raise UnsupportedSettings(
                    f"{name} must be a multiple of {step}, not {size}", hint=f"use {size // step * step}"
                )
        grid = [n // p for n, p in zip(self.latent_shape(settings)[1:], patch, strict=True)]
        longest = self.transformer.config.rope_max_seq_len
        if max(grid) > longest:
            raise UnsupportedSettings(
                f"{self.name} knows {longest} positions along each axis, the video has {max(grid)}",
                hint="ask for a shorter or smaller video",
            )

    def latent_shape(self, settings: GenerationSettings) -> tuple[int, int, int, int]:
        """[C, T, H, W] of the latents."""
        return (
            int(self.transformer.config.in_channels),
            (settings.frames - 1) // self.codec.temporal + 1,
            settings.height // self.codec.spatial,
            settings.width // self.codec.spatial,
        )

    @property
    def text_slots(self) -> int:
        """Text positions that the transformer attends to, padding included."""
        return self.text.slots

    def count_tokens(self, text: str) -> int:
        """Tokens of a text, uncut, with the end-of-sequence one."""
        return self.text.count_tokens(text)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """The characters that each text slot stands for."""
        return self.text.token_offsets(text)

    def encode(self, text: str) -> torch.Tensor:
        """Text features [1, slots, D]."""
        with self.encoding():
            return self.text.encode(text).to(self.transformer.dtype)

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Around several texts: where transformer and encoder take turns, they change places once."""
        if self._encoding or not self._turns:
            yield
            return
        self._encoding = True
        self.transformer.to("cpu")
        try:
            yield
        finally:
            self.text.park()
            self.transformer.to(self._device)
            self._encoding = False

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [F, H, W, 3] in 0..1 of latents [C, T, H, W]."""
        return self.codec.decode(latents)

    def judge(self, prompt: str, frames: npt.NDArray[np.uint8]) -> dict[str, bool] | None:
        """None: nobody here can tell what a video of any prompt shows."""
        return None

    def remark(self, prompt: str) -> str | None:
        """None: a large model knows more than anybody could list."""
        return None


def _usable(dtype: str, device: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnsupportedSettings(f"a Wan model can't be run in {dtype}", hint=f"use {' or '.join(DTYPES)}")
    if (
        dtype == "bfloat16"
        and device.startswith("cuda")
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UnsupportedSettings(
            f"{torch.cuda.get_device_name()} has no bfloat16",
            hint="add the model anew: chorus-batch model add ... --dtype fp32 --replace",
        )
    return DTYPES[dtype]


def _loaded(
    source: WanSource, device: str, dtype: torch.dtype, slots: int, text_later: bool
) -> tuple[Any, WanText, WanCodec] | None:
    """Transformer, text and codec; None where the device's memory is too small."""
    if not source.folder.is_dir():
        raise WeightsError(f"there is no folder {source.folder}", hint=wan.FETCH)
    try:
        text = WanText(source.folder, device, dtype, slots, later=text_later)
        codec = WanCodec(source.folder, device)
        transformer = wan.load_transformer(source.folder / "transformer", device, dtype, source.checkpoint)
        if source.lora is not None:
            lora.fuse(transformer, source.lora, source.lora_strength)
    except (torch.OutOfMemoryError, MemoryError):
        return None
    if transformer.config.text_dim != text.width:
        raise WeightsError(
            f"the text encoder gives {text.width} values a token, the transformer reads {transformer.config.text_dim}",
            hint=wan.FETCH,
        )
    return transformer, text, codec
