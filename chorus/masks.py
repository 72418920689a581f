"""What a segmenter found, as bytes: a bit for each token, in safetensors with a checksum inside."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import CorruptMask
from .latents import digest, read_header

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
    header = {"format": FORMAT, "asked": asked, "grid": grid}
    header["sha256"] = digest(json.dumps(header, sort_keys=True), bits)
    return save(bits, {"chorus": json.dumps(header, sort_keys=True)})


def unpack(data: bytes, asked: str) -> Mask:
    """The mask that was packed under `asked`. Raises CorruptMask for anything else."""
    try:
        bits = load(data)[_NAME]
        header = read_header(data)
        written = header.pop("sha256")
        if (header["format"], header["asked"]) != (FORMAT, asked):
            raise ValueError("it answers another question, or has another form")
        if digest(json.dumps(header, sort_keys=True), {_NAME: bits}) != written:
            raise ValueError("it isn't the one that was written")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptMask(f"the stored mask can't be used: {error}", hint="make it anew") from error
    grid = header["grid"]
    if grid is None:
        return Mask(None)
    values = np.unpackbits(bits.numpy(), count=math.prod(grid))
    return Mask(torch.from_numpy(values.astype(bool)).reshape(grid))
