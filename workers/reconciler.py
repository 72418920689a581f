"""Looks after what messages can't: dead workers' jobs, and work that nobody was told of.

Runs in every worker's parent process, so that a batch finishes whatever becomes of the broker's messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from celery.worker import state

from chorus_batch.jobs import leases, queue
from chorus_batch.jobs.database import connect, transaction
from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.settings import Settings

log = logging.getLogger(__name__)


class Reconciler(threading.Thread):
    """Every `poll_interval`: reap expired leases, and wake the own process if it is idle and work is ready."""

    def __init__(self, settings: Settings, wake: Callable[[], object]) -> None:
        super().__init__(name="reconciler", daemon=True)
        self._settings = settings
        self._wake = wake
        self._stopping = threading.Event()

    def run(self) -> None:
        """Until stopped; a server that is away is tried again."""
        engine = connect(self._settings.database_url, pool_size=1)
        while not self._stopping.wait(self._settings.poll_interval):
            try:
                with transaction(engine) as connection:
                    reaped = leases.reap(connection, lease=self._settings.lease, max_deaths=self._settings.max_deaths)
                    idle = not state.active_requests and not state.reserved_requests
                    work = idle and queue.ready_exists(connection)
                if reaped.requeued or reaped.quarantined:
                    log.warning("dead workers: %d jobs requeued, %d quarantined", reaped.requeued, reaped.quarantined)
                if work:
                    self._wake()
            except DependencyDown as error:
                log.warning("%s", error)
            except Exception:
                # This thread is the safety net: whatever happened now must not take it away.
                log.exception("reconciler")
        engine.dispose()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()
