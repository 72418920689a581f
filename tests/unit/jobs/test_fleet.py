"""One process for each GPU: what each sees, how they end, and that one that dies comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.fleet import environment_of, parse

# Writes what it sees under its process id, and waits to be told to end.
WORKER = """
    import os, pathlib, signal, sys, time
    folder = pathlib.Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: (folder.joinpath(f"{os.getpid()}.ended").touch(), sys.exit(0)))
    seen = " ".join(os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CHORUS_DEVICE"))
    fresh = folder / f"{os.getpid()}.new"
    fresh.write_text(seen)
    fresh.rename(folder / f"{os.getpid()}.seen")
    time.sleep(60)
"""
FLEET = """
    import os, sys
    from chorus_batch.jobs.fleet import Fleet
    Fleet({gpu: [sys.executable, "-c", sys.argv[2], sys.argv[1]] for gpu in ("0", "3")}, os.environ, 0.1).run()
"""


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_each_process_sees_its_own_gpu_and_comes_back(tmp_path: Path, number: int) -> None:
    script = [sys.executable, "-c", textwrap.dedent(FLEET), str(tmp_path), textwrap.dedent(WORKER)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,3"}
    fleet = subprocess.Popen(script, env=environ, stderr=subprocess.PIPE, text=True)

    def seen() -> dict[int, str]:
        return {int(path.stem): path.read_text() for path in tmp_path.glob("*.seen")}

    try:
        until(lambda: len(seen()) == 2)
        first = seen()
        assert sorted(first.values()) == ["0 PCI_BUS_ID cuda", "3 PCI_BUS_ID cuda"]
        victim = next(pid for pid, said in first.items() if said.startswith("3"))
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(seen()) == 3)
        (again,) = seen().keys() - first.keys()
        assert seen()[again] == "3 PCI_BUS_ID cuda"
    finally:
        fleet.send_signal(number)
        _, said = fleet.communicate(timeout=30)
    assert fleet.returncode == 0
    assert said == "the worker on GPU 3 ended by itself with code -9\n"
    assert {int(path.stem) for path in tmp_path.glob("*.ended")} == (first.keys() | {again}) - {victim}


def test_gpus_by_list() -> None:
    assert parse("0, 2", None) == ["0", "2"]
    assert parse("all", "1,GPU-8f3a") == ["1", "GPU-8f3a"]
    for wrong in ("", "0,0", "cuda:1", "-1", "0,"):
        with pytest.raises(UsageError, match="--gpus is"):
            parse(wrong, None)
    with pytest.raises(UsageError, match="no GPU is visible"):
        parse("all", "")
    assert environment_of("1", {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == "1"
