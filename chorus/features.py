"""A text's features as bytes: safetensors with a checksum inside, without the padding."""

from __future__ import annotations

import torch
from safetensors import SafetensorError

from .errors import CorruptFeatures
from .latents import opened, seal

FORMAT = "chorus-text/1"
_NAME = "features"


def pack(features: torch.Tensor, text: str) -> bytes:
    """Bytes of the features [1, slots, D] of a text; rows of zeros at the end are counted, not stored."""
    rows = features[0].detach().to("cpu")
    filled = rows.any(dim=1).nonzero()
    # Own memory: a slice would be stored with all of its tensor.
    kept = {_NAME: rows[: int(filled[-1]) + 1 if len(filled) else 0].clone()}
    return seal({"format": FORMAT, "slots": len(rows), "text": text}, kept)


def unpack(data: bytes, text: str) -> torch.Tensor:
    """The features [1, slots, D] of that text, bit for bit. Raises CorruptFeatures for anything else."""
    try:
        header, tensors = opened(data)
        rows, slots = tensors[_NAME], int(header["slots"])
        if (header["format"], header["text"]) != (FORMAT, text) or rows.ndim != 2 or len(rows) > slots:
            raise ValueError("they are another text's, or of another form")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptFeatures(f"the stored text features can't be used: {error}", hint="encode the text") from error
    return torch.nn.functional.pad(rows, (0, 0, 0, slots - len(rows)))[None]
