"""Batches side by side, as a person asks for them, on a real Postgres."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from sqlalchemy import Engine, text

from chorus_batch.jobs import queue
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.models import CacheResult

from .conftest import Part, Program, Writer, left, made

RIGHT = {"colour": True, "shape": True}
SHAPELESS = {"colour": True, "shape": False}


@pytest.fixture
def three_ways(writer: Writer, database: Engine) -> None:
    """The same four rows under three policies, with one job of the third batch still waiting."""
    worker = writer.worker("w")

    def run(name: str, policy: str, jobs: list[tuple[int, float, dict[str, bool] | None]], entry: int | None) -> None:
        writer.batch([Part(prompt=f"p{n}", seed=n, policy=policy) for n in range(4)], name)
        for n, (tokens, seconds, scores) in enumerate(jobs):
            with transaction(database) as connection:
                taken = queue.claim(connection, worker)
                assert taken is not None and taken.seed == n
                record = made(taken, tokens_computed=tokens, seconds={"denoise": seconds, "mux": 9.0}, scores=scores)
                if tokens < 400:
                    record = replace(record, cache_result=CacheResult.semantic, entry_id=entry, similarity=0.9)
                queue.finish(connection, taken, record, left(taken))

    run("plain", "none", [(400, 8.0, RIGHT), (400, 8.0, RIGHT), (400, 8.0, SHAPELESS), (400, 8.0, RIGHT)], None)
    with transaction(database) as connection:
        entry = connection.execute(text("SELECT min(id) FROM cache_entries")).scalar_one()
    run("first", "nirvana", [(400, 8.0, RIGHT), (240, 5.0, SHAPELESS), (240, 5.0, SHAPELESS), (400, 8.0, RIGHT)], entry)
    run("stages", "chorus", [(400, 8.0, RIGHT), (200, 4.0, RIGHT), (160, 4.0, RIGHT)], entry)


@pytest.mark.usefixtures("three_ways")
def test_batches_side_by_side(program: Program) -> None:
    table = program("compare", "plain", "first", "3")
    cells = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines()]
    assert cells[0] == ["plain (1)", "first (2)", "stages (3)"]
    assert cells[1:] == [
        ["policy", "none", "nirvana", "chorus"],
        ["jobs matched", "3 of 4", "3 of 4", "3 of 4"],
        ["hit rate", "0.0 %", "66.7 %", "66.7 %"],
        ["forward tokens", "1200", "880", "760"],
        ["of the baseline's", "100.0 %", "73.3 %", "63.3 %"],
        ["denoise seconds", "24.00", "18.00", "16.00"],
        ["speed-up", "1.00x", "1.33x", "1.50x"],
        ["on hits", "-", "1.60x", "2.00x"],
        ["attributes right", "66.7 %", "33.3 %", "100.0 %"],
        ["on hits", "-", "0.0 %", "100.0 %"],
        ["baseline on these", "-", "50.0 %", "50.0 %"],
        ["spoiled of hits", "-", "50.0 %", "0.0 %"],
        ["mended of hits", "-", "0.0 %", "50.0 %"],
    ]
    assert program("compare", "3", "first", "-q").split() == ["3", "2"]
    found = json.loads(program("compare", "plain", "first", "stages", "--json"))
    assert (found["schema_version"], found["baseline"], found["matched"]) == (1, 1, 3)
    plain, _, stages = found["batches"]
    assert plain["accuracy_hits"] is None and plain["attributes"] == {"colour": 1.0, "shape": pytest.approx(2 / 3)}
    assert (stages["batch_id"], stages["batch"], stages["policies"]) == (3, "stages", ["chorus"])
    assert stages["speedup"] == 1.5 and stages["attributes_hits"] == {"colour": 1.0, "shape": 1.0}


@pytest.mark.usefixtures("three_ways")
def test_what_cant_be_compared(program: Program, writer: Writer) -> None:
    assert "there is no batch 'nothing'" in program("compare", "plain", "nothing", code=4)
    assert "two batches or more" in program("compare", "plain", code=2)
    writer.batch([Part(prompt="p0", seed=0)], "waiting")
    assert "batch 4 (waiting) has no finished job" in program("compare", "plain", "waiting", code=2)
