"""Which of the attributes that a prompt names a finished video shows, by the built-in world's words and its checker.

Only what is said is judged: a prompt that names no texture is right with any. What is said twice and differently ("a
red circle and a blue one") can't be judged and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np

from .captions import MOTION_WORDS, PATTERN_WORDS, SHAPE_WORDS, SIZE_WORDS, TEXTURE_WORDS
from .checker import read_frames
from .world import BACKGROUNDS, COLOURS


def _values(words: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Each word of a caption, and the value of the world that it says."""
    return {word: value for value, synonyms in words.items() for word in synonyms}


def _any(words: Iterable[str]) -> str:
    """A pattern for one of the words or phrases, the longest that fits, and never a part of a word."""
    return rf"(?<![\w-])(?:{'|'.join(sorted(set(words), key=len, reverse=True))})(?![\w-])"


# By attribute of a `checker.Reading`. "plain" is a texture or a pattern: where it stands tells which.
OBJECT_WORDS = {
    "colour": {colour: colour for colour in COLOURS},
    "texture": _values(TEXTURE_WORDS),
    "size": _values(SIZE_WORDS),
}
GROUND_WORDS = {
    "background": {colour: colour for colour in BACKGROUNDS},
    "pattern": _values(PATTERN_WORDS),
}
SHAPES = _values(SHAPE_WORDS)
# "drifts to the left" and "drifts left" are one phrase.
ASIDE = re.compile(r" to the (?=left|right)")
MOTIONS = {
    ASIDE.sub(" ", phrase): motion for motion, phrases in MOTION_WORDS.items() for pair in phrases for phrase in pair
}

_ADJECTIVE = _any(word for words in OBJECT_WORDS.values() for word in words)
_GROUND = _any(word for words in GROUND_WORDS.values() for word in words)
# No more than a few words each: a prompt of ten thousand colours must not take a second.
_OBJECT = re.compile(
    r"(?P<beside>\b(?:next to|beside|near) )?(?:\b(?:an?|the) )?"
    rf"(?P<words>(?:{_ADJECTIVE} ){{0,6}})(?P<shape>{_any(SHAPES)})"
)
# "a black background", or "on black" where a clause ends.
_BACKGROUND = re.compile(
    rf"(?P<words>(?:{_GROUND} ){{1,4}})(?:background|backdrop)\b"
    rf"|\b(?:on|over|against|before|in front of) (?:an? )?(?P<bare>{_GROUND}(?: {_GROUND}){{0,3}})(?= ?[,.;]|$)"
)
_MOTION = re.compile(_any(MOTIONS))


def judge(prompt: str, frames: np.ndarray) -> dict[str, bool] | None:
    """By attribute that the prompt names: whether the video shows it. None for a prompt outside the world.

    `frames` is uint8 [F, H, W, 3], square, at least six frames to read a motion from. Raises ValueError for others.
    The attributes are those of `named`.
    """
    wanted = named(prompt)
    if wanted is None:
        return None
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.shape[1] != frames.shape[2]:
        raise ValueError(f"frames are uint8 [F, H, H, 3], not {frames.dtype} {list(frames.shape)}")
    seen = read_frames(frames)
    return {attribute: getattr(seen, attribute) == value for attribute, value in wanted.items()}


def named(prompt: str) -> dict[str, str] | None:
    """What the prompt says of its object and background, by attribute of a `checker.Reading`; None without an object.

    Among colour, background, motion, shape, texture, size, pattern and neighbour_colour. An object that stands "next
    to" is the neighbour, whose colour alone can be read from a video.
    """
    text = ASIDE.sub(" ", " ".join(prompt.lower().split()))
    said: dict[str, set[str]] = {}

    def say(attribute: str, value: str) -> None:
        said.setdefault(attribute, set()).add(value)

    for match in _OBJECT.finditer(text):
        beside = match["beside"] is not None
        for attribute, value in _said(match["words"], OBJECT_WORDS):
            if not beside:
                say(attribute, value)
            elif attribute == "colour":
                say("neighbour_colour", value)
        if not beside:
            say("shape", SHAPES[match["shape"]])
    if "shape" not in said:
        return None
    for match in _BACKGROUND.finditer(text):
        for attribute, value in _said(match["words"] or match["bare"], GROUND_WORDS):
            say(attribute, value)
    for phrase in _MOTION.findall(text):
        say("motion", MOTIONS[phrase])
    return {attribute: values.pop() for attribute, values in said.items() if len(values) == 1} or None


def _said(words: str, meanings: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    return [(attribute, own[word]) for word in words.split() for attribute, own in meanings.items() if word in own]
