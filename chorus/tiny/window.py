"""Windows on videos: a model that is to be computed in part (region denoising) has to have seen parts.

Wan's rotary positions are relative, so a window's forward pass is the gathered one of its tokens.
"""

from __future__ import annotations

import torch


def corners(cover: torch.Tensor, side: int, generator: torch.Generator) -> torch.Tensor:
    """[n, 2]: rows and columns where windows of `side` latents begin, even, so that no token is cut. Each is around a
    random place of an object; `cover` [n, 1, t, h, w] is the share of objects under each latent."""
    # A scene without an object gets a window anywhere.
    places = (cover.amax(dim=(1, 2)) + 1e-6).flatten(1)
    middle = torch.multinomial(places.cpu(), 1, generator=generator)[:, 0]
    width = cover.shape[-1]
    first = torch.stack([middle // width, middle % width], dim=1) - side // 2
    most = torch.tensor(cover.shape[-2:]) - side
    return torch.minimum(first.clamp_min(0), most) // 2 * 2


def cut(latents: torch.Tensor, corners: torch.Tensor, side: int) -> torch.Tensor:
    """The windows [n, C, t, side, side] of `latents` [n, C, t, h, w]."""
    return torch.stack(
        [each[..., y : y + side, x : x + side] for each, (y, x) in zip(latents, corners.tolist(), strict=True)]
    )
