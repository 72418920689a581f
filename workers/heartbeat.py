"""The heartbeat: renews this process's lease and learns which of its claims were taken back."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator

from sqlalchemy import Connection, Engine

from chorus_batch.jobs import leases
from chorus_batch.jobs.claims import Claim
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import DependencyDown

log = logging.getLogger(__name__)


LAST_BEAT = 5.0  # seconds that a beat on its way is waited for before signing off


class Heartbeat(threading.Thread):
    """One worker identity and its claims. If the worker was declared dead it re-enters under a new identity.

    `slot` names the place that this process has for itself: whoever was in it before is dead.
    """

    def __init__(self, engine: Engine, *, slot: str, device: str, interval: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.worker_id = uuid.uuid4().hex
        self._engine = engine
        self._slot = slot
        self._device = device
        self._interval = interval
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._claiming = threading.Lock()
        self._claims: dict[tuple[int, int], float] = {}  # -> when it was made
        self._lost: set[tuple[int, int]] = set()

    def enter(self) -> None:
        """Register this process and start beating."""
        self._register()
        self.start()

    def leave(self) -> None:
        """Stop beating and sign off."""
        self._stopping.set()
        # A beat that overtook the signing off would take it for a declaration of death and enter again.
        self.join(LAST_BEAT)
        try:
            with transaction(self._engine) as connection:
                leases.leave(connection, self.worker_id)
        except DependencyDown as error:
            log.warning("%s", error)

    @contextlib.contextmanager
    def claiming(self) -> Iterator[None]:
        """Surrounds a claim and the `holds` that follows it: between them it isn't a forgotten one."""
        with self._claiming:
            yield

    def holds(self, claim: Claim) -> None:
        """Note a new claim."""
        with self._lock:
            self._claims[claim.job_id, claim.attempt] = time.monotonic()

    def drops(self, claim: Claim) -> None:
        """Note that a claim is over."""
        with self._lock:
            self._claims.pop((claim.job_id, claim.attempt), None)
            self._lost.discard((claim.job_id, claim.attempt))

    def lost(self, claim: Claim) -> bool:
        """Whether a claim was taken back or its job cancelled."""
        return (claim.job_id, claim.attempt) in self._lost

    def run(self) -> None:
        """Until `leave`."""
        while not self._stopping.wait(self._interval):
            try:
                self._beat()
            except DependencyDown as error:
                log.warning("heartbeat: %s", error)
            except Exception:
                # A worker without a heartbeat would lose every job that it finishes.
                log.exception("heartbeat")

    def _beat(self) -> None:
        # Not waited for: a claim that hangs in a slow database mustn't hold the sign of life back.
        settled = self._claiming.acquire(blocking=False)
        try:
            asked = time.monotonic()
            with transaction(self._engine) as connection:
                valid = leases.heartbeat(connection, self.worker_id)
                if settled and valid:
                    self._give_back_forgotten(connection, valid)
        finally:
            if settled:
                self._claiming.release()
        with self._lock:
            # A claim made after the question was asked is not in its answer.
            mine = {key for key, made in self._claims.items() if made < asked}
            self._lost |= mine if valid is None else mine - valid
        if valid is None and not self._stopping.is_set():
            log.error("worker %s was declared dead; entering again", self.worker_id)
            self.worker_id = uuid.uuid4().hex
            self._register()

    def _give_back_forgotten(self, connection: Connection, valid: set[tuple[int, int]]) -> None:
        """Claims that stand in the database while nothing here works on them.

        The database went away while one was made or while its end was told. This worker lives, so no reaper would ever
        take them back.
        """
        with self._lock:
            forgotten = valid - self._claims.keys()
        if forgotten and leases.give_back(connection, self.worker_id, forgotten):
            log.warning("gave back %s: claims that nothing here works on", sorted(forgotten))

    def _register(self) -> None:
        with transaction(self._engine) as connection:
            leases.register(
                connection,
                self.worker_id,
                slot=self._slot,
                host=socket.gethostname(),
                pid=os.getpid(),
                device=self._device,
            )
