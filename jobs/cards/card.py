"""Model cards: what a model is, what it can make, and from which similarity on its work is reused."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from chorus_batch.jobs.anatomy import Anatomy, triple
from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.parameters import Parameters
from chorus_batch.jobs.weights import Weights

CARDS = Path(__file__).parent
DTYPES = ("bfloat16", "float32")  # of a transformer; half precision overflows in Wan's text encoder

Boundary = tuple[float, int, int]  # (m_from, k1, k2): README, "Method"

# The engine's names: gains of the text tokens that differ, and the share of the steps after which they're 1.
NO_GAIN: Mapping[str, float] = {"key": 1.0, "output": 1.0, "until": 1.0}
# The engine's names: radii in tokens, and the share of all tokens above which a region isn't worth its overhead.
RADII = ("edit_spatial", "edit_temporal", "see_spatial", "see_temporal")
LARGEST_SHARE = "largest_share"


@dataclass(frozen=True)
class ModelCard:
    """Checked at birth: raises SettingsError, naming the card and the field."""

    name: str
    fingerprint: str  # sha256 (hex) over the weight files: part of every domain key
    dtype: str  # of the transformer
    defaults: Parameters
    size_multiple: int  # width and height are rounded down to it, as diffusers does
    allowed_sizes: tuple[tuple[int, int], ...]  # (width, height); empty: any multiple of size_multiple
    allowed_frames: tuple[int, ...]  # empty: any 4k+1
    schedulers: tuple[str, ...]
    max_prompt_tokens: int  # special tokens included; the model doesn't read further
    warn_prompt_tokens: int  # from here on quality suffers; 0: never
    tokenizer: str  # "package:path in it" or a file
    boundaries: Mapping[int, tuple[Boundary, ...]]  # steps -> rows, ascending
    # The same by kind of difference; other kinds use `boundaries`. A table without rows: this kind is never reused.
    kinds: Mapping[str, Mapping[int, tuple[Boundary, ...]]] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=lambda: dict(NO_GAIN))  # all of NO_GAIN's names
    kind_gains: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # the same by kind of difference
    regions: Mapping[str, float] = field(default_factory=dict)  # RADII and LARGEST_SHARE; empty: the engine's own
    # Words that mean the same in prompts for this model alone: in the built-in world a ball is a circle.
    synonyms: tuple[tuple[str, ...], ...] = ()
    weights: Weights | None = None  # where they lie; None: they come with the program
    anatomy: Anatomy | None = None  # of a model with weights: what its memory follows from

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SettingsError(f"model card {self.name!r}: dtype is {self.dtype!r}", hint=f"use {' or '.join(DTYPES)}")
        if not re.fullmatch("[0-9a-f]{64}", self.fingerprint):
            raise SettingsError(f"model card {self.name!r}: fingerprint isn't a sha256 in hexadecimal")
        if self.size_multiple < 1 or self.max_prompt_tokens < 1:
            raise SettingsError(f"model card {self.name!r}: size_multiple and max_prompt_tokens must be 1 or more")
        for width, height in self.allowed_sizes:
            if width % self.size_multiple or height % self.size_multiple:
                raise SettingsError(
                    f"model card {self.name!r}: allowed size {width}x{height} isn't a multiple of {self.size_multiple}"
                )
        for steps, rows in self.boundaries.items():
            if not rows:
                raise SettingsError(f"model card {self.name!r}: boundaries for {steps} steps are empty")
            self._check_rows(f"boundaries for {steps} steps", steps, rows)
        for kind, tables in self.kinds.items():
            if not tables:
                raise SettingsError(f"model card {self.name!r}: kinds: {kind!r} has no table; leave it out, or give []")
            for steps, rows in tables.items():
                self._check_rows(f"kinds: {kind!r} for {steps} steps", steps, rows)
        for kind, gains in {"": self.gains, **self.kind_gains}.items():
            self._check_gains(f"gains of kind {kind!r}" if kind else "gains", gains)
        self._check_regions()

    def _check_rows(self, field_name: str, steps: int, rows: tuple[Boundary, ...]) -> None:
        where = f"model card {self.name!r}: {field_name}"
        for m_from, k1, k2 in rows:
            if not (0.0 <= m_from <= 1.0 and 0 <= k1 <= k2 <= steps):
                raise SettingsError(f"{where}: ({m_from}, {k1}, {k2}) isn't within 0 <= k1 <= k2 <= steps")
        for before, after in itertools.pairwise(rows):
            if not (before[0] < after[0] and before[1] <= after[1] and before[2] <= after[2]):
                raise SettingsError(f"{where}: {after} after {before} doesn't ascend")

    def _check_gains(self, field_name: str, gains: Mapping[str, float]) -> None:
        where = f"model card {self.name!r}: {field_name}"
        if set(gains) != set(NO_GAIN):
            raise SettingsError(f"{where} are {', '.join(NO_GAIN)}, not {', '.join(gains) or 'nothing'}")
        for name in ("key", "output"):
            if not (math.isfinite(gains[name]) and gains[name] >= 1):
                raise SettingsError(f"{where}: {name} must be 1 (off) or more, not {gains[name]}")
        if not 0 < gains["until"] <= 1:
            raise SettingsError(f"{where}: until is a share of the steps above 0, not {gains['until']}")

    def _check_regions(self) -> None:
        where, names = f"model card {self.name!r}: regions", (*RADII, LARGEST_SHARE)
        if not self.regions:
            return
        if set(self.regions) != set(names):
            raise SettingsError(f"{where} are {', '.join(names)}, not {', '.join(self.regions)}")
        for name in RADII:
            if not (isinstance(self.regions[name], int) and self.regions[name] >= 0):
                raise SettingsError(f"{where}: {name} is a whole number of tokens from 0 on, not {self.regions[name]}")
        if self.regions["see_spatial"] <= self.regions["edit_spatial"]:
            raise SettingsError(f"{where}: see_spatial must exceed edit_spatial")
        if self.regions["see_temporal"] < self.regions["edit_temporal"]:
            raise SettingsError(f"{where}: see_temporal must not be below edit_temporal")
        if not 0 < self.regions[LARGEST_SHARE] <= 1:
            raise SettingsError(f"{where}: {LARGEST_SHARE} lies between 0 and 1, not {self.regions[LARGEST_SHARE]}")

    @property
    def tau(self) -> float:
        """The lowest similarity at which anything is reused, whatever the kind; above 1 (never) if nothing is."""
        every = (self.boundaries, *self.kinds.values())
        return min((rows[0][0] for tables in every for rows in tables.values() if rows), default=2.0)


def known_cards(models: Path | None = None) -> dict[str, Path]:
    """The files of cards by name: those of the program, and those in the folder `models`."""
    added = {file.stem: file for file in models.glob("*.json")} if models is not None else {}
    return {**added, **{file.stem: file for file in CARDS.glob("*.json")}}


def load_card(name: str, models: Path | None = None) -> ModelCard:
    """The card of that name, or in the JSON file of that path. Raises SettingsError."""
    known = known_cards(models)
    if name not in known and not name.endswith(".json"):
        raise SettingsError(
            f"there is no model named {name!r}",
            hint=f"known models: {', '.join(sorted(known))}; add one: chorus-batch model add; or name a card's .json",
        )
    path = known.get(name) or Path(name)
    try:
        card = _card(json.loads(path.read_text(encoding="utf-8")), path.parent)
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", hint="check the model's name") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{path}: not a model card: {error}") from error
    return card


def _card(table: dict[str, Any], folder: Path) -> ModelCard:
    unknown = set(table) - {field.name for field in fields(ModelCard)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    return ModelCard(
        **{
            **table,
            # A tokenizer may lie beside its card, and is named without a folder then.
            "tokenizer": table["tokenizer"] if ":" in table["tokenizer"] else str(folder / table["tokenizer"]),
            "defaults": Parameters(model=table["name"], **table["defaults"]),
            "allowed_sizes": tuple((int(width), int(height)) for width, height in table["allowed_sizes"]),
            "allowed_frames": tuple(table["allowed_frames"]),
            "schedulers": tuple(table["schedulers"]),
            "boundaries": _tables(table["boundaries"]),
            "kinds": {kind: _tables(tables) for kind, tables in table.get("kinds", {}).items()},
            "gains": _floats(table.get("gains", NO_GAIN)),
            "kind_gains": {kind: _floats(gains) for kind, gains in table.get("kind_gains", {}).items()},
            "regions": {name: _number(value) for name, value in table.get("regions", {}).items()},
            "synonyms": tuple(tuple(map(str, group)) for group in table.get("synonyms", ())),
            "weights": Weights(**table["weights"]) if table.get("weights") else None,
            "anatomy": _anatomy(table["anatomy"]) if table.get("anatomy") else None,
        }
    )


def _tables(tables: Mapping[str, list[list[float]]]) -> dict[int, tuple[Boundary, ...]]:
    return {
        int(steps): tuple((float(m_from), _whole(k1), _whole(k2)) for m_from, k1, k2 in rows)
        for steps, rows in tables.items()
    }


def _anatomy(table: Mapping[str, Any]) -> Anatomy:
    return Anatomy(**{**table, "patch": triple(table["patch"])})


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _whole(value: float) -> int:
    if not float(value).is_integer():
        raise ValueError(f"{value} isn't a whole number of steps")
    return int(value)


def _number(value: float) -> float:
    """Whole numbers as such: 1.0 is a radius of 1."""
    return int(value) if float(value).is_integer() else value
