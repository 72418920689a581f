"""Foreground pixels to blobs: what is connected in space and time is one object."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

LEAST_AREA = 24  # pixels a frame, on average: less is noise


@dataclass(frozen=True)
class Blob:
    """`mask` and `core` (without its rim) are [frames, height, width]; the tracks are [frames], in pixels, and only
    mean something where `present`. `extent`: the longer side of the bounding box, averaged over frames."""

    mask: np.ndarray
    core: np.ndarray
    present: np.ndarray
    x: np.ndarray
    y: np.ndarray
    area: np.ndarray
    extent: float


def find_blobs(foreground: torch.Tensor) -> list[Blob]:
    """Blobs of a mask [frames, height, width], largest first."""
    labels = _label(foreground)
    names, counts = np.unique(labels[labels > 0], return_counts=True)
    large = counts >= LEAST_AREA * foreground.shape[0]
    ordered = names[large][np.argsort(-counts[large])]
    return [_blob(labels == name) for name in ordered]


def _label(foreground: torch.Tensor) -> np.ndarray:
    """Each connected part gets the largest of its pixels' numbers. A pixel takes the best number around it, then the
    number of the pixel that this number names: so numbers travel by leaps, not by pixels."""
    mask = foreground.float()[None, None]
    numbers = torch.arange(1, foreground.numel() + 1, dtype=torch.float32).reshape(mask.shape) * mask
    while True:
        spread = torch.nn.functional.max_pool3d(numbers, 3, 1, 1) * mask
        flat = torch.cat([torch.zeros(1), spread.flatten()])
        spread = flat[flat[spread.long()].long()]
        if torch.equal(spread, numbers):
            return numbers[0, 0].numpy()
        numbers = spread


def _blob(mask: np.ndarray) -> Blob:
    area = mask.sum(axis=(1, 2)).astype(np.float64)
    present = area >= LEAST_AREA / 2
    safe = np.maximum(area, 1)
    x = (mask * (np.arange(mask.shape[2]) + 0.5)).sum(axis=(1, 2)) / safe
    y = (mask * (np.arange(mask.shape[1]) + 0.5)[:, None]).sum(axis=(1, 2)) / safe
    sides = np.maximum(mask.any(axis=1).sum(axis=1), mask.any(axis=2).sum(axis=1))
    extent = float(sides[present].mean()) if present.any() else 0.0
    return Blob(mask, _eroded(mask), present, x, y, area, extent)


def _eroded(mask: np.ndarray) -> np.ndarray:
    outside = torch.as_tensor(~mask).float()[:, None]
    core: np.ndarray = torch.nn.functional.max_pool2d(outside, 3, 1, 1)[:, 0].numpy() == 0
    return core
