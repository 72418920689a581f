"""How fast prompts are embedded on this CPU.

    uv run --extra dev python -m tests.bench.embed FILE.csv [--prompts 2000] [--rounds 3]

FILE has a column `prompt`. Prints seconds to the first vector in a fresh process, then prompts a second, the median of
so many rounds and their spread. A prompt that was embedded once is read from the database.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from chorus_batch.jobs.embed import make_embedder
from chorus_batch.jobs.processors import processors

FIRST = "from chorus_batch.jobs.embed import make_embedder; make_embedder('minilm').embed(['a red fox'])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with options.file.open(encoding="utf-8", newline="") as file:
        prompts = list(dict.fromkeys(row["prompt"] for row in csv.DictReader(file)))[: options.prompts]
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", FIRST], check=True)
    print(json.dumps({"first_vector_s": round(time.perf_counter() - began, 1)}))
    embedder = make_embedder("minilm")
    embedder.embed(prompts[:100])
    rates = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        embedder.embed(prompts)
        rates.append(len(prompts) / (time.perf_counter() - began))
    words = sum(len(prompt.split()) for prompt in prompts) / len(prompts)
    figures = {"median": statistics.median(rates), "low": min(rates), "high": max(rates)}
    print(json.dumps({"processors": processors(), "prompts": len(prompts), "words": round(words, 1),
                      "prompts_per_s": {name: round(rate) for name, rate in figures.items()}}))  # fmt: skip


if __name__ == "__main__":
    main()
