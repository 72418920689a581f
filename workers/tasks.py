"""The wake-up: claim and run until nothing is left."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from chorus_batch.jobs.dispatch import MAKE_MASKS, WAKE
from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.local.process import Process
from chorus_batch.jobs.settings import Settings
from chorus_batch.workers.app import app
from chorus_batch.workers.phases import Phases
from chorus_batch.workers.runtime import Runtime

if TYPE_CHECKING:  # it brings torch, which Celery's parent process must not load
    from chorus_batch.workers.mask_maker import MaskMaker
    from chorus_batch.workers.pipeline import Pipeline

log = logging.getLogger(__name__)

LONGEST_PAUSE = 30.0  # seconds between tries while a server is away

_runtime: Runtime | None = None
_pipeline: Pipeline | None = None
_mask_maker: MaskMaker | None = None


def enter(settings: Settings) -> None:
    """Called once in the process that will hold the model."""
    global _runtime
    _runtime = Runtime(settings, slot=_slot())
    _runtime.preload()


def _slot() -> str:
    """Names the Celery parent: it has one child at a time and replaces one that died.

    With its start and boot, for in two containers of one host both parents may have the same id and host name.
    """
    parent = Process.find(os.getppid())
    started = f":{parent.boot}:{parent.started}" if parent is not None else ""
    return f"{socket.gethostname()}:{os.getppid()}{started}"


def leave() -> None:
    """Called when that process ends in good order."""
    if _runtime is not None:
        _runtime.close()


@app.task(name=WAKE)
def wake() -> None:
    """Claim and run jobs until none is ready or the worker is told to stop."""
    global _pipeline
    assert _runtime is not None
    with _stop_on_sigterm(_runtime):
        _runtime.start()
        _runtime.preloaded()
        if _pipeline is None:
            from chorus_batch.workers.pipeline import Pipeline

            _pipeline = Pipeline(_runtime)
        work(_runtime, _pipeline)


@app.task(name=MAKE_MASKS)
def make_masks() -> None:
    """Make the masks that the next followers will ask for. This process never enters the list of workers: it runs no
    jobs, and who waits for a worker mustn't wait for it.
    """
    global _mask_maker
    assert _runtime is not None
    with _stop_on_sigterm(_runtime):
        _runtime.preloaded()
        if _mask_maker is None:
            from chorus_batch.workers.mask_maker import MaskMaker

            _mask_maker = MaskMaker(_runtime)
        try:
            _mask_maker.work()
        except DependencyDown as error:
            # The supervisor rings again, as long as there is work.
            log.warning("%s", error)


def work(runtime: Runtime, pipeline: Pipeline) -> None:
    """Claim and run until nothing is ready. A server that is away is waited for; the jobs stay where they are."""
    pause = 0.5
    while not runtime.stopping.is_set():
        phases = Phases()
        try:
            claim = pipeline.claim(phases)
            if claim is not None:
                pipeline.run(claim, phases)
            elif not pipeline.drain():
                # What was being published may have freed followers: only then is the queue really empty.
                return
            pause = 0.5
        except DependencyDown as error:
            log.warning("%s; trying again in %.1f s", error, pause)
            runtime.stopping.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
    pipeline.drain()


@contextlib.contextmanager
def _stop_on_sigterm(runtime: Runtime) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        log.info("told to stop")
        runtime.stopping.set()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
