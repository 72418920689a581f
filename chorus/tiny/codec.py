"""The built-in model's latent codec: a fixed linear one.

Causal in time as Wan's: the first frame by itself in patches of 4x4 pixels, then groups of four frames in patches of
4x4x4. A patch is flattened as (channel, frame, row, column) and projected to 16 channels.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import WeightsError

PATCH = 4
CHANNELS = 16


class LinearCodec:
    """Videos [3, 1+4k, H, W] in -1..1 to latents [16, 1+k, H/4, W/4] and back."""

    def __init__(self, path: Path, device: str) -> None:
        """Reads `codec.safetensors`. Raises WeightsError."""
        try:
            weights = load_file(str(path), device=device)
            self._first = (weights["fU"], weights["fmu"], weights["fs"])
            self._group = (weights["gU"], weights["gmu"], weights["gs"])
        except (OSError, SafetensorError, KeyError) as error:
            raise WeightsError(f"the codec {path} can't be loaded: {error}") from error

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Latents [16, 1+k, H/4, W/4] of a video [3, 1+4k, H, W] in -1..1."""
        first = _encode(video[:, :1], 1, self._first)
        return torch.cat([first, _encode(video[:, 1:], PATCH, self._group)], 1) if video.shape[1] > 1 else first

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """The video [3, 1+4k, H, W], about -1..1 (not clipped), of latents [16, 1+k, H/4, W/4]."""
        first = _decode(latents[:, :1], 1, self._first)
        return torch.cat([first, _decode(latents[:, 1:], PATCH, self._group)], 1) if latents.shape[1] > 1 else first


def _encode(video: torch.Tensor, span: int, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    basis, mean, scale = weights
    c, f, h, w = video.shape
    patches = video.reshape(c, f // span, span, h // PATCH, PATCH, w // PATCH, PATCH).permute(1, 3, 5, 0, 2, 4, 6)
    return (((patches.flatten(3) - mean) @ basis) / scale).permute(3, 0, 1, 2).contiguous()


def _decode(latents: torch.Tensor, span: int, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
    basis, mean, scale = weights
    _, t, h, w = latents.shape
    patches = (latents.permute(1, 2, 3, 0) * scale) @ basis.T + mean
    pixels = patches.reshape(t, h, w, 3, span, PATCH, PATCH).permute(3, 0, 4, 1, 5, 2, 6)
    return pixels.reshape(3, t * span, h * PATCH, w * PATCH).contiguous()
