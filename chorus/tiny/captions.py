"""Captions of scenes: templates, synonyms and word dropout."""

from __future__ import annotations

import numpy as np

from .world import Scene

SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc", "ball"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle",),
    "ring": ("ring", "ring", "hoop"),
    "star": ("star",),
}
SIZE_WORDS = {"small": ("small", "little"), "medium": ("medium-sized",), "large": ("large", "big")}
TEXTURE_WORDS = {
    "plain": ("plain", "solid"),
    "striped": ("striped", "striped", "stripy"),
    "spotted": ("spotted", "spotted", "dotted"),
}
PATTERN_WORDS = {
    "plain": ("plain",),
    "checkered": ("checkered", "checkered", "chequered"),
    "gradient": ("gradient", "fading"),
}
# (third person, participle)
MOTION_WORDS: dict[str, tuple[tuple[str, str], ...]] = {
    "left": (
        ("moves left", "moving left"),
        ("drifts to the left", "drifting to the left"),
        ("slides left", "sliding left"),
    ),
    "right": (
        ("moves right", "moving right"),
        ("drifts to the right", "drifting to the right"),
        ("slides right", "sliding right"),
    ),
    "up": (("moves up", "moving up"), ("rises", "rising"), ("moves upwards", "moving upwards")),
    "down": (("moves down", "moving down"), ("falls", "falling"), ("moves downwards", "moving downwards")),
    "grow": (("grows", "growing"), ("gets bigger", "getting bigger"), ("expands", "expanding")),
    "shrink": (("shrinks", "shrinking"), ("gets smaller", "getting smaller"), ("contracts", "contracting")),
    "still": (("stays still", "staying still"), ("does not move", "standing still"), ("rests", "resting")),
    "bounce": (("bounces", "bouncing"), ("bounces up and down", "bouncing up and down"), ("hops", "hopping")),
}
SAY_SIZE = 0.35  # the share of captions that tell the object's size
# {o} object with article, {n} object without, {v} verb, {p} participle, {b} background with article, {w} without.
TEMPLATES = (
    "{o} {v} over {b} background",
    "the {n} {v} on {b} background",
    "on {b} background, {o} {v}",
    "{o} {p} over {b} background",
    "{o} {v} in front of {b} background",
    "{b} background with {o} {p}",
    "a video of {o} that {v} on {b} background",
    "{o} {v}, {w} background",
    "over {b} background {o} is {p}",
    "there is {o} {p} on {b} background",
    "{w} background, {o} {p}",
    "we see {o} which {v} against {b} background",
    "an animation of {o} {p} on {b} background",
    "{n}, {p}, on {w}",
)
HELD_OUT_TEMPLATES = (
    "in this clip {o} {v} before {b} backdrop",
    "{b} background, and in front of it {o} that {v}",
)


def plain_caption(scene: Scene, *, say_size: bool = True) -> str:
    """One fixed wording that says everything there is to say, and no "plain"."""
    return _compose(scene, np.random.default_rng(0), TEMPLATES[0], vary=False, say_size=say_size)


def caption(
    scene: Scene,
    rng: np.random.Generator,
    *,
    held_out: bool = False,
    say_size: float = SAY_SIZE,
    drop_words: float = 0.0,
) -> str:
    """A random wording. `drop_words`: the share of captions that lose one word in ten or so."""
    templates = HELD_OUT_TEMPLATES if held_out else TEMPLATES
    text = _compose(scene, rng, _pick(rng, templates), vary=True, say_size=bool(rng.random() < say_size))
    if rng.random() >= drop_words:
        return text
    kept = [w for w in text.split() if rng.random() > 0.12]
    return " ".join(kept)


def _compose(scene: Scene, rng: np.random.Generator, template: str, *, vary: bool, say_size: bool) -> str:
    # Everything is drawn, said or not: so scenes that differ in one attribute get the same words for all others.
    def word(options: tuple[str, ...]) -> str:
        chosen = _pick(rng, options)
        return chosen if vary else options[0]

    size, texture, shape = (
        word(SIZE_WORDS[scene.size]),
        word(TEXTURE_WORDS[scene.texture]),
        word(SHAPE_WORDS[scene.shape]),
    )
    pattern = word(PATTERN_WORDS[scene.pattern])
    say_texture, say_pattern = (vary and rng.random() < share for share in (0.15, 0.1))
    verb, participle = MOTION_WORDS[scene.motion][int(3 * rng.random()) if vary else 0]
    beside = ""
    if scene.neighbour is not None:
        near_shape = word(SHAPE_WORDS[scene.neighbour.shape])
        beside = f" next to a small {scene.neighbour.colour} {near_shape}"
    adjectives = [size] * say_size + [texture] * (say_texture or scene.texture != "plain")
    noun = " ".join([*adjectives, scene.colour, shape])
    ground = f"{pattern} {scene.background}" if say_pattern or scene.pattern != "plain" else scene.background
    return template.format(
        o=f"{_article(noun)} {noun}{beside}",
        n=f"{noun}{beside}",
        v=verb,
        p=participle,
        b=f"{_article(ground)} {ground}",
        w=ground,
    )


def _article(words: str) -> str:
    return "an" if words[0] in "aeio" else "a"


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.random() * len(options))]
