"""Sharper pixels from the linear codec's latents: a small convolutional network adds what the linear map lost.

It sees a latent frame, the one before it and their neighbourhood, so it is causal in time, and works on any canvas.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import WeightsError
from .codec import CHANNELS, PATCH, LinearCodec


class DetailDecoder(nn.Module):
    """Latents [n, 16, 1+k, h, w] -> what to add to the linear codec's video, [n, 3, 1+4k, 4h, 4w]."""

    def __init__(self, width: int = 96, blocks: int = 3) -> None:
        """Zero at first: the linear codec alone."""
        super().__init__()
        self.first = _Network(CHANNELS, 3 * PATCH**2, width // 2, blocks)
        self.group = _Network(2 * CHANNELS, 3 * PATCH**3, width, blocks)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Any number of frames, any size."""
        n, _, t, h, w = latents.shape
        first = _pixels(self.first(latents[:, :, 0]).reshape(n, 1, -1, h, w), 1)
        if t == 1:
            return first
        pairs = torch.cat([latents[:, :, :-1], latents[:, :, 1:]], dim=1).transpose(1, 2).flatten(0, 1)
        return torch.cat([first, _pixels(self.group(pairs).reshape(n, t - 1, -1, h, w), PATCH)], dim=2)


class SharpCodec:
    """The linear codec for batches, with the network after it when there is one."""

    def __init__(self, linear: LinearCodec, detail: DetailDecoder | None = None) -> None:
        """Without `detail`: the linear codec as it is."""
        self.linear, self.detail = linear, detail

    @torch.no_grad()
    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """[n, 3, 1+4k, H, W] in -1..1 -> [n, 16, 1+k, H/4, W/4]."""
        latents: torch.Tensor = torch.vmap(self.linear.encode)(video)
        return latents

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """[n, 16, 1+k, h, w] -> [n, 3, 1+4k, 4h, 4w], about -1..1, not clipped."""
        video: torch.Tensor = torch.vmap(self.linear.decode)(latents)
        return video if self.detail is None else video + self.detail(latents)


def load_codec(codec: Path, decoder: Path | None, device: str = "cpu") -> SharpCodec:
    """The linear codec in the file `codec`, with the detail decoder in `decoder` if one is given. Raises
    WeightsError."""
    linear = LinearCodec(codec, device)
    if decoder is None:
        return SharpCodec(linear)
    detail = DetailDecoder()
    try:
        detail.load_state_dict({name: value.float() for name, value in load_file(decoder).items()})
    except (OSError, SafetensorError, RuntimeError) as error:
        raise WeightsError(f"the decoder {decoder} can't be loaded: {error}") from error
    return SharpCodec(linear, detail.eval().requires_grad_(False).to(device))


def _pixels(channels: torch.Tensor, span: int) -> torch.Tensor:
    """[n, k, 3*span*4*4, h, w] -> [n, 3, k*span, 4h, 4w]."""
    n, k, _, h, w = channels.shape
    cut = channels.reshape(n, k, 3, span, PATCH, PATCH, h, w).permute(0, 2, 1, 3, 6, 4, 7, 5)
    return cut.reshape(n, 3, k * span, h * PATCH, w * PATCH)


class _Network(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, width: int, blocks: int) -> None:
        super().__init__()
        self.enter = nn.Conv2d(channels_in, width, 3, padding=1, padding_mode="replicate")
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.SiLU(),
                nn.Conv2d(width, width, 3, padding=1, padding_mode="replicate"),
                nn.SiLU(),
                nn.Conv2d(width, width, 1),
            )
            for _ in range(blocks)
        )
        self.leave = nn.Conv2d(width, channels_out, 1)
        # It starts as the linear codec.
        for parameter in self.leave.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.leave(nn.functional.silu(x))
        return out
