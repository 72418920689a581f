"""Endless training data: batch number and seed give the batch, so a resumed run sees what an unbroken one would."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .captions import caption
from .codec import PATCH
from .decoder import SharpCodec
from .render import place, render_with_cover
from .world import Curriculum, draw_scenes


@dataclass(frozen=True)
class Batch:
    """`latents` [n, 16, t, h, w]; `cover` [n, 1, t, h, w]: the share of objects under each latent pixel."""

    captions: list[str]
    latents: torch.Tensor
    cover: torch.Tensor


def draw_batch(
    codec: SharpCodec,
    size: int,
    canvas: int,
    seed: tuple[int, ...],
    *,
    frames: int = 9,
    curriculum: Curriculum | None = None,
    caption_dropout: float = 0.1,
    device: str = "cpu",
) -> Batch:
    """A batch of fresh scenes. `seed` names it, e.g. (run seed, rank, step)."""
    rng = np.random.default_rng(seed)
    scenes, placement = place(draw_scenes(size, rng, curriculum), rng, canvas, frames)
    video, cover = render_with_cover(scenes, placement, canvas)
    texts = [caption(s, rng, drop_words=0.15) if rng.random() >= caption_dropout else "" for s in scenes]
    pooled = torch.nn.functional.avg_pool3d(cover[:, :, 1:], PATCH)
    first = torch.nn.functional.avg_pool3d(cover[:, :, :1], (1, PATCH, PATCH))
    return Batch(texts, codec.encode(video.to(device)), torch.cat([first, pooled], dim=2).to(device))
