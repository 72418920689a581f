"""The simulator: its arithmetic by hand, and what it proves of the rules of dispatch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus_batch.jobs.curve import Curve, Domain
from chorus_batch.jobs.plan import FOLLOWER, Items, plan
from chorus_batch.jobs.simulation import (
    PlannedJob,
    SimulationError,
    Trouble,
    in_order,
    lower_bound,
    simulate,
    simulate_online,
)

DOMAIN = Domain(0.65, Curve.linear(0.65, 0.556, 0.286))


def planned(n: int, per_topic: int, seed: int = 0) -> list[PlannedJob]:
    """The plan of `n` random rows, about `per_topic` of them alike."""
    rng = np.random.default_rng(seed)
    topics = rng.standard_normal((max(1, n // per_topic), 32))
    vectors = topics[rng.integers(len(topics), size=n)] + rng.random((n, 1)) * 0.75 * rng.standard_normal((n, 32))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    zeros, codes = np.zeros(n, np.int64), np.arange(n)
    made = plan(Items(zeros, codes, codes, vectors, zeros, zeros), [DOMAIN])
    cost = np.where(made.role == FOLLOWER, DOMAIN.curve(np.nan_to_num(made.similarity, nan=1.0)), 1.0)
    return [
        PlannedJob(float(cost[a.index]), a.position, a.source, a.fallback, full=1.0, similarity=a.similarity or 0.0)
        for a in made
    ]


def test_by_hand() -> None:
    jobs = [PlannedJob(2.0, 0), PlannedJob(1.0, 1, source=0), PlannedJob(1.0, 2, source=0), PlannedJob(1.0, 3)]
    one, two = simulate(jobs, 1), simulate(jobs, 2)
    assert (one.length, one.lower_bound, one.idle, one.starts) == (5.0, 5.0, 0.0, (0.0, 2.0, 3.0, 4.0))
    # The second worker takes the single row, then waits for the source.
    assert (two.length, two.lower_bound, two.idle) == (3.0, 3.0, 1.0)
    assert two.starts == (0.0, 2.0, 2.0, 0.0)
    assert (two.work, two.finished, two.failed, two.unserved, two.longest_wait) == (5.0, 4, 0, 0, 0.0)
    assert simulate([], 3).length == 0.0 and simulate([], 3).ratio == 1.0


def test_a_worker_prefers_what_it_holds_and_others_take_the_order() -> None:
    # Two sources; the follower of the second comes before that of the first.
    jobs = [PlannedJob(1.0, 0), PlannedJob(1.0, 1), PlannedJob(0.5, 2, source=1), PlannedJob(0.5, 3, source=0)]
    assert simulate(jobs, 2).near == 2
    assert simulate(jobs, 2, sticky=False).near == 0
    # What waits for nobody keeps its place.
    assert simulate(jobs, 1).starts == (0.0, 1.0, 2.0, 2.5)


def test_the_bound_knows_that_workers_have_nothing_to_do_at_first() -> None:
    jobs = [PlannedJob(1.0, 0), *(PlannedJob(0.5, n, source=0) for n in range(1, 17))]
    assert lower_bound(jobs, 8) == pytest.approx(2.0)
    assert simulate(jobs, 8).length == pytest.approx(2.0)


@pytest.mark.parametrize("per_topic", [4, 40, 300])
@pytest.mark.parametrize("n", [1000, 2000])
def test_sixteen_workers_end_within_three_percent_of_the_bound(n: int, per_topic: int) -> None:
    jobs = planned(n, per_topic)
    assert 1.0 <= simulate(jobs, 16).ratio <= 1.03
    assert simulate(jobs, 16, max_wait=5.0).ratio <= 1.03


def test_a_giant_cluster_keeps_all_workers_busy() -> None:
    jobs = [PlannedJob(1.0, 0), *(PlannedJob(0.4, n, source=0) for n in range(1, 2001))]
    assert simulate(jobs, 16).ratio <= 1.01


@pytest.mark.parametrize("workers", [1, 7, 100, 1000])
def test_nobody_is_idle_while_a_job_is_ready(workers: int) -> None:
    """Work-conserving: whenever a job that was ready waits, all workers run."""
    jobs = planned(400, 20)
    run = simulate(jobs, workers)
    for index, start in enumerate(run.starts):
        source = jobs[index].source
        ready = run.ends[source] if source is not None else 0.0
        if start > ready:
            middle = (ready + start) / 2
            assert sum(s <= middle < e for s, e in zip(run.starts, run.ends, strict=True)) == workers


def stream(count: int, priority: int = 0) -> list[PlannedJob]:
    """A source and its followers, of which there is always one more when the worker comes for the next."""
    followers = [PlannedJob(0.5, 3 + n, source=1, arrival=0.4 * n, priority=priority) for n in range(count)]
    return [PlannedJob(1.0, 0), PlannedJob(1.0, 1, priority=priority), PlannedJob(1.0, 2, source=0), *followers]


def test_locality_starves_nobody() -> None:
    jobs = stream(200)
    assert simulate(jobs, 1, held=1).starts[2] > 75  # behind all that its worker holds
    run = simulate(jobs, 1, held=1, max_wait=10.0)
    assert 10.0 < run.starts[2] - run.ends[0] <= 10.0 + 0.5  # and the job that runs just then


def test_priorities_starve_nobody() -> None:
    """One claim in eight goes to whoever has waited too long, however urgent the rest."""
    jobs = stream(200, priority=9)
    assert simulate(jobs, 1).starts[0] > 75
    assert 10.0 < simulate(jobs, 1, max_wait=10.0).starts[0] <= 10.0 + 8 * 0.5
    assert simulate(jobs, 1, max_wait=1000.0).starts[0] > 75


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5), st.sampled_from([0.5, 3.0, math.inf]), st.data())
def test_nothing_is_lost_whatever_happens(
    n: int, workers: int, seed: int, max_wait: float, data: st.DataObject
) -> None:
    jobs = planned(n, 6, seed)
    jobs = [replace(job, priority=data.draw(st.integers(0, 2))) for job in jobs]
    rows = st.integers(0, n - 1)
    trouble = Trouble(
        failing=data.draw(st.sets(rows, max_size=8)),
        slower=data.draw(st.dictionaries(rows, st.floats(1, 10), max_size=8)),
        deaths=data.draw(st.lists(st.tuples(st.floats(0, 20), st.integers(0, workers - 1)), max_size=workers - 1)),
        lease=data.draw(st.floats(0, 3)),
    )
    if len({worker for _, worker in trouble.deaths}) == workers:
        return
    run = simulate(jobs, workers, max_wait=max_wait, trouble=trouble)
    assert run.failed == len(set(trouble.failing)) and run.finished + run.failed == n
    assert not any(math.isnan(end) for end in run.ends)
    for index, job in enumerate(jobs):
        if job.source is not None and job.source not in trouble.failing:
            assert run.starts[index] >= run.ends[job.source]
    assert run == simulate(jobs, workers, max_wait=max_wait, trouble=trouble)


def test_a_straggler_costs_its_own_time() -> None:
    jobs = planned(1000, 40)
    calm = simulate(jobs, 16)
    last = max(range(len(jobs)), key=lambda job: jobs[job].position)
    slow = simulate(jobs, 16, trouble=Trouble(slower={last: 10.0}))
    assert slow.length <= calm.length + 10 * jobs[last].cost


def test_followers_of_a_failed_source_use_the_fallback_or_one_of_them_takes_its_place() -> None:
    jobs = [
        PlannedJob(1.0, 0),
        PlannedJob(1.0, 1),
        PlannedJob(0.4, 2, source=0, fallback=1, full=1.0),
        PlannedJob(0.4, 3, source=0, full=1.0, similarity=0.7),
        PlannedJob(0.4, 4, source=0, full=1.0, similarity=0.9),
    ]
    run = simulate(jobs, 3, trouble=Trouble(failing={0}, slower={1: 3.0}))
    assert run.starts[2:] == (
        3.0,
        2.0,
        1.0,
    )  # after the fallback; after the more similar one, which is computed in full
    assert run.unserved == 1 and run.work == pytest.approx(1 + 3 + 0.4 + 0.4 + 1.0)


def test_what_a_dead_worker_ran_is_run_again_after_its_lease() -> None:
    run = simulate([PlannedJob(2.0, 0), PlannedJob(1.0, 1)], 2, trouble=Trouble(deaths=[(1.5, 0)], lease=1.0))
    assert run.starts == (2.5, 0.0) and run.length == 4.5
    assert run.work == pytest.approx(1.5 + 2.0 + 1.0)


def test_refusals() -> None:
    with pytest.raises(SimulationError, match="0 workers"):
        simulate([PlannedJob(1.0, 0)], 0)
    with pytest.raises(SimulationError, match="waits for itself"):
        simulate([PlannedJob(1.0, 0, source=1), PlannedJob(1.0, 1, source=0)], 1)
    with pytest.raises(SimulationError, match="never run"):
        simulate([PlannedJob(1.0, 0)], 1, trouble=Trouble(deaths=[(0.5, 0)]))


def test_without_a_plan_neighbours_that_run_side_by_side_miss_each_other() -> None:
    vectors = np.repeat(np.eye(2, dtype=np.float32), 8, axis=0)
    one, jobs = simulate_online(vectors, np.arange(16), DOMAIN, 1)
    assert [job.cost for job in jobs] == pytest.approx([1.0, *[0.286] * 7] * 2)
    assert one.length == pytest.approx(2 + 14 * 0.286)
    several, _ = simulate_online(vectors, np.arange(16), DOMAIN, 4)
    assert several.work == pytest.approx(8 + 8 * 0.286) or several.work > one.work + 5


def test_in_another_order() -> None:
    jobs = [PlannedJob(1.0, 0), PlannedJob(2.0, 1), PlannedJob(3.0, 2)]
    assert simulate(in_order(jobs, [2, 0, 1]), 1).starts == (3.0, 4.0, 0.0)
