"""Every night the same file with a few changes: only what changed is computed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorus_batch.jobs.settings import Settings

from .conftest import SCRIPT, Cli

NIGHTLY = (
    "--new",
    "--seed-policy",
    "hash",
    "--set",
    "steps=4",
    "--wait",
    "--deadline",
    "1h",
)  # as in docker/, and short

FIRST = """id,prompt
fox,a red circle moves left over a black background
car,a blue square moves right over a white background
sea,a green ring moves up over a grey background
"""
# A new row on top, one row changed, two unchanged ones that changed places.
SECOND = """id,prompt
new,a purple triangle moves down over a black background
sea,a green ring moves up over a grey background
car,a yellow square moves right over a white background
fox,a red circle moves left over a black background
"""


@pytest.fixture
def worker(production: Cli, store_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One worker for all the nights, with a bucket of its own: objects of this database's batch 1 are no one else's."""
    monkeypatch.setenv("CHORUS_S3_BUCKET", store_settings.s3_bucket)
    production("db", "check")
    process = subprocess.Popen(
        [SCRIPT, "worker", "start"], env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    yield
    process.terminate()
    process.wait(60)


def night(production: Cli, file: Path, text: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What a night's command says, and the manifest of its batch by row id."""
    file.write_text(text)
    folder = file.with_name(f"videos-{len(list(file.parent.iterdir()))}")
    ended = production("submit", file, *NIGHTLY, "-o", folder, "--json")
    assert ended.code == 0, ended.err
    rows = production("jobs", str(ended.json["batch_id"]), "--json").objects
    manifest = {path.stem.split("-")[0]: path.read_bytes() for path in folder.glob("*.mp4")}
    return ended.json, {row["id"]: row | {"video": manifest[row["id"]]} for row in rows}


@pytest.mark.usefixtures("worker")
def test_rows_unchanged_since_an_earlier_night_cost_nothing(production: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompts.csv"
    _, first = night(production, file, FIRST)
    assert {row["cache_result"] for row in first.values()} <= {"miss", "semantic"}

    summary, second = night(production, file, SECOND)
    exact = {name for name, row in second.items() if row["cache_result"] == "exact"}
    assert exact == {"fox", "sea"} and summary["exact_hits"] == 2
    for name in exact:
        assert second[name]["steps_computed"] == 0
        assert second[name]["video"] == first[name]["video"]
    assert all(second[name]["steps_computed"] > 0 for name in ("new", "car"))
    assert second["car"]["video"] != first["car"]["video"]

    summary, third = night(production, file, SECOND)  # nobody changed anything
    assert {row["cache_result"] for row in third.values()} == {"exact"} and summary["exact_hits"] == 4
    assert summary["steps_skipped"] == summary["steps_total"]
