"""The Celery application. A message only wakes a worker; what there is to do stands in Postgres.

Start it with `--pool prefork --pool-start-method spawn --concurrency 1`, one for each device: spawn, for CUDA can't be
used in a forked child; prefork, for the parent then survives the death of the process that holds the model. Nothing
here or in what it imports loads torch: the parent never does.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

from celery import Celery, signals

from chorus_batch.jobs.dispatch import MAKE_MASKS, MASK_QUEUE, QUEUE, TRANSPORT_OPTIONS, WAKE
from chorus_batch.jobs.settings import load_settings

settings = load_settings()

app = Celery("chorus_batch", broker=settings.broker_url, include=["chorus_batch.workers.tasks"])
app.conf.update(
    task_default_queue=QUEUE,
    task_ignore_result=True,
    # Acknowledged before it runs: a lost message costs nothing, a redelivered one would only find no work.
    task_acks_late=False,
    worker_prefetch_multiplier=1,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    broker_transport_options=TRANSPORT_OPTIONS if settings.broker_url.startswith("redis") else {},
    worker_proc_alive_timeout=120.0,
    accept_content=["json"],
    worker_enable_remote_control=False,
    worker_send_task_events=False,
)

log = logging.getLogger(__name__)


@signals.worker_init.connect
def _remember_worker(sender: Any, **_: Any) -> None:
    """Start the reconciler and be ready to pass on a request to stop."""
    from chorus_batch.jobs import mask_work, queue
    from chorus_batch.workers.reconciler import Reconciler

    if MASK_QUEUE in app.amqp.queues.consume_from:
        reconciler = Reconciler(settings, lambda: app.send_task(MAKE_MASKS, queue=MASK_QUEUE), mask_work.any_upcoming)
    else:
        reconciler = Reconciler(settings, lambda: app.send_task(WAKE), queue.ready_exists)

    @signals.worker_ready.connect(weak=False)
    def _start(**_: Any) -> None:
        reconciler.start()

    @signals.worker_shutting_down.connect(weak=False)
    def _stop(**_: Any) -> None:
        reconciler.stop()
        _pass_on_stop(sender)


def _pass_on_stop(worker: Any) -> None:
    """Tell the running job to end at its next step: Celery alone would wait until the whole queue is empty."""
    from celery.worker import state

    pool = getattr(worker.pool, "_pool", None)
    if pool is None or not state.active_requests:
        return
    for process in pool._pool:
        log.info("asking process %s to stop at its next step", process.pid)
        os.kill(process.pid, signal.SIGTERM)


@signals.worker_process_init.connect
def _enter(**_: Any) -> None:
    from chorus_batch.workers import tasks

    tasks.enter(settings)


@signals.worker_process_shutdown.connect
def _leave(**_: Any) -> None:
    from chorus_batch.workers import tasks

    tasks.leave()
