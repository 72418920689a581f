"""Wan's latent codec: latents to pixels, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import wan


class WanCodec:
    """An AutoencoderKLWan of a folder in diffusers' layout."""

    def __init__(self, folder: Path, device: str) -> None:
        """Loads it. Raises WeightsError."""
        self._vae: Any = wan.load_codec(folder / "vae", device)
        self._device = device
        config = self._vae.config
        self.spatial = int(config.scale_factor_spatial)  # pixels for each latent, along height and width
        self.temporal = int(config.scale_factor_temporal)  # frames for each latent but the first
        shape = (1, config.z_dim, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=device).view(shape)
        self._inverse_std = 1.0 / torch.tensor(config.latents_std, device=device).view(shape)

    @property
    def tiling(self) -> bool:
        """Whether large frames are decoded in overlapping tiles: a fraction of the memory, and other last bits."""
        return bool(self._vae.use_tiling)

    @tiling.setter
    def tiling(self, on: bool) -> None:
        if on:
            self._vae.enable_tiling()
        else:
            self._vae.disable_tiling()

    def release(self) -> None:
        """Forget what a decode that failed has left."""
        self._vae.clear_cache()

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Pixels [F, H, W, 3] in 0..1 of latents [C, T, H, W]; bit for bit what diffusers' pipeline makes of them."""
        scaled = latents[None].to(self._device, torch.float32) / self._inverse_std + self._mean
        video: torch.Tensor = self._vae.decode(scaled, return_dict=False)[0]
        return (video[0] * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
