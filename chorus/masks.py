"""What a segmenter found, as bytes: a bit for each token, in safetensors with a checksum inside."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError

from .errors import CorruptMask
from .latents import opened, seal

FORMAT = "chorus-mask/1"
_NAME = "mask"


@dataclass(frozen=True, eq=False)
class Mask:
    """M_base before any dilation, bool [T, h, w]; None where the segmenter looked and found nothing."""

    region: torch.Tensor | None


def pack(mask: Mask, asked: str) -> bytes:
    """Bytes of a mask; `asked` names what was asked of whom."""
    bits = {_NAME: torch.zeros(0, dtype=torch.uint8)}
    if mask.region is not None:
        bits[_NAME] = torch.from_numpy(np.packbits(mask.region.cpu().numpy()))
    grid = None if mask.region is None else list(mask.region.shape)
    return seal({"format": FORMAT, "asked": asked, "grid": grid}, bits)


def unpack(data: bytes, asked: str) -> Mask:
    """The mask that was packed under `asked`. Raises CorruptMask for anything else."""
    try:
        header, tensors = opened(data)
        bits, grid = tensors[_NAME], header["grid"]
        if (header["format"], header["asked"]) != (FORMAT, asked):
            raise ValueError("it answers another question, or has another form")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptMask(f"the stored mask can't be used: {error}", hint="make it anew") from error
    if grid is None:
        return Mask(None)
    values = np.unpackbits(bits.numpy(), count=math.prod(grid))
    return Mask(torch.from_numpy(values.astype(bool)).reshape(grid))
