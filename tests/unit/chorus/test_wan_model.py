"""Law 1 on the production path: a folder in diffusers' layout through WanModel and Engine equals WanPipeline's own run."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_wan_lora_to_diffusers
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from safetensors.torch import load_file, save_file

from chorus_batch.chorus import lora, wan
from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.errors import NoOffsets, OutOfMemory, UnsupportedSettings, WeightsError
from chorus_batch.chorus.request import Request
from chorus_batch.chorus.schedule import make_scheduler
from chorus_batch.chorus.wan_model import WanModel, WanSource
from chorus_batch.chorus.wan_text import WanText
from chorus_batch.jobs.ingest.tokens import TokenCounter
from chorus_batch.jobs.parameters import clean_prompt

# Cleaning it twice gives another text than cleaning it once.
RAW = "the  red&nbsp;fox\u2019s <&amp;amp;amp;lt;circle&gt; moves \u00e2\u20ac\u0153left\u00e2\u20ac\u009d over a gray caf\u00c3\u00a9 background"
FINGERPRINT = "0" * 64
BLOCKS = 2


def loaded(folder: Path, dtype: str = "float32", **source: Any) -> WanModel:
    return WanModel("tiny-wan", WanSource(folder, FINGERPRINT, **source), dtype=dtype)


@pytest.fixture(scope="module")
def model(wan_folder: Path) -> WanModel:
    return loaded(wan_folder)


def by_pipeline(
    pipeline: WanPipeline, settings: GenerationSettings, prompt: str, negative: str, seed: int
) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """diffusers' latents [C, T, H, W] and frames [F, H, W, 3]."""
    kept: dict[str, torch.Tensor] = {}
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = make_scheduler(settings.scheduler, settings.shift)
    frames = pipeline(
        prompt=prompt,
        negative_prompt=negative,
        width=settings.width,
        height=settings.height,
        num_frames=settings.frames,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(seed),
        max_sequence_length=512,
        output_type="np",
        callback_on_step_end=lambda pipe, step, timestep, tensors: kept.update(tensors) or {},
    ).frames
    return kept["latents"][0], frames[0]


def pipeline_of(folder: Path, dtype: torch.dtype = torch.float32) -> WanPipeline:
    return WanPipeline.from_pretrained(folder, dtype={"default": dtype, "vae": torch.float32}, local_files_only=True)


@pytest.mark.parametrize(("steps", "guidance", "scheduler"), [(50, 5.0, "unipc"), (4, 1.0, "euler"), (6, 5.0, "dpm++")])
def test_the_folder_gives_what_diffusers_pipeline_gives(
    wan_folder: Path, steps: int, guidance: float, scheduler: str
) -> None:
    """Latents and frames, bit for bit, from a prompt that is cleaned on the way."""
    settings = GenerationSettings(48, 32, 9, 16, steps, guidance, 5.0, scheduler)
    latents, frames = by_pipeline(pipeline_of(wan_folder), settings, RAW, "ugly &amp; gray", 7)
    engine = Engine(loaded(wan_folder))
    assert clean_prompt(clean_prompt(RAW)) != clean_prompt(RAW)
    request = Request(clean_prompt(RAW), 7, settings, "domain", negative_prompt=clean_prompt("ugly &amp; gray"))
    result = engine.generate(request)
    assert torch.equal(result.latents, latents)
    assert np.array_equal(engine.model.decode(result.latents).numpy(), frames)
    assert engine.decode(result.latents).shape == (9, 32, 48, 3)
    assert result.trace.forward_passes == steps * (2 if guidance > 1 else 1)


def test_in_bfloat16_the_latents_are_better_than_the_pipelines(wan_folder: Path) -> None:
    """The texts' features are the same bits; latents stay float32 between steps, where the pipeline rounds them."""
    pipeline = pipeline_of(wan_folder, torch.bfloat16)
    engine, exact = Engine(loaded(wan_folder, "bfloat16")), Engine(loaded(wan_folder))
    with torch.inference_mode():
        theirs = pipeline.encode_prompt(RAW, do_classifier_free_guidance=False, max_sequence_length=512)[0]
        assert torch.equal(engine.model.encode(clean_prompt(RAW)), theirs)
    settings = GenerationSettings(48, 32, 9, 16, 4, 1.0, 5.0)
    latents, _ = by_pipeline(pipeline, settings, RAW, "", 7)
    ours, best = (e.generate(Request(clean_prompt(RAW), 7, settings, "domain")) for e in (engine, exact))
    assert ours.trace.backend["dtype"] == "bfloat16"
    assert latents.dtype == torch.bfloat16
    error, rounded = ((x.float() - best.latents).abs().mean() for x in (ours.latents, latents))
    assert 0 < error < rounded < 0.05


def test_decoding_in_float32_beside_a_bfloat16_transformer(wan_folder: Path, model: WanModel) -> None:
    half = loaded(wan_folder, "bfloat16")
    latents = torch.randn(16, 3, 4, 6, generator=torch.Generator().manual_seed(2))
    assert half.transformer.dtype == half.encode("a fox").dtype == torch.bfloat16
    assert torch.equal(half.decode(latents), model.decode(latents))


def test_what_the_video_measures(model: WanModel) -> None:
    settings = GenerationSettings(48, 32, 9, 16, 4, 1.0, 5.0)
    model.check(settings)
    assert model.latent_shape(settings) == (16, 3, 4, 6)
    assert model.judge("a fox", np.zeros((9, 32, 48, 3), np.uint8)) is None
    with pytest.raises(UnsupportedSettings, match="width must be a multiple of 16, not 40") as refused:
        model.check(GenerationSettings(40, 32, 9, 16, 4, 1.0, 5.0))
    assert refused.value.hint == "use 32"
    with pytest.raises(UnsupportedSettings, match="32 positions along each axis, the video has 33"):
        model.check(GenerationSettings(48, 32, 129, 16, 4, 1.0, 5.0))


def test_tiles_can_be_switched(model: WanModel) -> None:
    latents = torch.randn(16, 1, 4, 40, generator=torch.Generator().manual_seed(2))
    assert not model.codec.tiling
    whole = model.decode(latents)
    model.codec.tiling = True
    try:
        tiled = model.decode(latents)
    finally:
        model.codec.tiling = False
    assert tiled.shape == whole.shape == (1, 32, 320, 3)
    # The codec's attention sees a tile instead of the frame: nearly the same pixels.
    assert 0 < float((tiled - whole).abs().mean()) < 0.05
    assert torch.equal(model.decode(latents), whole)


def test_slots_are_counted_cut_and_placed(model: WanModel) -> None:
    text = "a red fox z"
    assert model.text_slots == 512
    assert model.count_tokens(text) == len(model.token_offsets(text)) == 6
    words = [text[start:end].strip() for start, end in model.token_offsets(text)]
    assert words == ["a", "red", "fox", "", "z", ""]
    assert model.token_offsets(text)[-1] == (0, 0)
    features = model.encode(text)
    assert features.shape == (1, 512, 32)
    assert features[0, :6].abs().amin(dim=1).min() > 0
    assert not features[0, 6:].any()
    long = " ".join(["fox"] * 600)
    assert model.count_tokens(long) == 601
    assert len(model.token_offsets(long)) == 512
    assert model.token_offsets(long)[-1] == (0, 0)


def test_without_a_fast_tokenizer_there_are_no_offsets(model: WanModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model.text._tokenizer), "is_fast", False)
    with pytest.raises(NoOffsets):
        model.token_offsets("a fox")


# Wan's own names of a transformer's weights, as its releases and LightX2V's have them.
LAYERS = [f"blocks.{i}.{a}_attn.{p}" for i in range(BLOCKS) for a in ("self", "cross") for p in "qkvo"]
LAYERS += [f"blocks.{i}.ffn.{n}" for i in range(BLOCKS) for n in (0, 2)]
EMBEDDERS = ["text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2", "time_projection.1"]
NORMS = [f"blocks.{i}.{a}_attn.norm_{p}" for i in range(BLOCKS) for a in ("self", "cross") for p in "qk"]
TABLES = [*(f"blocks.{i}.modulation" for i in range(BLOCKS)), "head.modulation"]
BIASED = [*LAYERS, *EMBEDDERS, *(f"blocks.{i}.norm3" for i in range(BLOCKS)), "patch_embedding", "head.head"]
RELEASED = [*(f"{n}.{of}" for n in BIASED for of in ("weight", "bias")), *(f"{n}.weight" for n in NORMS), *TABLES]


def distilled(folder: Path) -> dict[str, torch.Tensor]:
    """Other weights for the folder's transformer, by Wan's own names."""
    generator = torch.Generator().manual_seed(8)
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    names = wan.diffusers_names(RELEASED)
    assert set(names.values()) == set(stored)
    return {old: stored[new] + 0.1 * torch.randn(stored[new].shape, generator=generator) for old, new in names.items()}


@pytest.mark.parametrize("layout", ["file", "folder", "diffusers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_takes_the_transformers_place(wan_folder: Path, tmp_path: Path, layout: str, dtype: str) -> None:
    """As if its weights were the folder's own, in dtypes too."""
    weights = distilled(wan_folder)
    names = wan.diffusers_names(weights)
    other = tmp_path / "other"
    shutil.copytree(wan_folder, other)
    ours = {new: weights[old] for old, new in names.items()}
    save_file(ours, other / "transformer" / "diffusion_pytorch_model.safetensors")
    checkpoint = tmp_path / "checkpoint"
    if layout == "folder":
        checkpoint.mkdir()
        half = len(weights) // 2
        for n, part in enumerate((list(weights)[:half], list(weights)[half:])):
            save_file({name: weights[name] for name in part}, checkpoint / f"part-{n}.safetensors")
    else:
        checkpoint = checkpoint.with_suffix(".safetensors")
        save_file(ours if layout == "diffusers" else weights, checkpoint)
    found = loaded(wan_folder, dtype, checkpoint=checkpoint).transformer.state_dict()
    expected = loaded(other, dtype).transformer.state_dict()
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in expected.items()}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["proj_out.weight"], loaded(wan_folder, dtype).transformer.proj_out.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("head.head.bias"), "lacks 1 weights: proj_out.bias"),
        (lambda state: state.update({"blocks.0.cross_attn.k_img.weight": torch.zeros(2)}), "has too much: 1 weights"),
        (lambda state: state.update({"head.head.bias": torch.zeros(2)}), "size mismatch"),
    ],
)
def test_a_checkpoint_that_isnt_whole_is_refused(
    wan_folder: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    weights = distilled(wan_folder)
    change(weights)
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(WeightsError, match=message):
        loaded(wan_folder, checkpoint=tmp_path / "weights.safetensors")
    with pytest.raises(WeightsError, match=r"no \.safetensors file"):
        loaded(wan_folder, checkpoint=wan_folder)


def low_rank(transformer: Any, layers: list[str], alpha: float | None = None, rank: int = 3) -> dict[str, torch.Tensor]:
    """A LoRA file's content for layers by Wan's own names."""
    generator = torch.Generator().manual_seed(4)
    state = {}
    for layer in layers:
        weight = transformer.get_parameter(wan.diffusers_names([f"{layer}.weight"])[f"{layer}.weight"])
        key = f"diffusion_model.{layer}"
        state[f"{key}.lora_down.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
        state[f"{key}.lora_up.weight"] = torch.randn(weight.shape[0], rank, generator=generator)
        if alpha is not None:
            state[f"{key}.alpha"] = torch.tensor(alpha)
    return state


def saved(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "lora.safetensors")
    return folder / "lora.safetensors"


@pytest.mark.parametrize(("alpha", "layers"), [(None, [*LAYERS, *EMBEDDERS, "head.head"]), (1.5, LAYERS)])
def test_a_lora_adds_what_diffusers_reads_from_it(
    wan_folder: Path, model: WanModel, tmp_path: Path, alpha: float | None, layers: list[str]
) -> None:
    state = low_rank(model.transformer, layers, alpha)
    biases = {f"diffusion_model.{layer}.diff_b": torch.ones(state[f"diffusion_model.{layer}.lora_up.weight"].shape[0])
              for layer in layers}  # fmt: skip
    found = loaded(wan_folder, lora=saved(state | biases, tmp_path), lora_strength=0.5).transformer.state_dict()
    theirs = _convert_non_diffusers_wan_lora_to_diffusers(state | biases)
    before = model.transformer.state_dict()
    changed = set()
    for key in theirs:
        name = key.removeprefix("transformer.")
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            delta = theirs[f"transformer.{layer}.lora_B.weight"] @ theirs[key]
            torch.testing.assert_close(found[f"{layer}.weight"], before[f"{layer}.weight"] + 0.5 * delta)
            torch.testing.assert_close(found[f"{layer}.bias"], before[f"{layer}.bias"] + 0.5)
            changed |= {f"{layer}.weight", f"{layer}.bias"}
    assert len(changed) == 2 * len(layers)
    assert all(torch.equal(found[name], before[name]) for name in before if name not in changed)


def test_differences_that_diffusers_leaves_out_are_added_too(wan_folder: Path, model: WanModel, tmp_path: Path) -> None:
    """Of norms, tables and the patch embedding; and a key in diffusers' own names."""
    before = {name: tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    state = {
        "diffusion_model.blocks.1.norm3.diff": torch.ones(24),
        "diffusion_model.blocks.1.norm3.diff_b": torch.ones(24),
        "diffusion_model.blocks.0.self_attn.norm_q.diff": torch.ones(24),
        "diffusion_model.blocks.1.diff_m": torch.ones(1, 6, 24),
        "diffusion_model.head.modulation.diff": torch.ones(1, 2, 24),
        "diffusion_model.patch_embedding.diff": torch.ones(24, 16, 1, 2, 2),
        "transformer.blocks.0.attn1.to_q.lora_A.weight": torch.ones(1, 24),
        "transformer.blocks.0.attn1.to_q.lora_B.weight": torch.ones(24, 1),
    }
    fresh = loaded(wan_folder).transformer
    assert lora.fuse(fresh, saved(state, tmp_path), 2.0) == len(state)
    after = fresh.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        "blocks.1.norm2.weight", "blocks.1.norm2.bias", "blocks.0.attn1.norm_q.weight", "blocks.1.scale_shift_table",
        "scale_shift_table", "patch_embedding.weight", "blocks.0.attn1.to_q.weight",
    }  # fmt: skip
    assert all(torch.equal(after[name], before[name] + 2.0) for name in changed)


@pytest.mark.parametrize(
    ("foreign", "message"),
    [
        ({"diffusion_model.blocks.0.cross_attn.k_img.diff_b": torch.ones(24)}, "1 of the 9 keys.*k_img"),
        ({"diffusion_model.blocks.2.self_attn.q.diff_b": torch.ones(24)}, "1 of the 9 keys"),
        ({"diffusion_model.blocks.0.ffn.0.lora_down.weight": torch.ones(3, 24)}, "1 of the 9 keys"),
        ({"diffusion_model.blocks.0.ffn.2.diff_b": torch.ones(7)}, "1 of the 9 keys"),
        ({"diffusion_model.blocks.0.ffn.0.lora_down.weight": torch.ones(3, 7),
          "diffusion_model.blocks.0.ffn.0.lora_up.weight": torch.ones(32, 3)}, "2 of the 10 keys"),
        ({"lora_unet_blocks_0_ffn_0.lora_down.weight": torch.ones(3, 24)}, "1 of the 9 keys"),
        ({"anything": torch.ones(3)}, "1 of the 9 keys"),
    ],
)  # fmt: skip
def test_a_lora_with_a_key_that_fits_nothing_is_refused(
    wan_folder: Path, tmp_path: Path, foreign: dict[str, torch.Tensor], message: str
) -> None:
    transformer = loaded(wan_folder).transformer
    before = {name: tensor.clone() for name, tensor in transformer.state_dict().items()}
    state = low_rank(transformer, ["blocks.0.self_attn.q", "blocks.1.cross_attn.v"], 1.0)
    state |= {f"diffusion_model.blocks.1.ffn.2.{ending}": torch.ones(24) for ending in ("diff_b",)}
    state |= {"diffusion_model.blocks.1.norm3.diff": torch.ones(24)}
    with pytest.raises(WeightsError, match=message):
        lora.fuse(transformer, saved(state | foreign, tmp_path), 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in transformer.state_dict().items())


@pytest.fixture
def copy(wan_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(wan_folder, tmp_path / "copy")
    return tmp_path / "copy"


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _config(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _without_a_weight(path: Path) -> None:
    tensors = load_file(path)
    del tensors[next(iter(tensors))]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "there is no folder"),
        (lambda f: shutil.rmtree(f / "tokenizer"), "no tokenizer in"),
        (lambda f: (f / "tokenizer" / "tokenizer.json").write_text("{"), "the tokenizer in"),
        (lambda f: shutil.rmtree(f / "vae"), "the model in .*vae can't be loaded"),
        (lambda f: (f / "text_encoder" / "model.safetensors").unlink(), "the model in .*text_encoder"),
        (lambda f: _truncate(f / "transformer" / "diffusion_pytorch_model.safetensors"), "the model in .*transformer"),
        (lambda f: _truncate(f / "text_encoder" / "model.safetensors"), "the model in .*text_encoder"),
        (lambda f: _without_a_weight(f / "transformer" / "diffusion_pytorch_model.safetensors"), "it lacks 1 weights"),
        (lambda f: _without_a_weight(f / "text_encoder" / "model.safetensors"), "it lacks 1 weights"),
        (lambda f: _without_a_weight(f / "vae" / "diffusion_pytorch_model.safetensors"), "it lacks 1 weights"),
        (lambda f: _config(f / "transformer" / "config.json", _class_name="WanVACETransformer3DModel"),
         "it holds a WanVACETransformer3DModel, not a WanTransformer3DModel"),
        (lambda f: _config(f / "text_encoder" / "config.json", architectures=["T5EncoderModel"]), "a T5EncoderModel"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(copy: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(copy)
    with pytest.raises(WeightsError, match=message) as refused:
        loaded(copy)
    assert "fetch the model again" in refused.value.hint


def test_a_text_encoder_of_another_width_is_refused(copy: Path, tmp_path: Path) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(vocab_size=128, d_model=16, d_kv=8, d_ff=37, num_layers=1, num_heads=2, pad_token_id=0)
    UMT5EncoderModel(config).save_pretrained(copy / "text_encoder")
    with pytest.raises(WeightsError, match="16 values a token, the transformer reads 32"):
        loaded(copy)


@pytest.mark.parametrize("dtype", ["float16", "float8"])
def test_an_unsupported_dtype_is_named(wan_folder: Path, dtype: str) -> None:
    with pytest.raises(UnsupportedSettings, match=dtype) as refused:
        loaded(wan_folder, dtype)
    assert "bfloat16 or float32" in refused.value.hint


def test_a_card_without_bfloat16_is_named(wan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an old one")
    with pytest.raises(UnsupportedSettings, match="an old one has no bfloat16") as refused:
        WanModel("tiny-wan", WanSource(wan_folder, FINGERPRINT), "cuda")
    assert "--dtype fp32" in refused.value.hint


@pytest.mark.parametrize("names", [{"shared.weight"}, {"encoder.embed_tokens.weight"}])
def test_the_words_table_has_two_names(copy: Path, model: WanModel, names: set[str]) -> None:
    """Releases hold it under one of them, or both."""
    path = copy / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    table = tensors.pop("shared.weight")
    for each in (names, {"shared.weight", "encoder.embed_tokens.weight"}):
        save_file(tensors | {name: table.clone() for name in each}, path)
        with torch.inference_mode():
            assert torch.equal(loaded(copy).encode("a red fox"), model.encode("a red fox"))


@pytest.mark.parametrize("named", ["T5Tokenizer", "T5TokenizerFast"])
def test_released_folders_name_t5s_tokenizer(copy: Path, model: WanModel, named: str) -> None:
    """Which transformers builds anew from the file: the same tokens, and places that leave out the space before."""
    _config(copy / "tokenizer" / "tokenizer_config.json", tokenizer_class=named, extra_ids=0, backend=None)
    text = "a red fox moves"
    other = WanText(copy, "cpu", torch.float32)
    assert other.token_offsets(text) == [(0, 1), (2, 5), (6, 9), (10, 15), (0, 0)]
    with torch.inference_mode():
        assert torch.equal(other.encode(text), model.encode(text))
    # What the producer counts with is the file itself.
    for prompt in (text, clean_prompt(RAW)):
        over = TokenCounter(str(copy / "tokenizer" / "tokenizer.json")).over([prompt], 1)
        assert over == {0: other.count_tokens(prompt)} == {0: model.count_tokens(prompt)}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_running_out_of_memory_while_loading_keeps_nothing(
    wan_folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    seen: list[weakref.ref[Any]] = []
    load = wan.load_component

    def last_does_not_fit(of: Any, folder: Path, dtype: torch.dtype) -> Any:
        if folder.name == "transformer":
            raise error("no room")
        component = load(of, folder, dtype)
        seen.append(weakref.ref(component))
        return component

    monkeypatch.setattr(wan, "load_component", last_does_not_fit)
    with pytest.raises(OutOfMemory, match="no room for tiny-wan in float32") as refused:
        loaded(wan_folder)
    assert (refused.value.code, len(seen)) == ("out_of_memory", 2)
    # The error is still held, and so is its traceback.
    assert [reference() for reference in seen] == [None, None]
    gc.collect()
