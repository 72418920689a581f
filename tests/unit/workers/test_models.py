"""A worker and a model's card: it runs those weights and no others."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.differ import Kind, LexicalDiffer
from chorus_batch.chorus.errors import WeightsError
from chorus_batch.chorus.grounded import GroundedSegmenter
from chorus_batch.chorus.llm_differ import LlmDiffer
from chorus_batch.chorus.request import Request
from chorus_batch.chorus.segment import EvidenceSegmenter
from chorus_batch.jobs import registry
from chorus_batch.jobs.cards.card import ModelCard, load_card
from chorus_batch.jobs.claims import DomainRecord
from chorus_batch.jobs.errors import WeightsRejected
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings
from chorus_batch.workers.masks import StoredMasks
from chorus_batch.workers.models import load_engine
from chorus_batch.workers.runtime import Runtime, make_differ, make_segmenter
from tests.language_model import save_model


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    # Nobody listens there: a model is loaded without a server.
    return Settings(
        data_dir=tmp_path / "data", device="cpu", database_url="postgresql://nobody@127.0.0.1:9/none",
        s3_endpoint="127.0.0.1:9", s3_access_key="a", s3_secret_key="b",
    )  # fmt: skip


@pytest.fixture
def runtime(settings: Settings) -> Iterator[Runtime]:
    found = Runtime(settings)
    yield found
    found.database.dispose()


@pytest.fixture
def folder(wan_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(wan_folder, tmp_path / "copy"))


@pytest.fixture
def card(settings: Settings, folder: Path) -> ModelCard:
    return registry.add(settings, Asked("tiny", str(folder), dtype="float32", distilled=True))


def domain(card: ModelCard) -> DomainRecord:
    values = {name: value for name, value in asdict(card.defaults).items() if name != "fps"}
    return DomainRecord(id=1, key="k", space_id=1, fingerprint=card.fingerprint, dtype=card.dtype, **values)


def test_the_cards_weights_are_run(runtime: Runtime, card: ModelCard, folder: Path) -> None:
    loaded = runtime.model(domain(card))
    assert runtime.model(domain(card)) is loaded
    model = loaded.engine.model
    assert (model.name, model.fingerprint, model.text_slots) == ("tiny", card.fingerprint, 512)
    assert model.transformer.dtype == torch.float32
    result = loaded.engine.generate(Request("a red fox", 1, GenerationSettings(32, 32, 5, 8, 4, 1.0, 5.0), "domain"))
    assert result.trace.backend["fingerprint"] == card.fingerprint
    assert loaded.policies["chorus"].boundaries.tau_at(4) == 0.75


def test_other_weights_are_refused_before_they_are_loaded(runtime: Runtime, card: ModelCard, folder: Path) -> None:
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(WeightsRejected, match="not those that it was added with: vae/diffusion_pytorch_model"):
        runtime.model(domain(card))
    path.write_bytes(data)
    with pytest.raises(WeightsRejected, match="not those that the job was planned with"):
        runtime.model(replace(domain(card), fingerprint="0" * 64))
    assert runtime.model(domain(card)).engine.fingerprint == card.fingerprint


def test_a_card_that_was_written_anew_is_followed(
    runtime: Runtime, settings: Settings, card: ModelCard, folder: Path
) -> None:
    before = runtime.model(domain(card))
    (folder / "tokenizer" / "added.json").write_text("{}")
    fresh = registry.add(settings, Asked("tiny", str(folder), dtype="float32", replace=True))
    after = runtime.model(domain(fresh))
    assert after is not before
    assert after.engine.fingerprint == fresh.fingerprint != before.engine.fingerprint
    with pytest.raises(WeightsRejected, match="planned with"):
        runtime.model(domain(card))


def test_a_lora_of_another_model_is_refused(settings: Settings, folder: Path, tmp_path: Path) -> None:
    lora = shutil.copy(folder / "vae" / "diffusion_pytorch_model.safetensors", tmp_path / "lora.safetensors")
    card = registry.add(settings, Asked("tiny", str(folder), lora=lora, dtype="float32"))
    with pytest.raises(WeightsError, match=r"keys of the LoRA .* fit nothing"):
        load_engine(card, settings, "cpu")


def test_a_ball_is_a_circle_for_the_builtin_model_alone(runtime: Runtime, card: ModelCard) -> None:
    builtin = load_card("builtin")
    for found, kind in ((builtin, Kind.attribute), (card, Kind.object)):
        policy = runtime.model(domain(found)).policies["chorus"]
        for differ in (policy.differ, policy.quick):
            difference = differ.compare("a red circle moves left", "a red ball moves left")
            assert (difference.kind, bool(difference.target_spans)) == (kind, found is card)


def test_the_settings_name_the_segmenter(
    runtime: Runtime, card: ModelCard, grounded_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    assert isinstance(runtime.model(domain(card)).policies["chorus"].segmenter, EvidenceSegmenter)
    dino, sam2 = grounded_folders
    other = Runtime(replace(runtime.settings, segmenter=f"grounded:{dino}, {sam2}"))
    masks = other.model(domain(card)).policies["chorus"].segmenter
    assert isinstance(masks, StoredMasks) and isinstance(masks._segmenter, GroundedSegmenter)
    # Other weights, other masks.
    same = make_segmenter(other.settings, "cpu", other.store)
    weights = Path(shutil.copytree(sam2, tmp_path / "sam2")) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    changed = make_segmenter(replace(other.settings, segmenter=f"grounded:{dino},{weights.parent}"), "cpu", other.store)
    assert isinstance(same, StoredMasks) and isinstance(changed, StoredMasks)
    assert masks._fingerprint == same._fingerprint != changed._fingerprint
    other.database.dispose()


@pytest.mark.parametrize("lost", ["folder", "library"])
def test_without_its_segmenter_a_worker_says_so_once_and_uses_the_evidence(
    runtime: Runtime, card: ModelCard, grounded_folders: tuple[Path, Path], lost: str,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dino, sam2 = grounded_folders
    gone = "/gone" if lost == "folder" else ""
    without = Runtime(replace(runtime.settings, segmenter=f"grounded:{dino},{sam2}{gone}"))
    if lost == "library":
        monkeypatch.setitem(sys.modules, "chorus_batch.chorus.grounded", None)
    for found in (card, load_card("builtin")):
        assert isinstance(without.model(domain(found)).policies["chorus"].segmenter, EvidenceSegmenter)
    (told,) = [each for each in caplog.messages if "regions come from the evidence" in each]
    assert told == without.lacking
    wanted = "gone holds no model of the type sam2_video" if lost == "folder" else "chorus-batch[segment]"
    assert wanted in told
    without.database.dispose()


def test_the_settings_name_the_differ(runtime: Runtime, card: ModelCard, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "llm")
    with_model = Runtime(replace(runtime.settings, differ=f"llm: {folder}"))
    policy = with_model.model(domain(card)).policies["chorus"]
    assert isinstance(policy.differ, LlmDiffer) and isinstance(policy.quick, LexicalDiffer)
    pair = ("a red circle moves left", "a blue circle moves left")
    assert policy.differ.compare(*pair) == policy.quick.compare(*pair)  # random weights: the fallback's answer
    (line,) = (runtime.settings.data_dir / "answers.jsonl").read_text().splitlines()
    # Other weights, another model: its answers are its own.
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    other = make_differ(with_model.settings, policy.quick, "cpu")
    assert other.compare(*pair) == policy.quick.compare(*pair)
    first, second = map(json.loads, (runtime.settings.data_dir / "answers.jsonl").read_text().splitlines())
    assert (first, first["question"]) == (json.loads(line), second["question"]) and first["model"] != second["model"]
    with_model.database.dispose()
    lost = Runtime(replace(runtime.settings, differ=f"llm:{folder}/gone"))
    with pytest.raises(WeightsError, match="gone holds no language model"):
        lost.model(domain(card))
    lost.database.dispose()
