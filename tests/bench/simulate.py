"""How long W workers take for a list of prompts: with the plan, without one, and when things go wrong.

    python -m tests.bench.simulate [--prompts FOLDER] [--rows 1000] [--workers 1 16 256] [--tau 0.475] [--curve 50step]

Nothing is generated: costs are those of a curve, 1 is a video computed in full. Lists are the CSV files of FOLDER (a
column `prompt`), cut to `--rows`; without a folder random clustered vectors. `length/bound`: the makespan over what the
plan allows at best.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from chorus_batch.jobs.curve import Curve, Domain, FloatArray
from chorus_batch.jobs.embed import make_embedder
from chorus_batch.jobs.nearest import IntArray
from chorus_batch.jobs.plan import DUPLICATE, FOLLOWER, Plan, plan
from chorus_batch.jobs.simulation import PlannedJob, Trouble, in_order, simulate, simulate_online
from tests.bench.planner import CURVES, items_of


def planned_jobs(made: Plan, domain: Domain) -> list[PlannedJob]:
    """A plan's rows as the simulator takes them."""
    similarity = np.nan_to_num(made.similarity, nan=1.0)
    cost = np.where(made.role == FOLLOWER, domain.curve(similarity), 1.0) * (made.role != DUPLICATE)
    return [
        PlannedJob(
            cost=float(cost[row.index]),
            position=row.position,
            source=row.source,
            fallback=row.fallback,
            full=0.0 if row.role == "duplicate" else 1.0,
            similarity=row.similarity or 0.0,
            duplicate=row.role == "duplicate",
        )
        for row in made
    ]


def kmeans_order(vectors: FloatArray, rounds: int = 8) -> IntArray:
    """Rows by cluster: the order that a planner without roles would choose."""
    rng = np.random.default_rng(1)
    count = max(1, math.isqrt(len(vectors) // 2))
    centers = vectors[rng.choice(len(vectors), count, replace=False)]
    for _ in range(rounds):
        nearest = (vectors @ centers.T).argmax(axis=1)
        for cluster in range(count):
            members = vectors[nearest == cluster]
            if len(members):
                mean = members.mean(axis=0)
                centers[cluster] = mean / max(float(np.linalg.norm(mean)), 1e-9)
    return np.argsort(nearest, kind="stable")


def troubles(jobs: list[PlannedJob], workers: int, length: float) -> Iterator[tuple[str, Trouble]]:
    """Runs that don't go as planned; the same ones every time."""
    rng = random.Random(5)
    sources = sorted({job.source for job in jobs if job.source is not None})
    everybody = range(len(jobs))
    yield "1 in 20 takes 5 times as long", Trouble(slower=dict.fromkeys(rng.sample(everybody, len(jobs) // 20), 5.0))
    if sources:
        yield "1 in 5 sources fails", Trouble(failing=set(rng.sample(sources, -(-len(sources) // 5))))
    dying = [(rng.uniform(0, length), worker) for worker in range(workers // 4)]
    yield "1 in 4 workers dies", Trouble(deaths=dying, lease=0.5)


def clustered(rows: int, per_topic: int, dimension: int = 384, noise: float = 0.75) -> FloatArray:
    """Unit vectors around random topics; two of one topic have a similarity of about 1 / (1 + noise^2)."""
    rng = np.random.default_rng(7)
    topics = rng.standard_normal((max(1, rows // per_topic), dimension), dtype=np.float32)
    vectors = topics[rng.integers(len(topics), size=rows)]
    scale = noise * rng.random((rows, 1), dtype=np.float32)
    vectors += scale * rng.standard_normal((rows, dimension), dtype=np.float32)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def lists(options: argparse.Namespace) -> Iterator[tuple[str, FloatArray]]:
    if options.prompts is None:
        for per_topic in (8, 40, 300):
            yield f"random, {per_topic} a topic", clustered(options.rows, per_topic)
        return
    embedder = make_embedder("minilm")
    for path in sorted(options.prompts.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            prompts = [row["prompt"] for row in csv.DictReader(file)][: options.rows]
        # Repeated prompts are linked, not computed: they'd make any order look good.
        yield path.stem, embedder.embed(list(dict.fromkeys(prompts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="folder of CSV files with a column `prompt`")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--tau", type=float, default=0.475)
    parser.add_argument("--curve", choices=CURVES, default="50step")
    parser.add_argument("--max-wait", type=float, default=20.0, help="in videos computed in full")
    options = parser.parse_args()
    domain = Domain(options.tau, Curve.linear(options.tau, *CURVES[options.curve]))
    for name, vectors in lists(options):
        made = plan(items_of(vectors), [domain])
        jobs = planned_jobs(made, domain)
        clusters = len({job.source for job in jobs if job.source is not None})
        print(f"{name}: {len(jobs)} rows, {clusters} clusters, {sum(job.source is None for job in jobs)} in full")
        print(
            f"  {'W':>5}  {'order':<32} {'cost/row':>8} {'length':>8} {'l./bound':>8} {'idle':>6} {'max wait':>8} near"
        )
        for workers in options.workers:
            runs = [("plan", simulate(jobs, workers, max_wait=options.max_wait))]
            runs.append(("plan, without locality", simulate(jobs, workers, sticky=False)))
            runs.append(("plan, in arrival order", simulate(in_order(jobs, range(len(jobs))), workers)))
            for order, rows in (("arrival", np.arange(len(jobs))), ("k-means", kmeans_order(vectors))):
                runs.append((f"no plan, {order} order", simulate_online(vectors, rows, domain, workers)[0]))
            for trouble, what in troubles(jobs, workers, runs[0][1].length):
                runs.append((trouble, simulate(jobs, workers, max_wait=options.max_wait, trouble=what)))
            for order, run in runs:
                idle = run.idle / max(run.idle + run.work, 1e-9)
                print(
                    f"  {workers:>5}  {order:<32} {run.work / len(jobs):>8.4f} {run.length:>8.2f} {run.ratio:>8.4f}"
                    f" {idle:>6.1%} {run.longest_wait:>8.2f} {run.near}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
