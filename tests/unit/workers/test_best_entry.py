"""Which entry a follower starts from, and what the trace says if it is another one than the plan's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chorus_batch.chorus.config import GenerationSettings
from chorus_batch.chorus.request import Request
from chorus_batch.jobs.claims import Claim, DomainRecord
from chorus_batch.jobs.models import CacheMode, Reuse, Role
from chorus_batch.jobs.neighbours import Neighbour
from chorus_batch.jobs.storage import StoredObject
from chorus_batch.workers.pipeline import best, unplanned

DOMAIN = DomainRecord(1, "k", 1, "m", "f", "float32", 64, 64, 9, 4, 1.0, 1.0, "euler", "", "chorus", "none")
CLAIM = Claim(
    job_id=9,
    attempt=1,
    worker_id="w",
    batch_id=1,
    prompt="p",
    prompt_key=b"p",
    seed=0,
    fps=8,
    reuse=Reuse.auto,
    cache=CacheMode.on,
    role=Role.follower,
    source_job_id=5,
    planned_job_id=5,
    fallback_job_id=None,
    source_entry_id=None,
    similarity=0.8,
    failures=0,
    domain=DOMAIN,
)


def found(job: int, similarity: float) -> Neighbour:
    return Neighbour(10 * job, job, similarity, "q", (1,), StoredObject("o", 1, "s"))


@pytest.mark.parametrize(
    ("job", "similarity", "note"),
    [
        (5, 0.8, []),
        (7, 0.9, ["job 7 is nearer than the planned source, job 5"]),
        # As near: the request was made before, by another job.
        (7, 0.8 + 1e-6, ["job 7 replaces the planned source, job 5"]),
        (7, 0.7, ["job 7 replaces the planned source, job 5"]),
    ],
)
def test_another_source(job: int, similarity: float, note: list[str]) -> None:
    assert unplanned(CLAIM, found(job, similarity), []) == note
    # Whom it waited for in the end makes no difference: the trace is about the plan.
    assert unplanned(replace(CLAIM, source_job_id=7), found(job, similarity), []) == note


@pytest.mark.parametrize(
    ("job", "similarity", "note"),
    [
        (5, 0.8, []),
        (7, 0.9, ["entry 70 is nearer than the planned entry 50"]),
        (7, 0.7, ["entry 70 replaces the planned entry 50"]),
    ],
)
def test_another_entry(job: int, similarity: float, note: list[str]) -> None:
    claim = replace(CLAIM, source_job_id=None, planned_job_id=None, source_entry_id=50)
    assert unplanned(claim, found(job, similarity), []) == note


def test_who_was_no_follower_follows_nothing_else() -> None:
    assert unplanned(replace(CLAIM, role=Role.duplicate), found(7, 0.9), []) == []


def test_the_planned_source_is_there_and_another_is_better() -> None:
    planned = found(5, 0.8 + 1e-6)
    for other, why in ((found(7, 0.9), "is nearer"), (found(7, 0.8), "bears more steps")):
        assert unplanned(CLAIM, other, [planned, other]) == [f"job 7 {why} than the planned source, job 5"]
    claim = replace(CLAIM, source_job_id=None, planned_job_id=None, source_entry_id=50)
    assert unplanned(claim, found(7, 0.7), [planned]) == ["entry 70 bears more steps than the planned entry 50"]


class Table:
    """Stands for a policy: how deep each source's prompt is borne is given."""

    def __init__(self, **depths: tuple[int, int]) -> None:
        self._depths = depths

    def depth(self, source: str, prompt: str, m: float, settings: GenerationSettings) -> tuple[int, int]:
        return self._depths[source]


@pytest.mark.parametrize(
    ("taken", "entries"),
    [
        ("deep", [("near", 0.9), ("deep", 0.7)]),
        ("region", [("deep", 0.9), ("region", 0.7)]),  # as deep, and more steps of stage 2
        ("deep", [("near", 0.7), ("deep", 0.7)]),
        ("too", [("deep", 0.8), ("too", 0.81)]),  # as many steps: the nearest
        ("too", [("deep", 0.8), ("too", 0.8)]),  # and as near: the planned one
    ],
)
def test_the_entry_that_bears_most_steps_is_taken(taken: str, entries: list[tuple[str, float]]) -> None:
    table = Table(near=(1, 1), deep=(2, 2), region=(2, 3), too=(2, 2))
    there = [replace(found(5 if prompt == "too" else 7, m), prompt=prompt) for prompt, m in entries]
    request = Request("p", 0, GenerationSettings(64, 64, 9, 8, 4, 1.0, 1.0), "k")
    assert best(CLAIM, table, request, there).prompt == taken  # type: ignore[arg-type]
