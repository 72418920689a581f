"""Training state on disk, and the averaged weights beside it in diffusers' folder layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from .. import wan

STATE = "checkpoint.pt"
TRANSFORMER = "transformer"


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Replaces the folder's state in one move, so that a killed run leaves the old state or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{STATE}.new"
    torch.save(state, fresh)
    fresh.replace(folder / STATE)


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The state last saved, None where there is none."""
    path = folder / STATE
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def save_transformer(model: torch.nn.Module, folder: Path) -> None:
    """Float16 safetensors and config.json in `folder`/transformer, as `from_pretrained` reads them."""
    half: Any = copy.deepcopy(model).half()
    half.save_pretrained(folder / TRANSFORMER)


def load_transformer(folder: Path, device: str = "cpu") -> torch.nn.Module:
    """The transformer of a training folder or of a diffusers folder; float32, frozen. Raises WeightsError."""
    inner = folder / TRANSFORMER
    model: torch.nn.Module = wan.load_transformer(inner if inner.is_dir() else folder, device)
    return model
