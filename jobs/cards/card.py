"""Model cards: what a model is, what it can make, and from which similarity on its work is reused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.parameters import Parameters

CARDS = Path(__file__).parent

Boundary = tuple[float, int, int]  # (m_from, k1, k2): README, "Method"


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

    def __post_init__(self) -> None:
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
            self._check_boundaries(steps, rows)

    def _check_boundaries(self, steps: int, rows: tuple[Boundary, ...]) -> None:
        where = f"model card {self.name!r}: boundaries for {steps} steps"
        if not rows:
            raise SettingsError(f"{where} are empty")
        for m_from, k1, k2 in rows:
            if not (0.0 <= m_from <= 1.0 and 0 <= k1 <= k2 <= steps):
                raise SettingsError(f"{where}: ({m_from}, {k1}, {k2}) isn't within 0 <= k1 <= k2 <= steps")
        for before, after in itertools.pairwise(rows):
            if not (before[0] < after[0] and before[1] <= after[1] and before[2] <= after[2]):
                raise SettingsError(f"{where}: {after} after {before} doesn't ascend")

    @property
    def tau(self) -> float:
        """The lowest similarity at which anything is reused; above 1 (never) for a card without boundaries."""
        return min((rows[0][0] for rows in self.boundaries.values()), default=2.0)


def load_card(name: str) -> ModelCard:
    """The card of that name, or in the JSON file of that path. Raises SettingsError."""
    known = {file.stem: file for file in CARDS.glob("*.json")}
    if name not in known and not name.endswith(".json"):
        raise SettingsError(
            f"there is no model named {name!r}",
            hint=f"known models: {', '.join(sorted(known))}, or a card's .json file",
        )
    path = known.get(name) or Path(name)
    try:
        card = _card(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", hint="check the model's name") from error
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"{path}: not a model card: {error}") from error
    return card


def _card(table: dict[str, Any]) -> ModelCard:
    unknown = set(table) - {field.name for field in fields(ModelCard)}
    if unknown:
        raise ValueError(f"unknown fields {sorted(unknown)}")
    boundaries = {
        int(steps): tuple((float(m_from), int(k1), int(k2)) for m_from, k1, k2 in rows)
        for steps, rows in table["boundaries"].items()
    }
    return ModelCard(
        **{
            **table,
            "defaults": Parameters(model=table["name"], **table["defaults"]),
            "allowed_sizes": tuple((int(width), int(height)) for width, height in table["allowed_sizes"]),
            "allowed_frames": tuple(table["allowed_frames"]),
            "schedulers": tuple(table["schedulers"]),
            "boundaries": boundaries,
        }
    )
