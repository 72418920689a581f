"""One engine for all tests of the package (loading takes seconds), and a tiny random transformer."""

from __future__ import annotations

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
