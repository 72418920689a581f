"""Claims on a queue of a million jobs: latency percentiles, with one worker and with several.

    uv run --extra dev python -m tests.bench.queue [--jobs 1000000] [--claims 2000] [--workers 2]

Starts servers of its own in a throw-away folder. A claim is timed from the call to the committed answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from sqlalchemy import Engine, text

from chorus_batch.jobs import cache, leases, queue
from chorus_batch.jobs.database import connect, statement, transaction, upgrade
from chorus_batch.jobs.local import profile
from chorus_batch.jobs.settings import Settings
from tests.integration.conftest import DOMAIN, made


def fill(engine: Engine, jobs: int) -> None:
    """One batch in which every tenth job is a source and the others wait for one."""
    with transaction(engine) as connection:
        space = cache.register_space(connection, "bench", 4)
        domain = cache.register_domain(connection, space, "0" * 64, DOMAIN)
        cache.store_vectors(connection, space, [b"key"], np.eye(4, dtype=np.float32)[:1])
        connection.execute(
            text(
                "INSERT INTO batches (name, submission_key, cache, files, plan, total)"
                " VALUES ('bench', 'bench', 'on', '[]', '{}', :n)"
            ),
            {"n": jobs},
        )
        connection.execute(
            text(
                """
                INSERT INTO jobs (id, batch_id, row, line, external_id, prompt, prompt_key, domain_id, seed, fps, reuse,
                    priority, role, source_job_id, similarity, position)
                OVERRIDING SYSTEM VALUE
                SELECT n, 1, n, n, n::text, 'prompt ' || n, 'key', :domain, n, 8, 'auto', n % 3,
                    (CASE n % 10 WHEN 1 THEN 'source' ELSE 'follower' END)::role,
                    CASE n % 10 WHEN 1 THEN NULL ELSE (n - 1) / 10 * 10 + 1 END,
                    CASE n % 10 WHEN 1 THEN NULL ELSE 0.9 END, n
                FROM generate_series(1, :n) n
                """
            ),
            {"n": jobs, "domain": domain},
        )
        connection.execute(
            text(
                "INSERT INTO queue (job_id, batch_id, source_job_id, priority, position, state)"
                " SELECT id, 1, source_job_id, priority, position,"
                " (CASE WHEN source_job_id IS NULL THEN 'ready' ELSE 'waiting' END)::queue_state FROM jobs"
            )
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))
        connection.execute(text("CHECKPOINT"))  # what the filling left to be written is no part of the claims


def work(url: str, worker: str, claims: int) -> dict[str, list[float]]:
    """Claim and finish jobs as a worker does, holding the last 20 sources. Returns the seconds of each."""
    engine = connect(url, plan_once=True)  # as workers do
    spent: dict[str, list[float]] = {"claim": [], "finish": []}
    with transaction(engine) as connection:
        leases.register(connection, worker, slot=worker, host="bench", pid=1, device="cpu")
    held: list[int] = []
    for _ in range(claims):
        began = time.perf_counter()
        with statement(engine) as connection:
            taken = queue.claim(connection, worker, held)
        claimed = time.perf_counter()
        assert taken is not None
        with transaction(engine) as connection:
            queue.finish(connection, taken, made(taken))
        spent["claim"].append(claimed - began)
        spent["finish"].append(time.perf_counter() - claimed)
        if taken.source_job_id is None:
            held = [*held[-19:], taken.job_id]
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--claims", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chorus-bench-", dir="/tmp"))
    folder.chmod(0o711)
    settings = profile.ensure(Settings(data_dir=folder))
    try:
        engine = connect(settings.database_url)
        upgrade(engine)
        began = time.perf_counter()
        fill(engine, arguments.jobs)
        print(f"{arguments.jobs} jobs written in {time.perf_counter() - began:.0f} s")
        for workers in sorted({1, arguments.workers}):
            # Processes, as workers are: threads would wait for each other's interpreter.
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                each = [
                    pool.submit(work, settings.database_url, f"{workers}-{n}", arguments.claims // workers)
                    for n in range(workers)
                ]
                spent = [one.result() for one in each]
            for what in ("claim", "finish"):
                seconds = [second for one in spent for second in one[what]]
                cuts = statistics.quantiles(seconds, n=100)
                figures = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(seconds)}
                milliseconds = {name: round(1000 * value, 2) for name, value in figures.items()}
                print(json.dumps({"what": what, "jobs": arguments.jobs, "workers": workers, "ms": milliseconds}))
    finally:
        profile.down(settings)
        import shutil

        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
