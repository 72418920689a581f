"""Which path an operation takes: the Triton program or the torch reference."""

from __future__ import annotations

from functools import cache
from importlib import import_module

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes_triton(asked: bool | None, *tensors: torch.Tensor) -> bool:
    """`asked` where it's given; else whether the tensors are on CUDA, a program can serve them, and triton is there.

    The programs compute in float32 and have no backward pass: doubles and gradients are the reference's. So is what
    torch.compile traces: it makes programs of its own from the reference, over more than one operation.
    """
    if asked is not None:
        return asked
    if torch.compiler.is_compiling() or not tensors[0].is_cuda:
        return False
    return all(t.dtype in DTYPES and not t.requires_grad for t in tensors) and _installed()


@cache
def _installed() -> bool:
    try:
        import_module("triton.language")
    except ImportError:
        return False
    return True
