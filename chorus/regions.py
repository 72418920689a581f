"""Regions of selective denoising: which tokens are written (edit) and which are computed (see), on the token grid.

Source: Chorus (arXiv 2604.04451), SRD: the divergent object's region in the source, dilated twice with all-ones
kernels. The paper gives no units and no temporal radius; here radii are in tokens, for space and time apart.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property

import numpy as np
import torch

from .errors import RegionError

# Numbers of tokens that a widened region may have: each costs a compilation, each token too much a bit of time.
SIZES = 16

# Pixel frames per latent frame, but for the first, which stands alone: Wan's causal groups.
GROUP = 4


@dataclass(frozen=True)
class RegionSettings:
    """Radii of dilation in tokens, and the share of the tokens above which a region is not worth its overhead.

    Checked at birth: raises RegionError. What is seen reaches further than what is written, in space: so the written
    rim is computed with its surroundings in view.
    """

    # The built-in pilot's radii in space; none in time, since a token's group of frames covers a moving object already.
    edit_spatial: int = 1
    edit_temporal: int = 0
    see_spatial: int = 2
    see_temporal: int = 0
    largest_share: float = 0.75

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "largest_share"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise RegionError(f"regions: {name} is a whole number of tokens from 0 on, not {value!r}")
        if self.see_spatial <= self.edit_spatial:
            raise RegionError(f"regions: see_spatial ({self.see_spatial}) must exceed edit_spatial")
        if self.see_temporal < self.edit_temporal:
            raise RegionError(f"regions: see_temporal ({self.see_temporal}) must not be below edit_temporal")
        if not 0 < self.largest_share <= 1:
            raise RegionError(f"regions: largest_share lies in (0, 1], not {self.largest_share}")


@dataclass(frozen=True, eq=False)
class Regions:
    """Three masks on the token grid, bool [T, h, w], with base <= edit <= see. Checked at birth: raises RegionError.

    `base` is what the segmenter found, `edit` what is written back, `see` what is computed.
    """

    base: torch.Tensor
    edit: torch.Tensor
    see: torch.Tensor

    def __post_init__(self) -> None:
        for name, mask in self._masks():
            _check(mask, f"the region's {name}")
            if mask.shape != self.base.shape:
                raise RegionError(f"the region's {name} is {list(mask.shape)}, its base {list(self.base.shape)}")
        if bool((self.base & ~self.edit).any()) or bool((self.edit & ~self.see).any()):
            raise RegionError("a region's base must lie inside its edit, and that inside its see")

    @cached_property
    def share(self) -> float:
        """The share of all tokens that `see` covers: what stage 2 computes."""
        return _share(self.see)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over the grid's shape and the bits of all three masks: for the lineage."""
        found = hashlib.sha256(repr(tuple(self.base.shape)).encode())
        for _, mask in self._masks():
            found.update(np.packbits(mask.cpu().numpy()).tobytes())
        return found.hexdigest()

    def _masks(self) -> tuple[tuple[str, torch.Tensor], ...]:
        return ("base", self.base), ("edit", self.edit), ("see", self.see)


class Reason(StrEnum):
    """Why there is no region."""

    empty = "empty"  # nothing was found: a stage 2 would write nothing
    too_large = "too_large"  # so many tokens would be computed that gathering them doesn't pay


@dataclass(frozen=True)
class NoRegion:
    """There is nothing to gain from a stage 2; `share` is that of the tokens which it would have computed."""

    reason: Reason
    share: float


def build(base: torch.Tensor, settings: RegionSettings) -> Regions | NoRegion:
    """The regions around `base`, bool [T, h, w], or why there are none. Raises RegionError."""
    if not bool(_check(base, "the region's base").any()):
        return NoRegion(Reason.empty, 0.0)
    see = dilate(base, settings.see_temporal, settings.see_spatial)
    if _share(see) > settings.largest_share:
        return NoRegion(Reason.too_large, _share(see))
    return Regions(base, dilate(base, settings.edit_temporal, settings.edit_spatial), see)


def widen(regions: Regions) -> Regions:
    """The same with `see` grown to the next of SIZES even shares of the tokens, by those that are nearest to it.

    What is written stays the same. What is seen beside it is what the source has there, as in the rim of every region.
    """
    see, total = regions.see, regions.see.numel()
    step = -(-total // SIZES)
    wanted = min(total, -(-int(see.sum()) // step) * step)
    while (lacking := wanted - int(see.sum())) > 0:
        ring = (dilate(see, 1, 1) & ~see).flatten().nonzero()[:lacking, 0]
        see = see.flatten().index_fill(0, ring, True).reshape(see.shape)
    return Regions(regions.base, regions.edit, see)


def pool(mask: torch.Tensor, tokens: tuple[int, int]) -> torch.Tensor:
    """Pixels, bool [frames, H, W], to the token grid, bool [T, h, w]: a token counts if any of its pixels does.

    `frames` must be 4k+1: the first stands alone, then four at a time. `tokens` is a token's height and width in
    pixels (Wan: 16, 16), which must divide the picture's. Raises RegionError.
    """
    frames, height, width = _check(mask, "the mask of pixels").shape
    if frames % GROUP != 1:
        raise RegionError(f"a mask of pixels has 4k+1 frames, not {frames}")
    if min(tokens) < 1 or height % tokens[0] or width % tokens[1]:
        raise RegionError(f"tokens of {tokens[0]}x{tokens[1]} pixels don't divide a mask of {height}x{width}")
    blocks = mask.reshape(frames, height // tokens[0], tokens[0], width // tokens[1], tokens[1])
    small = blocks.any(dim=4).any(dim=2)
    groups = small[1:].reshape(-1, GROUP, *small.shape[1:]).any(dim=1)
    return torch.cat([small[:1], groups])


def dilate(mask: torch.Tensor, temporal: int, spatial: int) -> torch.Tensor:
    """`mask`, bool [T, h, w], grown by radii in tokens with all-ones kernels; by 0 it stays as it is."""
    if temporal < 0 or spatial < 0:
        raise RegionError(f"radii must not be negative: {temporal}, {spatial}")
    _check(mask, "the mask to dilate")
    radii = (temporal, spatial, spatial)
    kernel = tuple(2 * radius + 1 for radius in radii)
    grown = torch.nn.functional.max_pool3d(mask[None].float(), kernel, stride=1, padding=radii)
    return grown[0] > 0


def complement(objects: torch.Tensor) -> torch.Tensor:
    """The base for a difference in the background: the tokens, bool [T, h, w], that hold no pixel of any object.

    Tokens on an object's rim show some background too: an edit_spatial of 1 or more has them written.
    """
    return ~_check(objects, "the objects' region")


def _share(mask: torch.Tensor) -> float:
    return int(mask.sum()) / mask.numel()


def _check(mask: torch.Tensor, name: str) -> torch.Tensor:
    if mask.dtype != torch.bool or mask.dim() != 3 or mask.numel() == 0:
        raise RegionError(f"{name} must be bool with three dimensions, not {mask.dtype} {list(mask.shape)}")
    return mask
