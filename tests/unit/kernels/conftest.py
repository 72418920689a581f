"""Triton's interpreter, in a process of its own: it must be chosen before triton is imported, and diffusers imports it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
import torch

Run = Callable[..., torch.Tensor]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Runs an operation's Triton program on the CPU: interpreted(rope, x, cos, sin)."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(int).result()  # starts the process

        def run(operation: Run, *arguments: Any) -> torch.Tensor:
            return pool.submit(operation, *arguments, triton=True).result()

        yield run


@pytest.fixture
def seed() -> int:
    """A fresh seed, already set; pytest shows it where a test fails."""
    seed = random.randrange(2**32)
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)
    return seed
