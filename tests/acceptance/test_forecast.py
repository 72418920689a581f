"""Forecast and fact of a run of the built-in model, and a run that its budget stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import CATALOG, Cli, Example, run_script


def test_what_the_plan_decides_is_met(local: Cli, example: Example) -> None:
    found = local("report", example.batch, "--json").json
    assert (found["done"], found["total"], found["over"]) == (24, 24, True)
    for name in ("hits", "tokens_total"):
        figure = found["figures"][name]
        assert (figure["deviation"], figure["within"]) == (0, True), name
    # A worker may find an entry that bears more than the planned one, and never takes one that bears less.
    assert found["figures"]["steps_skipped"]["within"] and 0 <= found["figures"]["steps_skipped"]["deviation"] <= 0.1
    assert (
        found["figures"]["tokens_computed"]["within"] and -0.1 <= found["figures"]["tokens_computed"]["deviation"] <= 0
    )
    # Every object that the batch added was expected; how large videos are is a guess before the first run.
    assert found["figures"]["latents_bytes"]["deviation"] == pytest.approx(0, abs=0.05)
    assert found["figures"]["entry_bytes"]["deviation"] == pytest.approx(0, abs=0.2)
    assert found["figures"]["gpu_hours"]["fact"] > 0 and found["figures"]["wall_seconds"]["fact"] > 0


def test_the_next_estimate_stands_on_what_was_measured(local: Cli, example: Example) -> None:
    # Other seeds, for the very same requests would be links.
    found = local("estimate", CATALOG, "--set", "steps=4", "--set", "seed=5", "--cache", "exact", "--json").json
    assert "traces of this model at this size" in found["basis"][0]
    assert found["followers"] == 0  # of --cache exact
    fact = local("report", example.batch, "--json").json
    share = found["ranges"]["tokens_computed"]["expected"] / fact["tokens_computed"]
    assert share > 1 and found["ranges"]["gpu_hours"]["expected"] > 0


def test_a_budget_stops_a_run(local: Cli, example: Example, tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    path.write_text("prompt\n" + "".join("a red circle moves right over a black background\n" for _ in range(40)))
    wanted = ["--set", "steps=4", "--cache", "off", "--max-gpu-hours", "0.00001", "--json"]
    ended = run_script("submit", path, "--wait", *wanted, data_dir=example.data_dir)
    assert ended.code == 8, ended.err
    found = ended.json
    assert found["state"] == "budget reached" and found["stopped"] == "budget"
    assert found["done"] >= 1 and found["queued"] >= 30 and found["done"] + found["queued"] == 40
    batch = str(found["batch_id"])
    assert local("wait", batch).code == 8
    assert "GPU hours are spent" in local("resume", batch).err
    assert local("resume", batch, "--max-gpu-hours", "1").out.strip() == str(found["queued"])
    assert local("status", batch, "--json").json["state"] == "running"
    assert local("cancel", batch, "--yes").out.strip() == str(found["queued"])
