"""Latents to frames, in tiles where the device has no room for the whole."""

from __future__ import annotations

import gc
import logging
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.wan_model import WanModel
from chorus_batch.jobs import memory
from chorus_batch.jobs.cards.card import ModelCard

log = logging.getLogger(__name__)

Frames: TypeAlias = npt.NDArray[np.uint8]  # [F, H, W, 3]
TILED = "decoded in tiles: the last bits are others than the whole frame's"


class Decoder:
    """Decodes one model's latents. For one thread, which may be another than the engine's."""

    def __init__(self, engine: Engine, card: ModelCard, device: str, others: memory.Auxiliaries = memory.ALONE) -> None:
        """`others`: the models that this process may load beside."""
        self._others = others
        self._engine = engine
        self._card = card
        self._device = device

    def decode(self, latents: torch.Tensor) -> tuple[Frames, tuple[str, ...]]:
        """Frames of latents [C, T, H, W], and what the trace should say. Running out of memory is met once by tiles.

        Raises NotFinite, ConstantOutput, and OutOfMemoryError if tiles don't fit either.
        """
        model = self._engine.model
        if not isinstance(model, WanModel):
            return self._engine.decode(latents), ()
        model.codec.tiling = self._scarce(latents)
        frames = self._tried(latents, again=not model.codec.tiling)
        if frames is None:
            # Here, where no traceback holds on to what was half decoded.
            model.codec.release()
            gc.collect()
            if self._device.startswith("cuda"):
                torch.cuda.empty_cache()
            model.codec.tiling = True
            frames = self._engine.decode(latents)
        return frames, (TILED,) if model.codec.tiling else ()

    def _tried(self, latents: torch.Tensor, *, again: bool) -> Frames | None:
        try:
            return self._engine.decode(latents)
        except torch.OutOfMemoryError as error:
            if not again:
                raise
            log.warning("decoding again, in tiles: %s", error)
            return None

    def _scarce(self, latents: torch.Tensor) -> bool:
        """Whether the whole has no room; unknown on a CPU, and with a card that doesn't tell the model's sizes."""
        anatomy = self._card.anatomy
        if anatomy is None or not self._device.startswith("cuda"):
            return False
        time, height, width = latents.shape[1:]
        task = memory.Task(
            width * memory.SPATIAL,
            height * memory.SPATIAL,
            (time - 1) * memory.TEMPORAL + 1,
            self._card.max_prompt_tokens,
        )
        free, total = torch.cuda.mem_get_info(self._device)
        # What the allocator holds and nobody uses is free too.
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return memory.needs_tiling(anatomy, task, self._card.dtype, total, free, self._others)
