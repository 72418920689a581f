"""How long a submit takes: reading, planning and storing, with the vectors of the prompts known beforehand.

    uv run --extra dev python -m tests.bench.submit [--rows 100000]

Prompts are made up (12 to 16 tokens in groups of about 40 alike, vectors to match); embedding is left out, as its time
depends on the embedder and on how many prompts were seen before.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import shutil
import tempfile
from pathlib import Path

from chorus_batch.jobs import cache
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.database import connect, transaction, upgrade
from chorus_batch.jobs.embed import make_embedder
from chorus_batch.jobs.ingest.rows import IngestOptions, open_source
from chorus_batch.jobs.local import profile
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.requested import prompt_key
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.submission import SubmitOptions, submit
from tests.bench.planner import synthetic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    rows = parser.parse_args().rows
    folder = Path(tempfile.mkdtemp(prefix="chorus-bench-", dir="/tmp"))
    folder.chmod(0o711)
    settings = profile.ensure(Settings(data_dir=folder))
    try:
        prompts = [f"a red circle number {n} moves left over a black background" for n in range(rows)]
        path = folder / "prompts.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "prompt", "seed"])
            writer.writerows((f"id-{n}", prompt, n) for n, prompt in enumerate(prompts))
        engine = connect(settings.database_url)
        upgrade(engine)
        embedder = make_embedder(settings.embedder)
        with transaction(engine) as connection:
            space = cache.register_space(connection, embedder.space, embedder.dimension)
            vectors = synthetic(rows, None)
            cache.store_vectors(connection, space, [prompt_key(prompt) for prompt in prompts], vectors)
        del vectors
        ingest = IngestOptions(card=load_card("builtin"), salt=1)
        for mode in (CacheMode.exact, CacheMode.on):
            with open_source(str(path)) as source:
                done = submit(settings, engine, [source], ingest, SubmitOptions(cache=mode, new=True))
            seconds = {name: round(value, 2) for name, value in done.seconds.items()}
            without = round(sum(value for name, value in done.seconds.items() if name != "embed"), 2)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(json.dumps({"rows": rows, "cache": mode.value, "seconds": seconds, "without_embed": without,
                              "hit_rate": round(done.forecast.hit_rate, 3), "peak_MiB": peak}))  # fmt: skip
    finally:
        profile.down(settings)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
