"""The worker beside `submit --wait`: where none could run, the command says so before it stores anything."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from chorus_batch.jobs import leases
from chorus_batch.jobs.companion import worker_if_alone
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.settings import Settings

from .conftest import Writer


def test_a_worker_that_cant_run_isnt_started(database: Engine, servers: Settings, tmp_path: Path) -> None:
    settings = replace(servers, data_dir=tmp_path, differ=f"llm:{tmp_path}/gone")
    with pytest.raises(SettingsError, match="gone holds no language model"), worker_if_alone(settings, database):
        raise AssertionError("the block was entered")
    assert not (tmp_path / "log").exists()


def test_a_worker_elsewhere_is_enough(
    database: Engine, servers: Settings, writer: Writer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody is refused for what this host lacks while another one works; when that ends it is told, and waited on."""
    settings = replace(servers, data_dir=tmp_path, differ=f"llm:{tmp_path}/gone", poll_interval=0.05)
    worker = writer.worker("elsewhere")
    said = ""
    with worker_if_alone(settings, database):
        with transaction(database) as connection:
            leases.leave(connection, worker)
        end = time.monotonic() + 30
        while "no worker can be started here" not in said and time.monotonic() < end:
            time.sleep(0.05)
            said += capfd.readouterr().err
    assert "gone holds no language model" in said and "CHORUS_DIFFER" in said
