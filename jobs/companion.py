"""Worker processes: how one is started, and the one that `submit --wait` runs beside itself."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from sqlalchemy import Engine

from chorus_batch.jobs import fitness, leases
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.dispatch import QUEUE
from chorus_batch.jobs.errors import DependencyDown, SettingsError, WeightsRejected
from chorus_batch.jobs.settings import Settings, child_environment

GRACE = 30.0  # seconds that a worker gets to end its step and publish what it has
LONGEST_PAUSE = 60.0  # seconds between looks after the own worker

log = logging.getLogger(__name__)


def worker_command(*, name: str, log_level: str = "info", queue: str = QUEUE) -> list[str]:
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
        "--queues",
        queue,
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
    """In the local profile, see to it that a worker is alive for as long as the block lasts; runs one if none is.

    One that is alive at first proves little: it may have been killed a moment ago, or belong to another command that
    ends before this one.
    """
    if settings.profile != "local":
        yield
        return
    companion = _Companion(settings, engine)
    companion.look()
    companion.start()
    try:
        yield
    except BaseException:
        # Nobody waits for its work any more; it gives back what it holds and goes by itself.
        companion.dismiss()
        raise
    companion.stop()


class _Companion(threading.Thread):
    """Looks for a live worker from time to time, and keeps one of its own from the moment that there is none."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(name="companion", daemon=True)
        self._settings = settings
        self._engine = engine
        self._log = settings.data_dir / "log" / f"worker-{os.getpid()}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._checked = False
        self._ended = 0  # own workers that ended by themselves
        self._stopping = threading.Event()

    def look(self) -> None:
        """Start a worker if there is none.

        Raises DependencyDown if the database can't tell, SettingsError and WeightsRejected if none could run here.
        """
        if self._process is not None:
            if self._process.poll() is None:
                return
            code, self._process = self._process.returncode, None
            self._ended += 1
            print(f"the worker ended by itself with code {code}; see {self._log}", file=sys.stderr)
        with transaction(self._engine) as connection:
            alive = leases.live_workers(connection, self._settings.lease)
        if not alive:
            if not self._checked:
                fitness.check(self._settings, worker_environment(self._settings))
                self._checked = True
            self._process = self._launched()

    def run(self) -> None:
        """Until `stop` or `dismiss`; a worker that ends again and again is started more and more seldom."""
        while not self._stopping.wait(min(self._settings.poll_interval * 2**self._ended, LONGEST_PAUSE)):
            try:
                self.look()
            except (DependencyDown, OSError) as error:
                log.warning("can't look after the worker: %s", error)
            except (SettingsError, WeightsRejected) as error:
                # Another host may still have a worker that can.
                self._ended += 1
                print(f"no worker can be started here: {error}\n  {error.hint}", file=sys.stderr)

    def stop(self) -> None:
        """End the own worker in good order."""
        self.dismiss()
        if self._process is not None:
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def dismiss(self) -> None:
        """Ask the own worker to end, without waiting for it."""
        self._stopping.set()
        self.join()
        if self._process is not None:
            self._process.terminate()

    def _launched(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            return subprocess.Popen(
                worker_command(name=f"wait-{os.getpid()}"),
                env=worker_environment(self._settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # Its own group: Ctrl-C reaches this command alone, which then stops the worker in good order.
                start_new_session=True,
            )
