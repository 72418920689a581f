"""One engine for all tests of the package: loading takes seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.engine import Engine
from chorus_batch.chorus.request import Request

PROMPT = "a red circle moves left over a gray background"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """For the whole process: results depend on the number of threads in the last bit, also those that the engine keeps
    (text features), and these tensors are so small that threads only wait for each other."""
    torch.set_num_threads(1)


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
