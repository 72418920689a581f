"""How many threads numpy's own matrix products use.

Blocks that are worked on side by side, each with products of its own, are best served by products of one thread:
with more, the threads of one product wait for each other while another one has the processor (measured on two cores
shared with another program: 8 s instead of 2). numpy has no call for that; its OpenBLAS has, and is asked directly.
Another BLAS is left as it is, which costs time and nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Products inside use one thread, in the whole process; afterwards as many as before."""
    found = _openblas()
    if found is None:
        yield
        return
    read, write = found
    before = read()
    write(1)
    try:
        yield
    finally:
        write(before)


@cache
def _openblas() -> tuple[Any, Any] | None:
    """Functions that read and set its number of threads; None if numpy doesn't bring an OpenBLAS that is known."""
    package = Path(np.__file__).parent
    for path in [*package.parent.glob("numpy.libs/*openblas*"), *package.glob(".dylibs/*openblas*")]:
        try:
            library = ctypes.CDLL(str(path))  # numpy has loaded it: this is the same one
        except OSError:
            continue
        for name in ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads"):
            if hasattr(library, name.format("set")) and hasattr(library, name.format("get")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None
