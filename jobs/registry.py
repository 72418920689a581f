"""Models by configuration: a card for a folder of weights, written once, read by whoever plans or runs jobs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chorus_batch.jobs import weights
from chorus_batch.jobs.anatomy import Anatomy, measure
from chorus_batch.jobs.cards.card import CARDS, ModelCard, load_card
from chorus_batch.jobs.checksums import Checksums, Told
from chorus_batch.jobs.errors import Conflict, SettingsError, UsageError, WeightsRejected
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.weights import Weights

MAX_PROMPT_TOKENS = 512
SHIFT = 5.0
# steps -> (m_from, k1, k2), for similarities of CLIP embeddings (README, "Method"): what the paper's figures fit, to be
# replaced by what a calibration finds.
BOUNDARIES: Mapping[str, list[list[float]]] = {
    "4": [[0.75, 1, 2], [0.92, 2, 3]],
    "50": [[0.65, 5, 10], [0.75, 10, 18], [0.85, 15, 25], [0.90, 20, 30], [0.95, 25, 35]],
}
# What a model of each sort runs unless a row says otherwise: as Wan2.1's and LightX2V's own programs do.
ORDINARY: Mapping[str, Any] = {"steps": 50, "guidance_scale": 5.0, "scheduler": "unipc"}
DISTILLED: Mapping[str, Any] = {"steps": 4, "guidance_scale": 1.0, "shift": SHIFT, "scheduler": "euler"}
SIZE: Mapping[str, Any] = {"width": 832, "height": 480, "frames": 81, "fps": 16, "negative_prompt": ""}


@dataclass(frozen=True)
class Asked:
    """What `model add` was told. A distilled model runs 4 Euler steps without guidance."""

    name: str
    folder: str
    checkpoint: str = ""
    lora: str = ""
    lora_strength: float = 1.0
    dtype: str = "bfloat16"
    distilled: bool = False
    replace: bool = False


def memory(settings: Settings) -> Checksums:
    """What this host knows of its weight files."""
    return Checksums(settings.data_dir / "checksums.json")


def add(settings: Settings, asked: Asked, tell: Told = lambda done, total: None) -> ModelCard:
    """Check the files, read them once for their checksums, and write the card, its tokenizer beside it.

    Raises UsageError, Conflict, WeightsRejected and DependencyDown, and then has written nothing.
    """
    models = settings.models_folder
    path = models / f"{asked.name}.json"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", asked.name):
        raise UsageError(f"{asked.name!r} can't be a model's name", hint="use letters, digits, and . _ - inside")
    if (CARDS / path.name).exists():
        raise Conflict(f"{asked.name} is a model of the program's own", hint="take another name")
    if path.exists() and not asked.replace:
        raise Conflict(f"there is a model {asked.name} already: {path}", hint="take another name, or use --replace")
    wanted = Weights(
        _absolute(asked.folder), "", _absolute(asked.checkpoint), _absolute(asked.lora), asked.lora_strength
    )
    located = weights.locate(wanted, models, fetch=True)
    # A hub's folder is named for its revision.
    revision = "" if Path(wanted.folder).is_dir() else located.folder.name
    files = weights.files_of(located)
    anatomy = measure(files)
    checksums = memory(settings).of(files, tell=tell)
    stored = replace(wanted, revision=revision, files=checksums)
    tokenizer = f"{asked.name}.tokenizer"
    fingerprint = weights.fingerprint(checksums, asked.lora_strength)
    table = _table(asked, stored, anatomy, fingerprint, _shift(located.folder), tokenizer)
    models.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(located.folder / weights.TOKENIZER, models / tokenizer)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
    return load_card(asked.name, models)


def verify(settings: Settings, name: str, tell: Told = lambda done, total: None) -> ModelCard:
    """Read every file of a model anew and compare. Raises WeightsRejected, naming what differs, and SettingsError."""
    card = load_card(name, settings.models_folder)
    if card.weights is None:
        raise SettingsError(f"{name} comes with the program", hint="its weights are verified whenever they're loaded")
    files = weights.files_of(weights.locate(card.weights, settings.models_folder))
    check(card, memory(settings).of(files, anew=True, tell=tell))
    return card


def check(card: ModelCard, checksums: Mapping[str, str]) -> str:
    """The fingerprint of files with these checksums, which must be the card's. Raises WeightsRejected."""
    assert card.weights is not None
    found = weights.fingerprint(checksums, card.weights.lora_strength)
    if found != card.fingerprint:
        others = weights.differing(checksums, card.weights.files)
        raise WeightsRejected(
            f"the weights of {card.name} here are not those that it was added with: "
            f"{', '.join(others[:3]) or 'lora_strength'}{' ...' if others[3:] else ''}",
            hint=f"fetch them again and run chorus-batch model verify {card.name}; or add them as another model",
        )
    return found


def _table(
    asked: Asked, stored: Weights, anatomy: Anatomy, fingerprint: str, shift: float, tokenizer: str
) -> dict[str, Any]:
    defaults = {**SIZE, **({"shift": shift, **ORDINARY} if not asked.distilled else DISTILLED)}
    return {
        "name": asked.name,
        "fingerprint": fingerprint,
        "dtype": asked.dtype,
        "defaults": defaults,
        "size_multiple": 16,
        "allowed_sizes": [],
        "allowed_frames": [],
        # Distilled to one solver's steps.
        "schedulers": ["euler"] if asked.distilled else ["unipc", "dpm++", "euler"],
        "max_prompt_tokens": MAX_PROMPT_TOKENS,
        "warn_prompt_tokens": 0,
        "tokenizer": tokenizer,
        "boundaries": dict(BOUNDARIES),
        "weights": asdict(stored),
        "anatomy": asdict(anatomy),
    }


def _shift(folder: Path) -> float:
    """What the folder's own scheduler shifts by: 3 for 480p and 5 for 720p in the released ones."""
    path = folder / "scheduler" / "scheduler_config.json"
    config = weights.read_json(path) if path.is_file() else {}
    return float(config.get("flow_shift") or config.get("shift") or SHIFT)


def _absolute(name: str) -> str:
    """A path as every folder that a worker starts in has it; a hub's name as it is."""
    path = Path(name).expanduser()
    return str(path.absolute()) if name and path.exists() else name
