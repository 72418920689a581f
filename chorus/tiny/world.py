"""The built-in model's world: what a scene can be, and how scenes are drawn at random.

A scene holds only what a caption can say; where things stand and how fast they move is a placement (`render.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

# RGB, 0..255.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 30, 30),
    "green": (8, 172, 40),
    "blue": (22, 60, 248),
    "yellow": (245, 226, 14),
    "purple": (142, 24, 172),
    "orange": (254, 130, 4),
    "cyan": (24, 218, 230),
    "white": (252, 252, 252),
}
BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "black": (12, 12, 12),
    "white": (245, 246, 248),
    "gray": (128, 128, 128),
    "blue": (30, 60, 240),
    "green": (28, 184, 56),
    "pink": (254, 164, 207),
}
SHAPES = ("circle", "square", "triangle", "ring", "star")
TEXTURES = ("plain", "striped", "spotted")
MOTIONS = ("left", "right", "up", "down", "grow", "shrink", "still", "bounce")
PATTERNS = ("plain", "checkered", "gradient")
# Radii in pixels; the gaps keep the size readable from a video.
SIZES: dict[str, tuple[float, float]] = {"small": (11.0, 12.5), "medium": (14.0, 15.5), "large": (17.0, 18.5)}
NEIGHBOUR_RADIUS = (5.8, 6.6)


@dataclass(frozen=True)
class Neighbour:
    """The second object: small, plain and static."""

    colour: str
    shape: str


@dataclass(frozen=True)
class Scene:
    """Everything that a caption of this world can say."""

    colour: str
    shape: str
    motion: str
    background: str
    texture: str = "plain"
    size: str = "medium"
    pattern: str = "plain"
    neighbour: Neighbour | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for words outside the world and for objects that could not be seen."""
        known = (
            (self.colour, COLOURS),
            (self.shape, SHAPES),
            (self.motion, MOTIONS),
            (self.background, BACKGROUNDS),
            (self.texture, TEXTURES),
            (self.size, SIZES),
            (self.pattern, PATTERNS),
        )
        for value, allowed in known:
            if value not in allowed:
                raise ValueError(f"{value!r} is not one of {', '.join(allowed)}")
        if self.colour == self.background:
            raise ValueError(f"a {self.colour} object cannot be seen on a {self.background} background")


@dataclass(frozen=True)
class Curriculum:
    """How often the harder parts of the world are drawn; the rest is plain."""

    textured: float = 0.5
    patterned: float = 0.3
    neighbour: float = 0.2
    bounce: float = 1 / len(MOTIONS)
    star: float = 1 / len(SHAPES)
    ring: float = 0.0  # on top of a ring's share among what is no star
    striped: float = 0.0  # on top of `textured`
    held_out: bool = False  # draw only held-out combinations instead of never


def is_held_out(colour: str, shape: str) -> bool:
    """Five of the forty pairs of colour and shape never occur in training: one colour for each shape."""
    return list(COLOURS).index(colour) == (3 * SHAPES.index(shape) + 1) % len(COLOURS)


def draw_scenes(count: int, rng: np.random.Generator, curriculum: Curriculum | None = None) -> list[Scene]:
    """`count` random scenes; the held-out pairs of colour and shape are left out (or are all there is)."""
    return [_draw_scene(rng, curriculum or Curriculum()) for _ in range(count)]


def _draw_scene(rng: np.random.Generator, curriculum: Curriculum) -> Scene:
    while True:
        lot = rng.random() - curriculum.star
        shape = "star" if lot < 0 else "ring" if lot < curriculum.ring else _choose(rng, SHAPES[:-1])
        colour, background = _choose(rng, tuple(COLOURS)), _choose(rng, tuple(BACKGROUNDS))
        if colour != background and is_held_out(colour, shape) == curriculum.held_out:
            break
    motion = "bounce" if rng.random() < curriculum.bounce else _choose(rng, MOTIONS[:-1])
    lot = rng.random() - curriculum.textured
    scene = Scene(
        colour=colour,
        shape=shape,
        motion=motion,
        background=background,
        texture=_choose(rng, TEXTURES[1:]) if lot < 0 else "striped" if lot < curriculum.striped else "plain",
        size=_choose(rng, tuple(SIZES)),
        pattern=_choose(rng, PATTERNS[1:]) if rng.random() < curriculum.patterned else "plain",
    )
    if rng.random() >= curriculum.neighbour:
        return scene
    others = tuple(c for c in COLOURS if c not in (colour, background))
    # A ring or a star of this radius is too small to be told from a circle.
    return replace(scene, neighbour=Neighbour(_choose(rng, others), _choose(rng, SHAPES[:3])))


def _choose(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def colour_array(colours: list[str], table: dict[str, tuple[int, int, int]]) -> np.ndarray:
    """[n, 3] RGB in 0..1."""
    return np.array([table[c] for c in colours], dtype=np.float32).reshape(-1, 3) / 255.0


def dark_tone(rgb: np.ndarray) -> np.ndarray:
    """The second tone of a textured object: [..., 3] -> [..., 3]. White gets brown, since its shade would be a gray
    that a gray background hides."""
    white = rgb.min(axis=-1, keepdims=True) > 0.9
    brown = np.array([0.52, 0.20, 0.12], dtype=rgb.dtype)
    return np.where(white, brown, rgb * 0.5)


def background_tone(rgb: np.ndarray) -> np.ndarray:
    """The second tone of a patterned background: darker, but black gets lighter."""
    black = rgb.max(axis=-1, keepdims=True) < 0.1
    return np.where(black, rgb + 0.15, rgb * 0.7)
