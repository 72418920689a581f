"""Scenes to pixels: placement, and an antialiased renderer on signed distances, vectorised over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from .world import (
    BACKGROUNDS,
    COLOURS,
    NEIGHBOUR_RADIUS,
    SHAPES,
    SIZES,
    Scene,
    background_tone,
    colour_array,
    dark_tone,
)

DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
REACH = {"circle": 1.0, "square": 0.9, "triangle": 1.25, "ring": 1.0, "star": 1.2}  # half the extent, in radii
GROWTH = (0.62, 1.38)  # radius at the two ends of growing, in mean radii
CELL = 16  # pixels, checkered background
MARGIN = 1.5  # pixels between an object and the border of the canvas


@dataclass(frozen=True)
class Placement:
    """Tracks in pixels: `x`, `y`, `r` are [n, frames]; the neighbour's are [n], with radius 0 where there is none."""

    x: np.ndarray
    y: np.ndarray
    r: np.ndarray
    near_x: np.ndarray
    near_y: np.ndarray
    near_r: np.ndarray


def place(
    scenes: Sequence[Scene], rng: np.random.Generator, canvas: int, frames: int = 9
) -> tuple[list[Scene], Placement]:
    """Random positions, radii and speeds. A neighbour that finds no free place is dropped from its scene, so use the
    scenes returned."""
    n, time = len(scenes), np.linspace(0.0, 1.0, frames)
    low, high = np.array([SIZES[s.size] for s in scenes]).T
    radius = rng.uniform(low, high)
    r = radius[:, None] * np.stack([_growth(s.motion, time) for s in scenes])
    reach = (r * np.array([REACH[s.shape] for s in scenes])[:, None]).max(axis=1) + MARGIN
    room = np.maximum(canvas - 2 * reach, 0.0)
    # 1.2 to 3.2 pixels a frame, as far as the canvas allows.
    travel = np.minimum(rng.uniform(1.2, 3.2, n) * (frames - 1), room)
    hop = np.minimum(rng.uniform(9.0, 16.0, n), room)
    dx, dy = np.array([DIRECTIONS.get(s.motion, (0.0, 0.0)) for s in scenes]).T * travel
    bounces = np.array([s.motion == "bounce" for s in scenes])
    x0 = reach + np.maximum(-dx, 0) + rng.random(n) * (room - np.abs(dx))
    y0 = reach + np.maximum(-dy, 0) + rng.random(n) * (room - np.abs(dy) - hop * bounces) + hop * bounces
    x = x0[:, None] + dx[:, None] * time
    y = y0[:, None] + dy[:, None] * time - (hop * bounces)[:, None] * _hop(frames)
    near_x, near_y, near_r = _place_neighbours(scenes, rng, canvas, (x, y, r))
    kept = [replace(s, neighbour=None) if s.neighbour and near_r[i] == 0 else s for i, s in enumerate(scenes)]
    return kept, Placement(x, y, r, near_x, near_y, near_r)


def _growth(motion: str, time: np.ndarray) -> np.ndarray:
    small, big = GROWTH
    if motion == "grow":
        return small + (big - small) * time
    return big + (small - big) * time if motion == "shrink" else np.ones_like(time)


def _hop(frames: int) -> np.ndarray:
    """Height over time of a ball that touches the ground every fourth frame: 0 .75 1 .75 0 ..."""
    phase = np.arange(frames) % 4 / 4
    return 4 * phase * (1 - phase)


def _place_neighbours(
    scenes: Sequence[Scene],
    rng: np.random.Generator,
    canvas: int,
    track: tuple[np.ndarray, np.ndarray, np.ndarray],
    tries: int = 24,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first of some random places that stays clear of the main object in every frame."""
    x, y, r = track
    n = len(scenes)
    wanted = np.array([s.neighbour is not None for s in scenes])
    near_r = rng.uniform(*NEIGHBOUR_RADIUS, n)
    reach = 1.25 * near_r[:, None] + MARGIN
    px, py = (reach + rng.random((n, tries)) * (canvas - 2 * reach) for _ in range(2))
    main = r * np.array([REACH[s.shape] for s in scenes])[:, None]
    gap_x = np.abs(px[:, :, None] - x[:, None, :]) - main[:, None, :]
    gap_y = np.abs(py[:, :, None] - y[:, None, :]) - main[:, None, :]
    clear = (np.maximum(gap_x, gap_y).min(axis=2) > reach + 2.0) & wanted[:, None]
    chosen = clear.argmax(axis=1)
    rows = np.arange(n)
    return px[rows, chosen], py[rows, chosen], np.where(clear.any(axis=1), near_r, 0.0)


def offsets(x: torch.Tensor, y: torch.Tensor, canvas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From the centres `x`, `y` [..., 1, 1] to the middle of each pixel: two of [..., canvas, canvas]."""
    axis = torch.arange(canvas, dtype=torch.float32) + 0.5
    u, v = axis - x, axis[:, None] - y
    return u.expand(*u.shape[:-2], canvas, canvas), v.expand(*v.shape[:-2], canvas, canvas)


def distance(shape: str, u: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Signed distance in pixels (negative inside) at offset (u, v) from the centre; y points down. Shapes broadcast."""
    if shape == "circle":
        return torch.hypot(u, v) - r
    if shape == "square":
        return torch.maximum(u.abs(), v.abs()) - 0.9 * r
    if shape == "ring":
        return (torch.hypot(u, v) - 0.76 * r).abs() - 0.24 * r
    if shape == "triangle":  # equilateral, tip up, centroid at the origin, in-radius 0.625 r
        slanted = 0.8660254 * u.abs() - 0.5 * v
        return torch.maximum(slanted, v) - 0.625 * r
    if shape == "star":
        return _star(u, v, 1.2 * r)
    raise ValueError(f"{shape!r} is not one of {', '.join(SHAPES)}")


def _star(u: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Five points, tip up, inner radius 0.45 r: fold the plane into half a point, then the distance to one edge."""
    angle = torch.atan2(u, -v).abs()
    sector = 2 * np.pi / 5
    folded = (torch.remainder(angle + sector / 2, sector) - sector / 2).abs()
    length = torch.hypot(u, v)
    along, across = length * folded.cos(), length * folded.sin()
    inner_x, inner_y = 0.45 * np.cos(np.pi / 5), 0.45 * np.sin(np.pi / 5)
    edge_x, edge_y = 1.0 - inner_x, inner_y
    norm = float(np.hypot(edge_x, edge_y))
    signed: torch.Tensor = ((along - r) * edge_y + across * edge_x) / norm
    return signed


def stripes(v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Darkness 0..1 of horizontal bands, half a period 0.42 r wide, anchored to the centre."""
    half = 0.42 * r
    phase = torch.remainder(v / half + 0.5, 2.0)
    return ((0.5 - (phase - 1.5).abs()) * half + 0.5).clamp(0, 1)


def spots(u: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Darkness 0..1 of round spots on a staggered lattice, anchored to the centre."""
    pitch = 0.8 * r
    row = torch.floor(v / pitch + 0.5)
    du = u / pitch + 0.5 * torch.remainder(row, 2.0)
    offset_u = (torch.remainder(du + 0.5, 1.0) - 0.5) * pitch
    offset_v = v - row * pitch
    return (0.32 * pitch - torch.hypot(offset_u, offset_v) + 0.5).clamp(0, 1)


def texture_darkness(texture: str, u: torch.Tensor, v: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """How much of the second tone each pixel of an object has, 0..1."""
    if texture == "striped":
        return stripes(v, r)
    return spots(u, v, r) if texture == "spotted" else torch.zeros_like(u)


def pattern_amount(pattern: str, canvas: int) -> torch.Tensor:
    """How much of the background's second tone each pixel has: [canvas, canvas] in 0..1."""
    rows = torch.arange(canvas, dtype=torch.float32)
    if pattern == "checkered":
        cell = torch.div(rows, CELL, rounding_mode="floor")
        return (cell[:, None] + cell[None, :]).remainder(2.0)
    ramp = (rows / (canvas - 1))[:, None].expand(canvas, canvas)
    return ramp if pattern == "gradient" else torch.zeros(canvas, canvas)


def render(scenes: Sequence[Scene], placement: Placement, canvas: int) -> torch.Tensor:
    """Videos [n, 3, frames, canvas, canvas], float32 in [-1, 1]."""
    return render_with_cover(scenes, placement, canvas)[0]


def render_with_cover(scenes: Sequence[Scene], placement: Placement, canvas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Videos as `render` gives them, and how much of each pixel is object: [n, 1, frames, canvas, canvas] in 0..1."""
    n, frames = placement.x.shape
    base = colour_array([s.background for s in scenes], BACKGROUNDS)
    amount = torch.stack([pattern_amount(s.pattern, canvas) for s in scenes])[:, None, None]
    video = _mix(_colour(base), _colour(background_tone(base)), amount).repeat(1, 1, frames, 1, 1)
    x, y, r = (_track(a) for a in (placement.x, placement.y, placement.r))
    covers = torch.zeros(n, 1, frames, canvas, canvas)
    main = colour_array([s.colour for s in scenes], COLOURS)
    for shape in SHAPES:
        for texture in {s.texture for s in scenes if s.shape == shape}:
            rows = [i for i, s in enumerate(scenes) if s.shape == shape and s.texture == texture]
            u, v = offsets(x[rows], y[rows], canvas)
            cover = (0.5 - distance(shape, u, v, r[rows])).clamp(0, 1)[:, None]
            paint = _colour(main[rows])
            if texture != "plain":
                dark = texture_darkness(texture, u, v, r[rows])[:, None]
                paint = _mix(paint, _colour(dark_tone(main[rows])), dark)
            video[rows] = _mix(video[rows], paint, cover)
            covers[rows] = cover
    _add_neighbours(video, covers, scenes, placement)
    return video.mul_(2).sub_(1), covers


def _add_neighbours(video: torch.Tensor, covers: torch.Tensor, scenes: Sequence[Scene], placement: Placement) -> None:
    for i, scene in enumerate(scenes):
        if scene.neighbour is not None:
            x, y, r = (torch.tensor(float(a[i])) for a in (placement.near_x, placement.near_y, placement.near_r))
            cover = (0.5 - distance(scene.neighbour.shape, *offsets(x, y, video.shape[-1]), r)).clamp(0, 1)
            paint = _colour(colour_array([scene.neighbour.colour], COLOURS))
            video[i : i + 1] = _mix(video[i : i + 1], paint, cover)
            covers[i] = torch.maximum(covers[i], cover)


def _track(values: np.ndarray) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32)[:, :, None, None]


def _colour(rgb: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rgb, dtype=np.float32))[:, :, None, None, None]


def _mix(a: torch.Tensor, b: torch.Tensor, amount: torch.Tensor) -> torch.Tensor:
    return a + (b - a) * amount
