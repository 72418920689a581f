"""How long planning takes, and what a plan saves over arrival order.

    python tests/bench/plan.py [--prompts FOLDER] [--rows 10000 100000]

First random clustered vectors: seconds. Then the embedder: seconds to the first vector in a fresh process, prompts a
second. Then, for each CSV in FOLDER (a column `prompt`): cost per prompt in arrival order and planned, at two
thresholds and two cost curves. 1.000 is no reuse; exact duplicates cost nothing on both sides.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from chorus_batch.jobs.curve import Curve, Domain, FloatArray
from chorus_batch.jobs.embed import make_embedder
from chorus_batch.jobs.plan import Items, number, online_cost, plan, plan_cost

CURVES = {"4step": (0.8, 0.625), "50step": (0.556, 0.286)}


def clustered(rows: int, dimension: int = 384, per_topic: int = 40, noise: float = 0.75) -> FloatArray:
    """Unit vectors around random topics; two of one topic have a similarity of about 1 / (1 + noise^2)."""
    rng = np.random.default_rng(7)
    topics = rng.standard_normal((max(1, rows // per_topic), dimension), dtype=np.float32)
    vectors = topics[rng.integers(len(topics), size=rows)]
    vectors += (
        noise * rng.random((rows, 1), dtype=np.float32) * rng.standard_normal((rows, dimension), dtype=np.float32)
    )
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def items_of(vectors: FloatArray, prompts: list[str] | None = None) -> Items:
    n = len(vectors)
    codes = number(prompts, {}) if prompts is not None else np.arange(n)
    zeros = np.zeros(n, np.int64)
    return Items(domain=zeros, request=codes, prompt=codes, embeddings=vectors, reuse=zeros, priority=zeros)


def embedding_speed(prompts: list[str]) -> None:
    start = time.perf_counter()
    code = "from chorus_batch.jobs.embed import make_embedder; make_embedder('minilm').embed(['a red fox'])"
    subprocess.run([sys.executable, "-c", code], check=True)
    first = time.perf_counter() - start
    embedder = make_embedder("minilm")
    embedder.embed(prompts[:1])
    start = time.perf_counter()
    embedder.embed(prompts)
    rate = len(prompts) / (time.perf_counter() - start)
    print(f"embedder: first vector after {first:.1f} s in a fresh process, then {rate:.0f} prompts/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="folder of CSV files with a column `prompt`")
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 100_000])
    options = parser.parse_args()
    domain = Domain(0.65, Curve.linear(0.65))
    for rows in options.rows:
        items = items_of(clustered(rows))
        start = time.perf_counter()
        made = plan(items, [domain])
        seconds = time.perf_counter() - start
        print(
            f"{rows:>9,} vectors: {seconds:6.2f} s, cost per row {plan_cost(made, items, [domain]) / rows:.4f}",
            flush=True,
        )
    files = sorted(options.prompts.glob("*.csv")) if options.prompts else []
    embedder = make_embedder("minilm")
    for place, path in enumerate(files):
        with path.open(encoding="utf-8", newline="") as file:
            prompts = [row["prompt"] for row in csv.DictReader(file)]
        if not place:
            embedding_speed(prompts)
            print(f"{'list':<34} {'n':>5}  {'tau':>5} {'curve':<6} {'arrival':>8} {'plan':>8} {'saves':>7}  seconds")
        items = items_of(embedder.embed(prompts), prompts)
        for tau in (0.475, 0.65):
            for name, (at_tau, at_one) in CURVES.items():
                domain = Domain(tau, Curve.linear(tau, at_tau, at_one))
                arrival = online_cost(items, [domain])
                start = time.perf_counter()
                planned = plan_cost(plan(items, [domain]), items, [domain])
                seconds = time.perf_counter() - start
                n = len(prompts)
                print(
                    f"{path.stem:<34} {n:>5}  {tau:>5} {name:<6} {arrival / n:>8.4f} {planned / n:>8.4f}"
                    f" {1 - planned / arrival:>7.1%}  {seconds:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
