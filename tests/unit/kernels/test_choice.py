"""Who computes: the reference on a CPU, without triton and for what has no program; the program elsewhere."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses import FakeTensorMode

from chorus_batch.kernels.choice import takes_triton

CALLS = """
import sys, torch
from chorus_batch.kernels import gain, modulate, rope
x, table, row = torch.ones(1, 7, 2, 4), torch.ones(1, 7, 1, 4), torch.ones(1, 1, 4)
rope.rope(x, table, table), modulate.modulate(x[:, :, 0], row, row, 1e-6), gain.key_gain(x[:, :, 0], [3], 2.0)
assert not {"triton", "diffusers", "chorus_batch.kernels.programs"} & set(sys.modules)
sys.modules["triton"] = None  # as if it weren't installed
try:
    rope.rope(x, table, table, triton=True)
except ImportError as error:
    assert "triton" in str(error)
else:
    raise AssertionError("computed without triton")
"""


def test_on_the_cpu_nothing_loads_triton_and_a_forced_program_says_when_it_is_missing() -> None:
    subprocess.run([sys.executable, "-c", CALLS], check=True)


def test_what_is_asked_for_is_taken() -> None:
    assert takes_triton(True, torch.ones(1))
    assert not takes_triton(False, torch.ones(1))
    assert not takes_triton(None, torch.ones(1))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_on_cuda_programs_take_what_they_can_compute() -> None:
    with FakeTensorMode():
        half, whole = (torch.ones(1, dtype=d, device="cuda") for d in (torch.bfloat16, torch.float32))
        assert takes_triton(None, half, whole)
        assert not takes_triton(False, half, whole)
        assert not takes_triton(None, half, whole.double())
        assert not takes_triton(None, half, whole.clone().requires_grad_())
