"""The program as people run it: the console script in a process of its own, or its `main` in this one."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from chorus_batch.jobs.cli import main
from chorus_batch.jobs.settings import Settings

SCRIPT = Path(sys.executable).with_name("chorus-batch")
CATALOG = Path(str(resources.files("chorus_batch.jobs") / "examples" / "catalog.csv"))


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str
    seconds: float = 0.0

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        (line,) = self.lines
        return json.loads(line)

    @property
    def objects(self) -> list[Any]:
        """JSON Lines on stdout."""
        return [json.loads(line) for line in self.lines]


Cli = Callable[..., Ended]


def _environment(**settings: str) -> dict[str, str]:
    return {**os.environ, **{f"CHORUS_{name.upper()}": value for name, value in settings.items()}}


def run_script(*arguments: str | Path, stdin: str = "", **settings: str) -> Ended:
    """The console script, in a process of its own."""
    began = time.monotonic()
    done = subprocess.run(
        [SCRIPT, *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        input=stdin,
        env=_environment(**settings),
        timeout=240,
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


@dataclass(frozen=True)
class Example:
    """The example catalogue, submitted and made."""

    ended: Ended
    batch: str
    data_dir: str


@pytest.fixture(scope="session")
def example(servers: Settings) -> Example:
    """`submit --wait` of the example, as the README has it but with fewer steps."""
    data_dir = str(servers.data_dir)
    ended = run_script("submit", CATALOG, "--wait", "--set", "steps=4", "--json", data_dir=data_dir)
    assert ended.code == 0, ended.err
    return Example(ended, str(ended.json["batch_id"]), data_dir)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """The program in this process: starting Python and its libraries takes seconds."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str | Path, stdin: bytes = b"") -> Ended:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
            with pytest.raises(SystemExit) as caught:
                main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Ended(int(caught.value.code or 0), out, re.sub(r"\x1b\[[0-9;]*m", "", err))

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def local(example: Example, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Cli:
    """Commands on the servers that made the example."""
    monkeypatch.setenv("CHORUS_DATA_DIR", example.data_dir)
    return cli


@pytest.fixture
def production(servers: Settings, migrated_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Cli:
    """Commands in the production profile, on an empty database."""
    for name in ("broker_url", "s3_endpoint", "s3_access_key", "s3_secret_key"):
        monkeypatch.setenv(f"CHORUS_{name.upper()}", getattr(servers, name))
    monkeypatch.setenv("CHORUS_PROFILE", "production")
    monkeypatch.setenv("CHORUS_DATABASE_URL", migrated_url)
    monkeypatch.setenv("CHORUS_DATA_DIR", str(tmp_path / "data"))
    return cli
