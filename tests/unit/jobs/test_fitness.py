"""What a worker looks at before it claims anything: each unfit thing is named, with what to do about it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from chorus_batch.jobs import fitness, registry
from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.errors import SettingsError, WeightsRejected
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings

TRANSFORMER = Path("transformer") / "diffusion_pytorch_model.safetensors"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", device="cpu")


@pytest.fixture
def folder(wan_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wan_folder, tmp_path / "copy"))


@pytest.fixture
def card(settings: Settings, folder: Path) -> ModelCard:
    return registry.add(settings, Asked("tiny", str(folder), dtype="float32"))


def test_the_builtin_model_with_the_defaults_is_fit(settings: Settings) -> None:
    fitness.check(settings, {})
    assert fitness.unfit_models(settings) == {}


def test_each_damage_to_a_model_is_named(settings: Settings, folder: Path, card: ModelCard) -> None:
    mine = replace(settings, model="tiny")
    fitness.check(mine, {})
    data = (folder / TRANSFORMER).read_bytes()
    (folder / TRANSFORMER).write_bytes(data[:-1])
    with pytest.raises(WeightsRejected, match="is cut short") as refused:
        fitness.check(mine, {})
    assert refused.value.hint and refused.value.exit_code == 3
    (folder / TRANSFORMER).unlink()
    with pytest.raises(WeightsRejected, match=r"no \.safetensors file in .*transformer"):
        fitness.check(mine, {})
    (folder / TRANSFORMER).write_bytes(data)
    index = (folder / "model_index.json").read_text()
    (folder / "model_index.json").write_text("{")
    with pytest.raises(WeightsRejected, match=r"model_index\.json can't be read"):
        fitness.check(mine, {})
    (folder / "model_index.json").write_text(index)
    fitness.check(mine, {})
    shutil.rmtree(folder)
    with pytest.raises(WeightsRejected, match="there is no folder"):
        fitness.check(mine, {})
    # It is no reason not to run other models.
    fitness.check(settings, {})
    assert fitness.unfit_models(settings) == {"tiny": f"there is no folder {folder}"}


def test_checksums_are_compared_where_that_is_cheap(settings: Settings, folder: Path, card: ModelCard) -> None:
    data = (folder / TRANSFORMER).read_bytes()
    (folder / TRANSFORMER).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    # Changed since: to tell, all of them would have to be read. The worker reads them when it loads the model.
    fitness.check_model(card, settings)
    files = {"transformer": folder / TRANSFORMER}
    assert registry.memory(settings).remembered(files) is None
    read = registry.memory(settings).of(files)
    assert registry.memory(settings).remembered(files) == read
    with pytest.raises(WeightsRejected, match=r"not those that it was added with: transformer/diffusion_pytorch_model"):
        fitness.check_model(card, settings)


def test_a_model_that_nobody_added_and_a_broken_card_are_named(settings: Settings, card: ModelCard) -> None:
    with pytest.raises(SettingsError, match="there is no model named 'wan99'"):
        fitness.check(replace(settings, model="wan99"), {})
    (settings.models_folder / "tiny.json").write_text("{}")
    assert list(fitness.unfit_models(settings)) == ["tiny"]


def test_a_differ_that_isnt_there_is_named(settings: Settings, tmp_path: Path) -> None:
    mine = replace(settings, differ=f"llm:{tmp_path / 'gone'}")
    with pytest.raises(SettingsError, match="gone holds no language model") as refused:
        fitness.check(mine, {})
    assert "CHORUS_DIFFER" in refused.value.hint
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(SettingsError, match="gone holds no language model's weights"):
        fitness.check(mine, {})
    (tmp_path / "gone" / "model.safetensors").touch()
    fitness.check(mine, {})


def test_a_check_that_dies_is_no_consent(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(settings, attention_backend="native")
    monkeypatch.setattr(fitness, "DEVICE_CHECK", "no.such.module")
    with pytest.raises(SettingsError, match="ended with code 1"):
        fitness.check(mine, os.environ)
