"""Whether this host can run what the settings name, as far as that can be told before a worker claims anything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from chorus_batch.jobs import registry, weights
from chorus_batch.jobs.cards.card import ModelCard, known_cards, load_card
from chorus_batch.jobs.errors import ChorusBatchError, SettingsError, WeightsRejected
from chorus_batch.jobs.settings import Settings

# A program of its own, for it loads torch: 0 and nothing said, or REFUSED and a JSON object with message and hint.
DEVICE_CHECK = "chorus_batch.workers.fitness"
REFUSED = 2


def check(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raises SettingsError and WeightsRejected where a worker with these settings would fail whatever it claims.

    `environ` is the environment that the worker will have. Weights aren't read; what was read before and is another
    now is noticed. An attention backend and torch.compile are tried out on the device, which takes seconds.
    """
    check_model(load_card(settings.model, settings.models_folder), settings)
    if settings.differ_folder is not None:
        _check_differ(settings.differ_folder)
    if settings.attention_backend or settings.compile:
        _try_device(environ)


def check_model(card: ModelCard, settings: Settings) -> None:
    """Raises WeightsRejected, or DependencyDown for a hub's model that was never fetched."""
    if card.weights is None:
        return
    try:
        files = weights.files_of(weights.locate(card.weights, settings.models_folder))
        known = registry.memory(settings).remembered(files)
    except OSError as error:
        raise WeightsRejected(f"the weights of {card.name} can't be read: {error}", hint=weights.FETCH) from error
    if known is not None:
        registry.check(card, known)


def unfit_models(settings: Settings) -> dict[str, str]:
    """The models that have a card here and still can't be run on this host, and why."""
    unfit = {}
    for name in known_cards(settings.models_folder):
        try:
            check_model(load_card(name, settings.models_folder), settings)
        except ChorusBatchError as error:
            unfit[name] = str(error)
    return unfit


def _check_differ(folder: Path) -> None:
    hint = "name a folder that transformers has saved: CHORUS_DIFFER=llm:<folder>; or use lexical"
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        there = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"differ: {folder} holds no language model: {error}", hint=hint) from error
    if not there or not isinstance(config, dict):
        raise SettingsError(f"differ: {folder} holds no language model's weights", hint=hint)


def _try_device(environ: Mapping[str, str]) -> None:
    tried = subprocess.run([sys.executable, "-m", DEVICE_CHECK], env=environ, stdout=subprocess.PIPE, check=False)
    if tried.returncode == 0:
        return
    try:
        said = json.loads(tried.stdout)
        message, hint = str(said["message"]), str(said["hint"])
    except (ValueError, LookupError, TypeError):
        message = f"the device can't be tried out: {DEVICE_CHECK} ended with code {tried.returncode}"
        hint = "leave CHORUS_ATTENTION_BACKEND and CHORUS_COMPILE out"
    raise SettingsError(message, hint=hint)
