"""A trajectory's latents as bytes: safetensors, never pickle, with a checksum inside.

The same trajectory always gives the same bytes. Tensors come back in float32 whatever they were stored in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from .errors import CorruptLatents
from .evidence import Evidence

FORMAT = "chorus-trajectory/2"
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EVIDENCE = "evidence"
_NAME = re.compile(r"x_(\d{5})")


class Unpacked(NamedTuple):
    """{k: x[k] float32}, the metadata that they were packed with, and the source's evidence if there was any."""

    latents: dict[int, torch.Tensor]
    metadata: dict[str, str]
    evidence: Evidence | None


def pack(
    trajectory: Mapping[int, torch.Tensor],
    metadata: Mapping[str, str],
    dtype: str = "float32",
    evidence: Evidence | None = None,
) -> bytes:
    """Bytes of {k: x[k]}, each [C, T, H, W], stored as `dtype` (float32, bfloat16 or float16), and of the evidence.

    Only float32 gives back the same latents bit for bit. Raises CorruptLatents where a latent isn't finite, or isn't in
    that dtype.
    """
    tensors: dict[str, torch.Tensor] = {}
    for k, latents in sorted(trajectory.items()):
        stored = latents.detach().to("cpu", DTYPES[dtype]).contiguous()
        if not bool(torch.isfinite(stored).all()):
            raise CorruptLatents(f"x[{k}] is not finite as {dtype}", hint="store float32, or look at the generation")
        tensors[f"x_{k:05d}"] = stored
    header: dict[str, Any] = {"format": FORMAT, "metadata": dict(metadata)}
    if evidence is not None:
        tensors[_EVIDENCE] = evidence.maps.contiguous()
        header["words"] = [list(span) for span in evidence.spans]
    return seal(header, tensors)


def unpack(data: bytes) -> Unpacked:
    """What `pack` was given. Raises CorruptLatents for anything else."""
    try:
        tensors = load(data)
        header = read_header(data)
        if not isinstance(header, dict):
            raise ValueError("no header")
        written = header.pop("sha256")
        if header["format"] != FORMAT:
            raise CorruptLatents(f"latents of format {header['format']!r}, not {FORMAT!r}")
        found = tensors.pop(_EVIDENCE, None)
        words = tuple((int(start), int(end)) for start, end in header.get("words", ()))
        if (found is None) != (not words) or (found is not None and len(found) != len(words)):
            raise CorruptLatents("the stored evidence isn't that of its words", hint="evict the entry")
        steps = {int(_NAME.fullmatch(name)[1]): name for name in tensors}  # type: ignore[index]
    except CorruptLatents:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptLatents(f"the stored latents can't be read: {error}", hint="evict the entry") from error
    evidence = Evidence(words, found) if found is not None else None
    everything = tensors if found is None else {**tensors, _EVIDENCE: found}
    if digest(json.dumps(header, sort_keys=True), everything) != written:
        raise CorruptLatents("the stored latents are not those that were written", hint="evict the entry")
    latents = {k: tensors[name].to(torch.float32) for k, name in sorted(steps.items())}
    return Unpacked(latents, dict(header["metadata"]), evidence)


def seal(header: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """Safetensors bytes of a header, which JSON can hold, and tensors, with a sha256 over both inside."""
    sealed = {**header, "sha256": digest(json.dumps(header, sort_keys=True), tensors)}
    # One key: the library writes several in an order that changes from run to run.
    return save(tensors, {"chorus": json.dumps(sealed, sort_keys=True)})


def opened(data: bytes) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What `seal` was given.

    For other bytes raises SafetensorError, ValueError, LookupError, TypeError or AttributeError.
    """
    tensors, header = load(data), read_header(data)
    written = header.pop("sha256")
    if digest(json.dumps(header, sort_keys=True), tensors) != written:
        raise ValueError("it isn't what was written")
    return header, tensors


def read_header(data: bytes) -> Any:
    """What was written beside the tensors of safetensors bytes. Raises ValueError and KeyError where nothing was."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["chorus"])


def digest(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 (hex) over the header, and names, shapes, dtypes and bytes."""
    found = hashlib.sha256(header.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        # As bytes: numpy has no bfloat16.
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
