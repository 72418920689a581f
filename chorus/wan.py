"""The one file that names diffusers' Wan classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Straight from its module: the pipeline would import text encoders, image processors and more.
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from .errors import WeightsError


def load_transformer(folder: Path, device: str, dtype: torch.dtype = torch.float32) -> Any:
    """A WanTransformer3DModel from a folder in diffusers' layout, in evaluation mode. Raises WeightsError."""
    try:
        model = WanTransformer3DModel.from_pretrained(
            folder, torch_dtype=dtype, local_files_only=True, low_cpu_mem_usage=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"the transformer in {folder} can't be loaded: {error}") from error
    return model.to(device).eval().requires_grad_(False)
