"""Rows a second and peak memory of reading files of prompts. Run: python tests/bench/ingest.py [rows ...]"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.ingest.rows import IngestOptions, Row, Source, read_batch

COLOURS = ["red", "green", "blue", "yellow", "purple", "orange", "cyan", "white"]
MOTIONS = ["moves left", "moves right", "moves up", "moves down", "grows", "shrinks", "stays still"]
STYLES = {
    "builtin": "a {colour} circle {motion} over a black background",
    "long": "a {colour} circle {motion} over a black background, number {n}; slow push-in, soft light, film grain",
    "accents": "a {colour} caf\u00e9 \u2014 it\u2019s dusk, number {n}; the camera {motion}",
}


def write(path: Path, rows: int, style: str) -> None:
    """A file of that many rows."""
    with path.open("w", encoding="utf-8") as file:
        file.write("id,prompt,seed,steps\n")
        for n in range(rows):
            prompt = STYLES[style].format(colour=COLOURS[n % 8], motion=MOTIONS[n // 8 % 7], n=n)
            file.write(f'row-{n},"{prompt}",{n},{n % 20 + 1}\n')


def measure(path: Path, style: str) -> None:
    """Read it and print how that went."""
    card = load_card("builtin")
    if style != "builtin":
        card = replace(card, max_prompt_tokens=512)
    start = time.perf_counter()
    rows = sum(isinstance(item, Row) for item in read_batch(Source(path, path.name), IngestOptions(card)))
    seconds, busy = time.perf_counter() - start, time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    speed = f"{rows / seconds:9,.0f} rows/s  peak {peak:4.0f} MiB"
    print(f"{style:8} {rows:9,} rows {seconds:7.2f} s ({busy:6.2f} s CPU) {speed}", flush=True)


def main() -> None:
    """Every style at every size."""
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), sys.argv[3])
        return
    for rows in [int(text) for text in sys.argv[1:]] or [100_000, 1_000_000]:
        for style in STYLES:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "prompts.csv"
                write(path, rows, style)
                # A process of its own: peak memory is a process's.
                subprocess.run([sys.executable, __file__, "--measure", str(path), style], check=True)


if __name__ == "__main__":
    main()
