"""Worker processes: how one is started, and the one that `submit --wait` runs beside itself."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine

from chorus_batch.jobs import leases
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.settings import Settings, child_environment

GRACE = 30.0  # seconds that a worker gets to end its step and publish what it has


def worker_command(settings: Settings, *, name: str, log_level: str = "info") -> list[str]:
    """The command line of one worker: a Celery parent and one spawned process that holds the device."""
    return [
        sys.executable,
        "-m",
        "celery",
        "--app",
        "chorus_batch.workers.app",
        "--quiet",
        "worker",
        "--pool",
        "prefork",
        "--pool-start-method",
        "spawn",
        "--concurrency",
        "1",
        "--without-gossip",
        "--without-mingle",
        "--hostname",
        f"{name}@{socket.gethostname()}",
        "--loglevel",
        log_level,
    ]


def worker_environment(settings: Settings) -> dict[str, str]:
    """The environment that a worker is started in: the settings, and nothing that phones home."""
    environment = child_environment(settings)
    environment.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    environment.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # Celery warns about root at every start; the local profile of a bare machine often is.
    environment.setdefault("C_FORCE_ROOT", "1")
    return environment


@contextlib.contextmanager
def worker_if_alone(settings: Settings, engine: Engine) -> Iterator[None]:
    """In the local profile, run a worker for as long as the block lasts, unless one is alive already."""
    with transaction(engine) as connection:
        alive = leases.live_workers(connection, settings.lease)
    if settings.profile != "local" or alive:
        yield
        return
    log = settings.data_dir / "log" / f"worker-{os.getpid()}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            worker_command(settings, name=f"wait-{os.getpid()}"),
            env=worker_environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Its own group: Ctrl-C reaches this command alone, which then stops the worker in good order.
            start_new_session=True,
        )
    try:
        yield
    except BaseException:
        # Nobody waits for its work any more; it gives back what it holds and goes by itself.
        process.terminate()
        raise
    _stop(process, log)


def _stop(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        print(f"the worker ended by itself with code {process.returncode}; see {log}", file=sys.stderr)
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
