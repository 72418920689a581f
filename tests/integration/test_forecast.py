"""estimate and report: what they read from the database, and that they write nothing into it."""

from __future__ import annotations

import json
import time
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from chorus_batch.jobs import queue
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.models import CacheResult

from .conftest import Part, Program, Writer, left, made

CATALOG = str(resources.files("chorus_batch.jobs") / "examples" / "catalog.csv")
TOKENS = 200 * 20


def counts(database: Engine) -> dict[str, int]:
    with transaction(database) as connection:
        query = "SELECT (SELECT count(*) FROM batches) AS batches, (SELECT count(*) FROM jobs) AS jobs"
        return dict(connection.execute(text(query)).one()._mapping)


def told(output: str) -> Any:
    return json.loads(output)


def finish_all(writer: Writer, database: Engine, limit: int = 10**6) -> int:
    """Take a worker's part: every job plainly computed at 1 ms a token and half a second beside, duplicates linked."""
    worker, count = writer.worker(f"worker {time.monotonic()}"), 0
    while count < limit:
        with transaction(database) as connection:
            claim = queue.claim(connection, worker)
            if claim is None:
                break
            times = {
                "tokens_total": TOKENS,
                "tokens_computed": TOKENS,
                "seconds": {"denoise": 4.0, "decode": 0.25, "mux": 0.1},
            }
            record = made(claim, seconds_total=4.5, **times)
            if claim.role.value == "duplicate":
                record = made(claim, cache_result=CacheResult.exact, origin_job_id=claim.source_job_id, steps_computed=0,
                              tokens_total=TOKENS, tokens_computed=0, seconds={}, seconds_total=0.25)  # fmt: skip
            queue.finish(connection, claim, record, left(claim) if claim.role.value == "source" else None)
            count += 1
    return count


def test_an_estimate_plans_and_stores_nothing(program: Program, database: Engine) -> None:
    found = told(program("estimate", CATALOG, "--json", "--workers", "2", "--gpu-price", "3"))
    assert counts(database) == {"batches": 0, "jobs": 0}
    assert (found["rows"], found["workers"], found["duplicates"]) == (24, 2, 1)
    assert found["sources"] + found["followers"] + found["duplicates"] == 24
    assert found["ranges"]["hits"]["expected"] == 24 - found["sources"]
    assert 0 < found["steps_skipped"] < found["steps_total"] == 24 * 20
    for name, one in found["ranges"].items():
        assert one["low"] <= one["expected"] <= one["high"], name
    assert found["ranges"]["cost"]["expected"] == pytest.approx(3 * found["ranges"]["gpu_hours"]["expected"])
    assert "shipped" in found["basis"][0]
    # The same figures before a submit, and stored with it.
    planned = told(program("submit", CATALOG, "--dry-run", "--json"))["forecast"]
    program("submit", CATALOG, "--deadline", "yesterday", code=2)
    program("submit", CATALOG, "--name", "night", "--max-gpu-hours", "2", "--deadline", "8h")
    with transaction(database) as connection:
        limits = connection.execute(text("SELECT max_seconds, deadline - now() AS left FROM batches")).one()
        assert limits.max_seconds == 7200 and 28000 < limits.left.total_seconds() < 28800
        stored = connection.execute(text("SELECT plan FROM batches")).scalar_one()
    for one in (planned, stored):
        assert {name: one[name] for name in ("sources", "steps_skipped", "basis")} == {
            name: found[name] for name in ("sources", "steps_skipped", "basis")
        }
        assert one["ranges"]["gpu_hours"] == found["ranges"]["gpu_hours"]
    # What is submitted may be estimated again, by its file or by its name.
    assert told(program("estimate", CATALOG, "--json"))["rows"] == 24
    again = told(program("estimate", "night", "--json"))
    assert {name: again[name] for name in planned if name not in ("ranges",)} == {
        name: planned[name] for name in planned if name not in ("ranges",)
    }
    assert again["ranges"]["hits"]["expected"] == found["ranges"]["hits"]["expected"]


def test_seconds_come_from_traces_once_there_are_any(program: Program, database: Engine, writer: Writer) -> None:
    program("submit", CATALOG, "--name", "first")
    assert finish_all(writer, database) == 24
    found = told(program("estimate", CATALOG, "--json", "--set", "seed=99", "--policy", "none"))
    assert "23 traces" in found["basis"][0] and found["made_before"] == 0
    # Another policy is another domain, of the same model and size: what a token takes is the same.
    assert found["sources"] + found["duplicates"] == 24 and found["followers"] == 0
    computed, linked = found["sources"], found["duplicates"]
    hours = found["ranges"]["gpu_hours"]
    assert hours["expected"] == pytest.approx((computed * 4.5 + linked * 0.25) / 3600)
    assert hours["low"] == pytest.approx(hours["high"])  # all took as long
    assert found["ranges"]["wall_seconds"]["expected"] == pytest.approx(computed * 4.25)
    assert found["ranges"]["bytes"]["expected"] == computed * 2


def test_rows_that_were_made_before_are_links(program: Program, database: Engine, writer: Writer) -> None:
    program("submit", CATALOG, "--name", "first")
    finish_all(writer, database)
    found = told(program("estimate", CATALOG, "--json"))  # the file has seeds: the very same requests
    assert found["made_before"] == 24 and found["ranges"]["hits"]["expected"] == 24
    assert found["steps_skipped"] == found["steps_total"] and found["ranges"]["bytes"]["expected"] == 0
    assert told(program("estimate", CATALOG, "--json", "--cache", "off"))["made_before"] == 0


def test_of_a_batch_what_is_left_is_estimated(program: Program, database: Engine, writer: Writer) -> None:
    program("submit", CATALOG, "--name", "night")
    whole = told(program("estimate", "night", "--json"))
    finish_all(writer, database, limit=10)
    left_over = told(program("estimate", "night", "--json", "--workers", "3"))
    assert (whole["rows"], left_over["rows"], left_over["workers"]) == (24, 14, 3)
    finish_all(writer, database)
    assert told(program("estimate", "night", "--json"))["rows"] == 0
    assert "there is no file and no batch 'day'" in program("estimate", "day", code=4)


def test_long_prompts_are_estimated_and_named(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("prompt\n" + "a red circle moves right over a black background " * 9 + "\n")
    program("submit", str(path), "--dry-run", code=3)
    assert told(program("estimate", str(path), "--json"))["rows"] == 1


def test_a_report_compares(program: Program, database: Engine, writer: Writer) -> None:
    program("submit", CATALOG, "--name", "night")
    early = told(program("report", "night", "--json"))
    assert (early["done"], early["figures"]["hits"]["deviation"]) == (0, None)
    finish_all(writer, database)
    found = told(program("report", "night", "--json"))
    assert (found["done"], found["over"], found["workers"], found["bytes"]) == (24, True, 1, 46 + found["entry_bytes"])
    # This "worker" computed every follower in full.
    hits = found["figures"]["hits"]
    assert (hits["fact"], hits["within"]) == (1, False)
    assert hits["deviation"] == pytest.approx(1 / hits["expected"] - 1)
    assert found["figures"]["gpu_hours"]["fact"] == pytest.approx((23 * 4.5 + 0.25) / 3600)
    table = program("report", "night")
    assert "out of range" in table and "DEVIATION" in table
    assert "unknown" not in program("estimate", "night")


def test_a_batch_from_before_forecasts_were_stored(program: Program, writer: Writer) -> None:
    writer.batch([Part()], "old")
    found = told(program("report", "old", "--json"))
    assert all(one["expected"] is None for one in found["figures"].values())
    assert "unknown" in program("report", "old")
