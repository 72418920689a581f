"""The GPUs of this host, as NVIDIA's own program lists them: without torch."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

QUERY = ["--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]


@dataclass(frozen=True)
class Gpu:
    """One device; `memory` in bytes."""

    index: str
    name: str
    memory: int


def gpus(visible: str | None = None) -> list[Gpu]:
    """The GPUs here, none where nvidia-smi is missing or fails; of indices, as CUDA_VISIBLE_DEVICES lists them, those.

    Names of another kind (UUIDs, MIG) aren't looked for: then it is every GPU.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *QUERY], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    every = [found for line in done.stdout.splitlines() if (found := _gpu(line)) is not None]
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    if names is None or not all(map(str.isdigit, names)):
        return every
    return [gpu for gpu in every if gpu.index in names]


def _gpu(line: str) -> Gpu | None:
    parts = [part.strip() for part in line.split(",")]
    # A device that is lost, or has no memory of its own, has no number there.
    if len(parts) != 3 or not parts[2].isdigit():
        return None
    return Gpu(parts[0], parts[1], int(parts[2]) << 20)
