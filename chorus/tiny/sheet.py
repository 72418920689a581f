"""Contact sheets: videos as rows of frames."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image


def save_sheet(videos: torch.Tensor, path: Path, columns: int = 3, every: int = 2, zoom: int = 1) -> None:
    """Videos [n, 3, frames, h, w] in -1..1, every second frame, three videos a row, as a PNG."""
    pad = (-len(videos)) % columns
    shown = torch.cat([videos, -torch.ones_like(videos[:1]).expand(pad, -1, -1, -1, -1)])[:, :, ::every]
    n, c, t, h, w = shown.shape
    strips = ((shown.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 3, 2, 4, 1).reshape(n, h, t * w, c)
    strips = torch.nn.functional.pad(strips, (0, 0, 2, 2, 2, 2), value=90)
    rows = strips.reshape(n // columns, columns, h + 4, t * w + 4, c).permute(0, 2, 1, 3, 4)
    image = Image.fromarray(rows.reshape(n // columns * (h + 4), columns * (t * w + 4), c).contiguous().numpy())
    if zoom > 1:
        image = image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
