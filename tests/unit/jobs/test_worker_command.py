"""worker start: which queue it serves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from chorus_batch.jobs.cli import main
from chorus_batch.jobs.companion import worker_command
from chorus_batch.jobs.dispatch import MASK_QUEUE, QUEUE


def queues(command: list[str]) -> list[str]:
    return command[command.index("--queues") + 1].split(",")


def test_a_worker_runs_jobs_unless_it_is_told_otherwise() -> None:
    assert queues(worker_command(name="worker")) == [QUEUE] != [MASK_QUEUE]
    assert queues(worker_command(name="worker", queue=MASK_QUEUE)) == [MASK_QUEUE]


def test_a_segmenter_without_models_needs_no_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHORUS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process' own stay as they are
    with pytest.raises(SystemExit) as caught:
        main(["worker", "start", "--queue", "masks"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "the segmenter evidence needs no worker of its own" in said and "CHORUS_SEGMENTER=grounded" in said
    assert not any(tmp_path.iterdir())  # before any server was started
