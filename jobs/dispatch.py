"""The nudge: tells idle workers that there is work. Losing one costs at most a poll interval."""

from __future__ import annotations

import logging

from chorus_batch.jobs.settings import Settings

QUEUE = "chorus-batch"
WAKE = "chorus_batch.wake"
# Messages are acknowledged when received, so these only matter for one lost between broker and worker.
TRANSPORT_OPTIONS = {"visibility_timeout": 60, "socket_timeout": 10, "socket_connect_timeout": 5}

log = logging.getLogger(__name__)


def nudge(settings: Settings, workers: int = 1) -> bool:
    """Wake up to `workers` idle workers. A broker that is away is no error: workers look for work by themselves."""
    from celery import Celery
    from kombu.exceptions import OperationalError

    app = Celery("chorus_batch", broker=settings.broker_url)
    app.conf.task_default_queue = QUEUE
    if settings.broker_url.startswith("redis"):
        app.conf.broker_transport_options = TRANSPORT_OPTIONS
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.2, timeout=3)
            for _ in range(workers):
                app.send_task(WAKE, connection=connection, ignore_result=True, retry=False)
    except (OperationalError, OSError) as error:
        log.warning("broker: %s; workers will find the work by themselves", error)
        return False
    return True
