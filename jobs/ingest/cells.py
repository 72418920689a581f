"""Cells of a row, as text, to the parameters of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.parameters import FEWEST_CACHED_STEPS, POLICIES, STEP_CACHES, Parameters, clean_prompt

# The columns that make up Parameters: rows that agree in all of them share one Parameters.
PARAMETER_COLUMNS = (
    *("width", "height", "size", "aspect_ratio", "frames", "duration", "fps", "steps", "guidance_scale", "shift"),
    *("scheduler", "negative_prompt", "lora", "lora_strength", "policy", "step_cache"),
)
# Columns that say the same thing in another way: an override of one drops the others of the row.
SAME = ({"width", "height", "size", "aspect_ratio"}, {"frames", "duration"})

MAX_SIDE = 16384  # pixels
_DIGITS = 40  # of a number worth converting; longer ones are out of every range
_SHAPE_TOLERANCE = 0.06  # sizes are rounded to multiples, so that 832x480 goes by 16:9
_LABELS = {
    "240p": (426, 240),
    "360p": (640, 360),
    "480p": (832, 480),
    "540p": (960, 544),
    "720p": (1280, 720),
    "1080p": (1920, 1088),
}
_SCHEDULERS = {
    "euler": "euler",
    "flowmatcheuler": "euler",
    "flowmatch": "euler",
    "eulerdiscrete": "euler",
    "flowmatcheulerdiscretescheduler": "euler",
    "unipc": "unipc",
    "unipcmultistepscheduler": "unipc",
    "dpm++": "dpm++",
    "dpmpp": "dpm++",
    "dpm++2m": "dpm++",
    "dpmsolvermultistepscheduler": "dpm++",
}
_Value = TypeVar("_Value")
_ASPECT = re.compile(r"([0-9]{1,3})\s*[:/x]\s*([0-9]{1,3})")
_SIZE = re.compile(r"([0-9]{1,6})\s*[x*\u00d7X,]\s*([0-9]{1,6})")


class CellError(Exception):
    """A cell that can't be used: its column, a code and what is wrong."""

    def __init__(self, column: str, code: str, message: str) -> None:
        super().__init__(message)
        self.column = column
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Settled:
    """What cells amount to. `parameters` is None if there are errors; `notes` are (kind, column, message)."""

    parameters: Parameters | None
    errors: tuple[CellError, ...]
    notes: tuple[tuple[str, str, str], ...]


def whole(column: str, text: str, low: int, high: int) -> int:
    """A whole number; `20.0` is one, because pandas writes a column with gaps so."""
    match = re.fullmatch(r"\s*([+-]?[0-9]+)(?:\.0*)?\s*", text)
    if match is None:
        raise CellError(column, "not_a_number", f"must be a whole number, not {text[:40]!r}")
    number = int(match[1]) if len(match[1]) < _DIGITS else high + 1
    if not low <= number <= high:
        raise CellError(column, "out_of_range", f"must be from {low} to {high}, not {text.strip()[:40]}")
    return number


def real(column: str, text: str, low: float, high: float) -> float:
    """A number; a decimal comma is one too, because spreadsheets of half of Europe write it."""
    plain = text.strip()
    if re.fullmatch(r"[+-]?[0-9]+,[0-9]{1,2}", plain):
        plain = plain.replace(",", ".")
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?", plain):
        raise CellError(column, "not_a_number", f"must be a number, not {text[:40]!r}")
    number = float(plain)
    if not (math.isfinite(number) and low <= number <= high):
        raise CellError(column, "out_of_range", f"must be from {low:g} to {high:g}, not {plain[:40]}")
    return number


def _word(cells: Mapping[str, str], column: str, allowed: Sequence[str], default: str) -> str:
    text = cells.get(column, default)
    word = text.strip().lower()
    if word not in allowed:
        known = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise CellError(column, "bad_value", f"must be {known}, not {text[:40]!r}")
    return word


class Settler:
    """Settles the cells of one model's rows."""

    def __init__(self, card: ModelCard) -> None:
        self._card = card

    def settle(self, cells: Mapping[str, str]) -> Settled:
        """Parameters of a row; columns that it doesn't have come from the card."""
        errors: list[CellError] = []
        notes: list[tuple[str, str, str]] = []
        defaults = self._card.defaults

        def attempt(step: Callable[[], _Value], default: _Value) -> _Value:
            try:
                return step()
            except CellError as error:
                errors.append(error)
                return default

        def number(column: str, default: int, high: int) -> int:
            return attempt(lambda: whole(column, cells[column], 1, high) if column in cells else default, default)

        def ratio(column: str, default: float, low: float, high: float) -> float:
            return attempt(lambda: real(column, cells[column], low, high) if column in cells else default, default)

        fps = number("fps", defaults.fps, 120)
        steps = number("steps", defaults.steps, 1000)
        guidance = ratio("guidance_scale", defaults.guidance_scale, 0.0, 30.0)
        shift = ratio("shift", defaults.shift, 0.01, 100.0)
        width, height = attempt(lambda: self._size(cells, notes), (defaults.width, defaults.height))
        frames = attempt(lambda: self._frames(cells, fps, notes), defaults.frames)
        scheduler = attempt(lambda: self._scheduler(cells), defaults.scheduler)
        policy = attempt(lambda: _word(cells, "policy", POLICIES, defaults.policy), defaults.policy)
        step_cache = attempt(lambda: _word(cells, "step_cache", STEP_CACHES, defaults.step_cache), "none")
        if step_cache != "none" and steps < FEWEST_CACHED_STEPS:
            message = f"{steps} steps gain nothing from {step_cache}: leave it out, or give"
            errors.append(CellError("step_cache", "too_few_steps", f"{message} {FEWEST_CACHED_STEPS} steps or more"))
        for column in ("lora", "lora_strength"):
            if cells.get(column, "").strip() not in ("", "0", "none", "None"):
                message = "LoRAs aren't supported; without one the video would be another: empty or remove the column"
                errors.append(CellError(column, "unsupported_lora", message))
        negative = clean_prompt(cells["negative_prompt"]) if "negative_prompt" in cells else defaults.negative_prompt
        if errors:
            return Settled(None, tuple(errors), ())
        parameters = Parameters(
            model=self._card.name,
            width=width,
            height=height,
            frames=frames,
            fps=fps,
            steps=steps,
            guidance_scale=guidance,
            shift=shift,
            scheduler=scheduler,
            negative_prompt=negative,
            policy=policy,
            step_cache=step_cache,
        )
        return Settled(parameters, (), tuple(notes))

    def _size(self, cells: Mapping[str, str], notes: list[tuple[str, str, str]]) -> tuple[int, int]:
        defaults = self._card.defaults
        given = _stated_size(cells, (defaults.width, defaults.height))
        if given is None:
            return defaults.width, defaults.height
        column, width, height = given
        if self._card.allowed_sizes:
            if (width, height) not in self._card.allowed_sizes:
                allowed = ", ".join(f"{w}x{h}" for w, h in self._card.allowed_sizes)
                message = f"the model {self._card.name} makes {allowed}, not {width}x{height}"
                raise CellError(column, "unsupported_size", message)
            return width, height
        multiple = self._card.size_multiple
        rounded = (width // multiple * multiple, height // multiple * multiple)
        if min(rounded) < 1:
            message = f"the model {self._card.name} makes multiples of {multiple}, {width}x{height} is too small"
            raise CellError(column, "unsupported_size", message)
        if rounded != (width, height):
            message = f"size {width}x{height} is made as {rounded[0]}x{rounded[1]} (multiples of {multiple})"
            notes.append(("size_rounded", column, message))
        return rounded

    def _frames(self, cells: Mapping[str, str], fps: int, notes: list[tuple[str, str, str]]) -> int:
        given = _stated_frames(cells, fps)
        if given is None:
            return self._card.defaults.frames
        column, asked = given
        frames = normal_frames(asked)
        if self._card.allowed_frames and frames not in self._card.allowed_frames:
            allowed = ", ".join(map(str, self._card.allowed_frames))
            message = f"the model {self._card.name} makes {allowed} frames, not {asked}"
            if column == "duration":
                message += f" ({cells['duration'].strip()[:20]} at {fps} a second)"
            raise CellError(column, "unsupported_frames", message)
        if frames != asked:
            notes.append(
                ("frames_rounded", column, f"{asked} frames are made as {frames} (one more than a multiple of 4)")
            )
        return frames

    def _scheduler(self, cells: Mapping[str, str]) -> str:
        text = cells.get("scheduler", "").strip()
        if not text:
            return self._card.defaults.scheduler
        name = _SCHEDULERS.get(re.sub(r"[\s_-]", "", text).lower(), text)
        if name not in self._card.schedulers:
            allowed = ", ".join(self._card.schedulers)
            raise CellError(
                "scheduler", "unsupported_scheduler", f"the model {self._card.name} runs {allowed}, not {text[:40]!r}"
            )
        return name


def normal_frames(frames: int) -> int:
    """4k+1, rounded as diffusers rounds it (WanPipeline.__call__)."""
    return frames if frames % 4 == 1 else frames // 4 * 4 + 1


def _stated_size(cells: Mapping[str, str], default: tuple[int, int]) -> tuple[str, int, int] | None:
    """(column, width, height) as asked for; None if the row says nothing."""
    width = whole("width", cells["width"], 1, MAX_SIDE) if "width" in cells else None
    height = whole("height", cells["height"], 1, MAX_SIDE) if "height" in cells else None
    if (width is None) != (height is None) and "size" not in cells:
        column = "width" if height is None else "height"
        raise CellError(column, "conflict", "width and height go together; give both or size")
    stated: tuple[str, int, int] | None = None
    if "size" in cells:
        stated = ("size", *_parse_size(cells["size"], cells.get("aspect_ratio")))
        if (width or stated[1], height or stated[2]) != stated[1:]:
            raise CellError("size", "conflict", f"says {stated[1]}x{stated[2]}, width and height say otherwise")
    elif width is not None and height is not None:
        stated = ("width", width, height)
    if "aspect_ratio" in cells:
        across, down = _parse_aspect(cells["aspect_ratio"])
        if stated is None:
            short = min(default)
            stated = ("aspect_ratio", *_shaped(short, across, down))
        elif abs(stated[1] * down / (stated[2] * across) - 1) > _SHAPE_TOLERANCE:
            message = f"{across}:{down} isn't the shape of {stated[1]}x{stated[2]}"
            raise CellError("aspect_ratio", "conflict", message)
    return stated


def _parse_size(text: str, aspect: str | None) -> tuple[int, int]:
    plain = text.strip().lower()
    match = _SIZE.fullmatch(plain.strip("()[]"))
    if match:
        width, height = int(match[1]), int(match[2])
        if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
            raise CellError("size", "out_of_range", f"sides must be from 1 to {MAX_SIDE}, not {text[:40]!r}")
        return width, height
    if plain in _LABELS:
        width, height = _LABELS[plain]
        across, down = _parse_aspect(aspect) if aspect else (16, 9)
        if (across, down) == (16, 9):
            return width, height
        return (height, width) if (across, down) == (9, 16) else _shaped(height, across, down)
    known = ", ".join(_LABELS)
    raise CellError("size", "bad_value", f"must be like 832x480 or one of {known}, not {text[:40]!r}")


def _parse_aspect(text: str) -> tuple[int, int]:
    match = _ASPECT.fullmatch(text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise CellError("aspect_ratio", "bad_value", f"must be like 16:9, not {text[:40]!r}")
    return int(match[1]), int(match[2])


def _shaped(short: int, across: int, down: int) -> tuple[int, int]:
    """Width and height of a shape whose shorter side is given."""
    if across >= down:
        return round(short * across / down), short
    return short, round(short * down / across)


def _stated_frames(cells: Mapping[str, str], fps: int) -> tuple[str, int] | None:
    """(column, frames) as asked for; None if the row says nothing."""
    frames = whole("frames", cells["frames"], 1, 100_000) if "frames" in cells else None
    if "duration" not in cells:
        return None if frames is None else ("frames", frames)
    text = re.sub(r"\s*(s|sec|secs|second|seconds)\s*$", "", cells["duration"].strip(), flags=re.IGNORECASE)
    seconds = real("duration", text, 0.0, 3600.0)
    lasting = max(1, round(seconds * fps))
    if frames is not None and normal_frames(frames) != normal_frames(lasting):
        message = f"{seconds:g} s at {fps} frames a second isn't {frames} frames"
        raise CellError("duration", "conflict", message)
    return ("duration", lasting) if frames is None else ("frames", frames)
