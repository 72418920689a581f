"""Looks after what messages can't: dead workers' jobs, and work that nobody was told of.

Runs in every worker's parent process, so that a batch finishes whatever becomes of the broker's messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from celery.worker import state
from sqlalchemy import Connection

from chorus_batch.jobs import leases, limits, queue
from chorus_batch.jobs.database import connect, transaction
from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.settings import Settings

log = logging.getLogger(__name__)


class Reconciler(threading.Thread):
    """Every `poll_interval`: reap expired leases, stop batches at their limits, wake the own process for work."""

    def __init__(
        self,
        settings: Settings,
        wake: Callable[[], object],
        has_work: Callable[[Connection], bool] = queue.ready_exists,
    ) -> None:
        """`has_work`: whether the own process has anything to do."""
        super().__init__(name="reconciler", daemon=True)
        self._settings = settings
        self._wake = wake
        self._has_work = has_work
        self._stopping = threading.Event()
        self._blind_until = 0.0  # of time.monotonic

    def run(self) -> None:
        """Until stopped; a server that is away is tried again."""
        engine = connect(self._settings.database_url, pool_size=1)
        while not self._stopping.wait(self._settings.poll_interval):
            try:
                with transaction(engine) as connection:
                    reaped = self._reap(connection)
                    limits.enforce(connection)
                    idle = not state.active_requests and not state.reserved_requests
                    work = idle and self._has_work(connection)
                if reaped.requeued or reaped.quarantined:
                    log.warning("dead workers: %d jobs requeued, %d quarantined", reaped.requeued, reaped.quarantined)
                if work:
                    self._wake()
            except DependencyDown as error:
                log.warning("%s", error)
                self._blind_until = time.monotonic() + self._settings.lease
            except Exception:
                # This thread is the safety net: whatever happened now must not take it away.
                log.exception("reconciler")
        engine.dispose()

    def _reap(self, connection: Connection) -> leases.Reaped:
        if time.monotonic() < self._blind_until:
            # While the database was away nobody could give a sign of life: everyone gets a lease to do so.
            return leases.Reaped(requeued=0, quarantined=0)
        return leases.reap(connection, lease=self._settings.lease, max_deaths=self._settings.max_deaths)

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stopping.set()
