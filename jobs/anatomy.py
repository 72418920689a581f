"""The few numbers of a Wan model that its memory follows from, read from its folder when it is added."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from chorus_batch.jobs import weights
from chorus_batch.jobs.errors import WeightsRejected


@dataclass(frozen=True)
class Anatomy:
    """Sizes of a model's parts. Parameters are counted, not bytes: a file's dtype isn't the one that is run."""

    transformer: int  # parameters
    text_encoder: int  # parameters
    codec: int  # parameters
    layers: int  # of the transformer
    width: int  # values of a token in the transformer
    ffn_width: int  # values of a token inside its feed-forward layers
    patch: tuple[int, int, int]  # latents in a token, along time, height and width
    text_heads: int  # of the text encoder
    codec_width: int  # channels of the codec at full resolution


def measure(files: Mapping[str, Path]) -> Anatomy:
    """The anatomy of the files that `weights.files_of` names. Raises WeightsRejected."""
    configs = {part: weights.read_json(files[f"{part}/config.json"]) for part in weights.PARTS}
    transformer, text, codec = (configs[part] for part in ("transformer", "text_encoder", "vae"))
    try:
        return Anatomy(
            transformer=_parameters(files, ("transformer/", "checkpoint/")),
            text_encoder=_parameters(files, ("text_encoder/",)),
            codec=_parameters(files, ("vae/",)),
            layers=int(transformer["num_layers"]),
            width=int(transformer["num_attention_heads"]) * int(transformer["attention_head_dim"]),
            ffn_width=int(transformer["ffn_dim"]),
            patch=triple(transformer["patch_size"]),
            text_heads=int(text["num_heads"]),
            codec_width=int(codec["base_dim"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsRejected(f"a part's config.json lacks a size: {error!r}", hint=weights.FETCH) from error


def triple(values: Iterable[int]) -> tuple[int, int, int]:
    """Along time, height and width. Raises ValueError for another number of them."""
    time, height, width = values
    return int(time), int(height), int(width)


def _parameters(files: Mapping[str, Path], parts: tuple[str, ...]) -> int:
    """Values in all tensors of the .safetensors files whose names begin so: their headers tell."""
    return count_values(
        path
        for name, path in files.items()
        if name.startswith(parts) and (path.suffix == ".safetensors" or name.startswith("checkpoint/"))
    )


def count_values(files: Iterable[Path]) -> int:
    """Values in all tensors of .safetensors files: their headers tell. Raises OSError and ValueError."""
    return sum(math.prod(tensor["shape"]) for path in files for tensor in weights.read_header(path)[1])
