"""Several workers on one host: one process for each GPU, which sees that one alone."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from chorus_batch.jobs.devices import gpus
from chorus_batch.jobs.errors import UsageError

GRACE = 60.0  # seconds that the workers get to end their step and publish what they have
LONGEST_PAUSE = 60.0  # seconds before a worker that ended by itself is started again
SETTLED = 600.0  # seconds after which one that ended had been well

log = logging.getLogger(__name__)


def parse(asked: str, visible: str | None) -> list[str]:
    """GPUs by index as nvidia-smi counts, from `0,1` or `all`: the `visible` ones, or if that is None every one here.

    Raises UsageError.
    """
    if asked.strip() == "all":
        found = [gpu.index for gpu in gpus()] if visible is None else [name.strip() for name in visible.split(",")]
        found = [name for name in found if name]
        if not found:
            raise UsageError(
                "no GPU is visible here", hint="check nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"
            )
        return found
    names = [name.strip() for name in asked.split(",")]
    if not all(re.fullmatch(r"\d+", name) for name in names) or len(set(names)) < len(names):
        raise UsageError(f"--gpus is {asked!r}", hint="use all, or different indices like 0,1")
    return names


def environment_of(gpu: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the worker on that GPU, whose only device it is. By bus, as nvidia-smi counts."""
    return {**environ, "CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CHORUS_DEVICE": "cuda"}


class Fleet:
    """Keeps one process for each GPU until it is told to stop. Processes are new ones, never forks: CUDA forbids it."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environ: Mapping[str, str], pause: float = 1.0) -> None:
        """`commands` by GPU. A process that ends is started again after `pause` seconds, and longer each time."""
        self._members = [
            _Member(gpu, command, environment_of(gpu, environ), pause) for gpu, command in commands.items()
        ]
        self._stopping = threading.Event()

    def run(self, grace: float = GRACE) -> None:
        """Until SIGTERM or SIGINT, in the main thread; then the processes end in good order, or are killed."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self._stopping.is_set():
                for member in self._members:
                    member.look()
                self._stopping.wait(0.5)
        finally:
            for member in self._members:
                member.ask_to_end()
            until = time.monotonic() + grace
            for member in self._members:
                member.end(until)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping.set()


class _Member:
    def __init__(self, gpu: str, command: Sequence[str], environ: Mapping[str, str], pause: float) -> None:
        self._gpu, self._command, self._environ = gpu, command, environ
        self._least = self._pause = pause
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._again = 0.0  # when it is started next

    def look(self) -> None:
        """Start the process if it doesn't run and its pause is over."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            if now - self._started > SETTLED:
                self._pause = self._least
            code, self._process = self._process.returncode, None
            print(f"the worker on GPU {self._gpu} ended by itself with code {code}", file=sys.stderr)
            self._again, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)
        if self._process is None and now >= self._again:
            # A session of its own: Ctrl-C reaches this process alone, which then stops the workers in good order.
            self._process = subprocess.Popen(self._command, env=dict(self._environ), start_new_session=True)
            self._started = now

    def ask_to_end(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def end(self, until: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("the worker on GPU %s is killed", self._gpu)
            self._process.kill()
            self._process.wait()
