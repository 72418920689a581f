"""One engine for all tests of the package (loading takes seconds), and a tiny random transformer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.request import Request

PROMPT = "a red circle moves left over a gray background"


@pytest.fixture(scope="session")
def engine() -> Engine:
    return Engine.load(threads=1)


@pytest.fixture
def settings() -> GenerationSettings:
    """Few steps: what's tested here doesn't depend on how good the video is."""
    return GenerationSettings(width=64, height=64, frames=9, fps=8, steps=4, guidance_scale=2.5, shift=3.0)


@pytest.fixture
def request_of(settings: GenerationSettings) -> Any:
    def make(prompt: str = PROMPT, seed: int = 1, domain_key: str = "domain", **kwargs: Any) -> Request:
        return Request(prompt, seed, kwargs.pop("settings", settings), domain_key, **kwargs)

    return make


@pytest.fixture(scope="session")
def random_transformer() -> Any:
    """Of Wan's class, with random weights of every kind: two blocks, 28k parameters."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=32,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    ).eval()


@pytest.fixture(scope="session")
def wan_folder(random_transformer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny Wan with random weights as diffusers' pipeline saves it, its text encoder and tokenizer included."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.pipelines.wan.pipeline_wan import WanPipeline
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.set_num_threads(1)  # as Engine.load does: on matrices this small two threads wait for each other
    torch.manual_seed(1)
    words = [*("▁" + word for word in f"{PROMPT} fox".split()), *map(chr, range(33, 127)), "▁"]
    pieces = [(word, 0.0) for word in ("<pad>", "</s>", "<unk>")] + [(w, -float(i + 1)) for i, w in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder = tmp_path_factory.mktemp("wan") / "tiny-wan"
    WanPipeline(
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4, pad_token_id=0)
        ),
        vae=AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0),
        transformer=random_transformer,
    ).save_pretrained(folder)
    return folder
