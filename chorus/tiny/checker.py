"""What a video of this world shows, read from its pixels alone: a rule-based judge, exact on true videos.

Background from the border, objects as blobs connected in space and time, shape by the best fitting template, motion
from the blob's track. It needs no model, so attribute accuracy means the same for every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from .blobs import Blob, find_blobs
from .render import distance, offsets
from .world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    Scene,
    background_tone,
    colour_array,
    dark_tone,
)

BORDER = 2  # pixels
FOREGROUND = 0.2  # distance in RGB (0..1 a channel) from both of the background's tones and what lies between
LEAST_EXTENT = 17.0  # pixels; the neighbours are smaller
# True stripes and spots have .37 and .16 or more; blurred rims of plain objects come to .11.
LEAST_DARK = 0.12
# How much of the darkness's variance the rows explain: all of it in true stripes, at most .65 in spots.
LEAST_ROWS = 0.7
LEAST_TONE = 0.2  # of a background's second tone, on average; true patterns have half
MOST_COVER = 0.65  # of the canvas: more is no object, but noise
# Radii tried, in those of the same area: a ring drawn too thick is still a ring.
SCALES = {"ring": (1.0, 0.92, 0.84, 0.77)}
ATTRIBUTES = ("colour", "background", "motion", "shape", "texture", "size", "pattern")


@dataclass(frozen=True)
class Reading:
    """What was seen; None where it cannot be told. `objects` counts the blobs as large as a main object."""

    background: str
    pattern: str
    objects: int = 0
    colour: str | None = None
    shape: str | None = None
    texture: str | None = None
    motion: str | None = None
    size: str | None = None
    neighbour_colour: str | None = None

    def agrees(self, scene: Scene) -> dict[str, bool]:
        """Which attributes of the scene the video shows."""
        return {name: getattr(self, name) == getattr(scene, name) for name in ATTRIBUTES}


def read_videos(videos: torch.Tensor) -> list[Reading]:
    """Readings of videos [n, 3, frames, canvas, canvas] in [-1, 1]."""
    return [read_video(video) for video in videos]


def read_video(video: torch.Tensor) -> Reading:
    """The reading of one video [3, frames, canvas, canvas] in [-1, 1]."""
    pixels = ((video.detach().float().cpu().clamp(-1, 1) + 1) / 2).permute(1, 2, 3, 0)
    background = _background(pixels)
    base = colour_array([background], BACKGROUNDS)[0]
    away, along = _from_segment(pixels, base, background_tone(base[None])[0])
    foreground = away > FOREGROUND
    pattern = _pattern(foreground, along)
    blobs = find_blobs(foreground)
    large = [b for b in blobs if b.extent >= LEAST_EXTENT and b.area.mean() < MOST_COVER * foreground[0].numel()]
    if not large:
        return Reading(background, pattern)
    main = max(large, key=lambda b: b.extent)
    shape, radius = _shape(main)
    colour = _colour(pixels[torch.as_tensor(main.core)])
    near = [b for b in blobs if b.extent < LEAST_EXTENT]
    return Reading(
        background,
        pattern,
        len(large),
        colour,
        shape,
        _texture(pixels, main, colour),
        _motion(main),
        _size(float(radius.mean())) if shape else None,
        _colour(pixels[torch.as_tensor(max(near, key=lambda b: b.extent).core)]) if near else None,
    )


def read_frames(frames: np.ndarray) -> Reading:
    """The reading of one video as it is stored, uint8 [frames, canvas, canvas, 3]."""
    return read_video(torch.tensor(frames).permute(3, 0, 1, 2) / 127.5 - 1)


def _background(pixels: torch.Tensor) -> str:
    """The vote of the border's pixels."""
    inner = torch.ones(pixels.shape[1:3], dtype=torch.bool)
    inner[BORDER:-BORDER, BORDER:-BORDER] = False
    border = pixels[:, inner].reshape(-1, 3)
    names = list(BACKGROUNDS)
    bases = colour_array(names, BACKGROUNDS)
    away = torch.stack([_from_segment(border, b, background_tone(b[None])[0])[0] for b in bases])
    return names[int(torch.bincount(away.argmin(dim=0), minlength=len(names)).argmax())]


def _from_segment(pixels: torch.Tensor, start: np.ndarray, end: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Distance of colours [..., 3] from the line between two tones, and where along it (0..1) they are nearest."""
    a, b = torch.as_tensor(start), torch.as_tensor(end)
    along = (((pixels - a) @ (b - a)) / (b - a).square().sum()).clamp(0, 1)
    return (pixels - a - along[..., None] * (b - a)).norm(dim=-1), along


def _pattern(foreground: torch.Tensor, along: torch.Tensor) -> str:
    """Plain where little of the second tone is seen away from the objects; a gradient where the rows tell how much,
    else checkered, wherever the cells' corners are."""
    near = torch.nn.functional.max_pool2d(foreground.float()[:, None], 5, 1, 2)[:, 0].amax(dim=0) > 0
    seen = along.median(dim=0).values
    if bool(near.all()) or float(seen[~near].mean()) < LEAST_TONE:
        return "plain"
    return "gradient" if _row_share(seen[None], ~near[None]) > LEAST_ROWS else "checkered"


def _row_share(values: torch.Tensor, where: torch.Tensor) -> float:
    """How much of the variance of values [n, h, w], in the places of a mask, the rows explain: 0..1."""
    inside = where.sum(dim=(1, 2), keepdim=True).clamp(min=1)
    in_row = where.sum(dim=2, keepdim=True).clamp(min=1)
    of_all = (values * where).sum(dim=(1, 2), keepdim=True) / inside
    of_row = (values * where).sum(dim=2, keepdim=True) / in_row
    left, whole = (((values - mean) * where).square().sum() for mean in (of_row, of_all))
    return float(1 - left / whole.clamp(min=1e-9))


def _colour(pixels: torch.Tensor) -> str | None:
    """The colour whose bright tone most pixels [n, 3] are near to."""
    if len(pixels) == 0:
        return None
    names = list(COLOURS)
    bright = torch.as_tensor(colour_array(names, COLOURS))
    away = torch.cdist(pixels.float(), torch.cat([bright, torch.as_tensor(dark_tone(bright.numpy()))]))
    nearest = away.argmin(dim=1)
    votes = torch.bincount(nearest[nearest < len(names)], minlength=len(names))
    return names[int(votes.argmax())] if int(votes.max()) > 0 else None


def _shape(blob: Blob) -> tuple[str | None, np.ndarray]:
    """The shape that overlaps the mask best over all frames, and its radii; None below an overlap of .55."""
    best, found = 0.55, None
    radii = np.sqrt(blob.area[blob.present] / np.pi)
    mask = torch.as_tensor(blob.mask[blob.present])
    area = torch.as_tensor(blob.area[blob.present], dtype=torch.float32)
    u, v = _offsets(blob)
    for shape in SHAPES:
        for scale in SCALES.get(shape, (1.0,)):
            r = scale * (area / UNIT_AREAS[shape]).sqrt()[:, None, None]
            ideal = distance(shape, u, v, r) < 0
            overlap = float((mask & ideal).sum() / (mask | ideal).sum())
            if overlap > best:
                best, found, radii = overlap, shape, r.flatten().numpy()
    return found, radii


def _offsets(blob: Blob) -> tuple[torch.Tensor, torch.Tensor]:
    """From the blob's centre to each pixel, in the frames where it is present."""
    x, y = (torch.as_tensor(a[blob.present], dtype=torch.float32)[:, None, None] for a in (blob.x, blob.y))
    return offsets(x, y, blob.mask.shape[1])


def _unit_area(shape: str) -> float:
    middle = torch.tensor(400.0)
    return float((distance(shape, *offsets(middle, middle, 800), torch.tensor(280.0)) < 0).sum()) / 280**2


UNIT_AREAS = {shape: _unit_area(shape) for shape in SHAPES}


def _texture(pixels: torch.Tensor, blob: Blob, colour: str | None) -> str | None:
    """Plain unless a share of the inside is dark; striped where a pixel's row says how dark it is, else spotted. So
    neither the bands' phase nor their width needs to be the renderer's."""
    core = torch.as_tensor(blob.core[blob.present])
    if colour is None or not bool(core.any()):
        return None
    bright = colour_array([colour], COLOURS)[0]
    _, along = _from_segment(pixels[torch.as_tensor(blob.present)], bright, dark_tone(bright[None])[0])
    if float((along[core] > 0.5).float().mean()) < LEAST_DARK:
        return "plain"
    return "striped" if _row_share(along, core) > LEAST_ROWS else "spotted"


def _motion(blob: Blob) -> str | None:
    """From the track of the centre and the area; None when it fits no motion of this world."""
    frames = np.flatnonzero(blob.present)
    if len(frames) < 6:
        return None
    half = max(len(frames) // 4, 1)
    first, last = frames[:half], frames[-half:]
    growth = float(np.log(blob.area[last].mean() / blob.area[first].mean()))
    dx = float(blob.x[last].mean() - blob.x[first].mean())
    dy = float(blob.y[last].mean() - blob.y[first].mean())
    if abs(growth) > 0.6:
        return "grow" if growth > 0 else "shrink"
    if max(abs(dx), abs(dy)) > 4.0:
        if abs(dx) > abs(dy):
            return "right" if dx > 0 else "left"
        return "down" if dy > 0 else "up"
    swing = float(np.ptp(blob.y[frames]))
    if swing > 5.0:
        return "bounce"
    return "still" if swing < 3.5 else None


def _size(radius: float) -> str:
    limits = [(smaller[1] + larger[0]) / 2 for smaller, larger in pairwise(SIZES.values())]
    return list(SIZES)[int(np.searchsorted(limits, radius))]


def shares(readings: Sequence[Reading], scenes: Sequence[Scene]) -> dict[str, float]:
    """The share of videos right in each attribute, in all of colour, background, motion, shape and texture ("all"),
    and with exactly one large object ("single")."""
    agreements = [r.agrees(s) for r, s in zip(readings, scenes, strict=True)]
    result = {name: float(np.mean([a[name] for a in agreements])) for name in ATTRIBUTES}
    result["all"] = float(np.mean([all(a[name] for name in ATTRIBUTES[:5]) for a in agreements]))
    result["single"] = float(np.mean([r.objects == 1 for r in readings]))
    return result
