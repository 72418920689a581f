"""What nvidia-smi says, and what doctor makes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from chorus_batch.jobs import doctor, registry
from chorus_batch.jobs.devices import Gpu, gpus
from chorus_batch.jobs.registry import Asked
from chorus_batch.jobs.settings import Settings


@pytest.fixture
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program of nvidia-smi's name first that prints this."""

    def put(script: str) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return put


def test_gpus_by_index(listing: Callable[[str], None]) -> None:
    listing("echo '0, NVIDIA H200, 143771'; echo '1, Jetson, [N/A]'; echo '2, NVIDIA L4, 23034'")
    assert gpus() == [Gpu("0", "NVIDIA H200", 143771 << 20), Gpu("2", "NVIDIA L4", 23034 << 20)]
    assert [gpu.index for gpu in gpus("2, 1")] == ["2"]
    assert gpus("") == []
    assert gpus("GPU-8f3a") == gpus()
    listing("echo 'NVIDIA-SMI has failed'; exit 9")
    assert gpus() == []


def test_doctor_tells_whether_the_model_fits(
    listing: Callable[[str], None], wan_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path / "data", model="tiny")
    registry.add(settings, Asked("tiny", str(wan_folder)))
    listing("echo '0, NVIDIA L4, 23034'; echo '1, Toy, 512'")
    found = doctor._memory(settings)
    assert found.ok
    assert "tiny needs about 3." in found.detail
    assert found.detail.endswith("fits on GPU 0 (NVIDIA L4); does not fit on GPU 1 (Toy)")
    listing("echo '0, Toy, 512'")
    found = doctor._memory(settings)
    assert (found.ok, found.hint) == (False, "use a GPU with more memory, or ask for smaller or shorter videos")
    listing("echo '0, NVIDIA L4, 23034'; echo '1, Toy, 512'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert doctor._memory(settings).ok is False
    listing("exit 1")
    assert doctor._memory(settings).ok is None
    assert doctor._memory(Settings(data_dir=tmp_path)).detail == "builtin: fits any device"
