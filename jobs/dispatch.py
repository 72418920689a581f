"""The nudge: tells idle workers that there is work. Losing one costs at most a poll interval."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from chorus_batch.jobs.settings import Settings

QUEUE = "chorus-batch"
WAKE = "chorus_batch.wake"
MASK_QUEUE = "chorus-batch-masks"
MAKE_MASKS = "chorus_batch.make_masks"
QUEUES = {"jobs": QUEUE, "masks": MASK_QUEUE}  # by the names that a person gives
# Messages are acknowledged when received, so these only matter for one lost between broker and worker.
TRANSPORT_OPTIONS = {"visibility_timeout": 60, "socket_timeout": 10, "socket_connect_timeout": 5}

log = logging.getLogger(__name__)


def nudge(settings: Settings, workers: int = 1) -> bool:
    """Wake up to `workers` idle workers. A broker that is away is no error: workers look for work by themselves."""

    def send(app: Any, connection: Any) -> None:
        for _ in range(workers):
            app.send_task(WAKE, connection=connection, ignore_result=True, retry=False)

    return _tell(settings, QUEUE, send)


def nudge_for_masks(settings: Settings) -> bool:
    """Wake an idle worker of the masks' queue, if there is one: the same, but one message that waits is enough.

    Else they would pile up where there is no such worker.
    """

    def send(app: Any, connection: Any) -> None:
        queue = app.amqp.queues[MASK_QUEUE](connection.default_channel)
        if queue.queue_declare().message_count == 0:
            app.send_task(MAKE_MASKS, connection=connection, ignore_result=True, retry=False)

    return _tell(settings, MASK_QUEUE, send)


def _tell(settings: Settings, queue: str, send: Callable[[Any, Any], None]) -> bool:
    from celery import Celery
    from kombu.exceptions import OperationalError

    app = Celery("chorus_batch", broker=settings.broker_url)
    app.conf.task_default_queue = queue
    if settings.broker_url.startswith("redis"):
        app.conf.broker_transport_options = TRANSPORT_OPTIONS
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.2, timeout=3)
            send(app, connection)
    except (OperationalError, OSError) as error:
        log.warning("broker: %s; workers will find the work by themselves", error)
        return False
    return True
