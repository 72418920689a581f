"""The main job, timed from outside: help, first video, all videos, and what a worker does besides computing.

    uv run --extra dev python -m tests.bench.pipeline [--repeat 4] [--runs 3]

Starts servers of its own in a throw-away folder, warms them with one batch, then runs the example catalogue: once with
no worker alive (`--wait` starts one), and `--runs` times with a worker that waits for work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import text

from chorus_batch.jobs.database import connect, transaction
from chorus_batch.jobs.local import profile
from chorus_batch.jobs.settings import Settings

PROGRAM = Path(sys.executable).with_name("chorus-batch")
CATALOG = Path(__file__).parents[2] / "jobs" / "examples" / "catalog.csv"


def run(environment: dict[str, str], *arguments: str) -> tuple[float, str]:
    """Wall seconds and standard output of one command."""
    began = time.perf_counter()
    done = subprocess.run([PROGRAM, *arguments], env=environment, capture_output=True, text=True, check=True)
    return time.perf_counter() - began, done.stdout


def timeline(settings: Settings, batch: int) -> dict[str, Any]:
    """Seconds from the batch's storing to its videos, and the share of time without denoising or decoding."""
    query = """
        SELECT extract(epoch FROM j.finished_at - b.created_at)::float8 AS finished,
            coalesce((g.seconds->>'denoise')::float8, 0) + coalesce((g.seconds->>'decode')::float8, 0) AS computed
        FROM batches b JOIN jobs j ON j.batch_id = b.id JOIN generations g ON g.job_id = j.id
        WHERE b.id = :batch ORDER BY j.finished_at
    """
    engine = connect(settings.database_url)
    with transaction(engine) as connection:
        rows = connection.execute(text(query), {"batch": batch}).all()
    engine.dispose()
    # Between the first and the last result, what share did the worker neither denoise nor decode?
    window = rows[-1].finished - rows[0].finished
    computed = sum(row.computed for row in rows[1:])
    return {
        "videos": len(rows),
        "first_video": rows[0].finished,
        "last_video": rows[-1].finished,
        "overhead_share": 1 - computed / window,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chorus-bench-", dir="/tmp"))
    folder.chmod(0o711)
    environment = {**os.environ, "CHORUS_DATA_DIR": str(folder)}
    settings = profile.ensure(Settings(data_dir=folder))
    worker: subprocess.Popen[bytes] | None = None
    try:
        helps = [run(environment, "--help")[0] for _ in range(7)]
        show("--help, seconds", helps)
        run(environment, "submit", str(CATALOG), "--wait", "-q", "--set", "steps=1")

        wall, out = run(environment, "submit", str(CATALOG), "--wait", "-q", "--new", "--cache", "readonly")
        figures = timeline(settings, int(out))
        figures["from_command_to_first_video"] = wall - figures["last_video"] + figures["first_video"]
        print(json.dumps({"what": "24 rows, the command starts its worker", "command": wall, **rounded(figures)}))

        worker = subprocess.Popen([PROGRAM, "worker", "start"], env=environment, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)  # fmt: skip
        first, shares = [], []
        for number in range(arguments.runs + 1):
            submit = ["submit", str(CATALOG), "--wait", "-q", "--new", "--seed-policy", "row"]
            wall, out = run(environment, *submit, "--repeat", str(arguments.repeat), "--cache", "on", "--set",
                            f"guidance_scale={2.5 + number / 1000}")  # fmt: skip
            figures = timeline(settings, int(out))
            if number:  # the first one loads the model
                first.append(wall - figures["last_video"] + figures["first_video"])
                shares.append(figures["overhead_share"])
            print(json.dumps({"what": "a worker waits", "command": wall, **rounded(figures)}))
        show("a worker waits: command to first video, seconds", first)
        show("share of a worker's time without denoising or decoding", shares)
    finally:
        if worker is not None:
            worker.terminate()
            worker.wait()
        profile.down(settings)
        shutil.rmtree(folder)


def rounded(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) for name, value in figures.items()}


def show(what: str, values: list[float]) -> None:
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}
    print(json.dumps({"what": what, **rounded(spread)}))


if __name__ == "__main__":
    main()
