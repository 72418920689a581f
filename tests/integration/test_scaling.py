"""The query by which KEDA starts and stops workers, on the real schema."""

from __future__ import annotations

from pathlib import Path

import yaml
from sqlalchemy import Engine, text

from chorus_batch.jobs import queue
from chorus_batch.jobs.database import transaction

from .conftest import Part, Writer

FILE = Path(__file__).parents[2] / "docker" / "kubernetes" / "scaling.yaml"


def wanted(database: Engine) -> int:
    """What the query says: jobs for which there should be workers."""
    (scaled,) = [document for document in yaml.safe_load_all(FILE.read_text()) if document["kind"] == "ScaledObject"]
    (trigger,) = scaled["spec"]["triggers"]
    with transaction(database) as connection:
        return int(connection.execute(text(trigger["metadata"]["query"])).scalar_one())


def test_the_query_counts_what_workers_are_needed_for(database: Engine, writer: Writer) -> None:
    assert wanted(database) == 0
    writer.batch([Part(), Part(), Part(source=0)])
    assert wanted(database) == 2  # the follower waits for its source: no worker could take it
    with transaction(database) as connection:
        taken = queue.claim(connection, writer.worker("w"))
    assert taken is not None and wanted(database) == 2  # a busy worker isn't taken away
    with transaction(database) as connection:
        queue.fail(connection, taken, "video", "broken", retry=True, max_failures=3)
    assert wanted(database) == 1  # it is tried again later, not now
    with transaction(database) as connection:
        connection.execute(text("UPDATE queue SET state = 'paused' WHERE state = 'ready'"))
    assert wanted(database) == 0
