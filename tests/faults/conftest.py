"""A bench for each fault test, and workers at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chorus_batch.jobs import costs
from chorus_batch.jobs.database import connect
from chorus_batch.jobs.settings import Settings
from tests.faults.bench import Bench, Worker, hiring


def impatient(settings: Settings) -> Settings:
    """Settings under which a fault is noticed in tenths of seconds."""
    return replace(settings, device="cpu", heartbeat_interval=0.1, lease=5.0, poll_interval=0.1)


@pytest.fixture
def bench(
    migrated_url: str, store_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    # Plans of the shipped costs: on a busy machine what a few small jobs took may say that reuse doesn't pay.
    monkeypatch.setattr(costs, "FEWEST", 10**9)
    settings = impatient(replace(store_settings, database_url=migrated_url))
    engine = connect(migrated_url)
    made = Bench(settings, engine, tmp_path)
    made.store.ensure_bucket()
    yield made
    engine.dispose()


@pytest.fixture
def hire(bench: Bench) -> Iterator[Callable[..., Worker]]:
    """Makes workers at the bench; keywords change their settings."""
    with hiring(bench.settings) as hire:
        yield hire
