"""The same batch under the policies none, nirvana and chorus, on the built-in model; then `chorus-batch compare`.

    uv run --extra dev python -m tests.bench.policies [--families 16] [--steps 20] [--warm]

Each family is a prompt and three that differ from it in one attribute, with seeds that no table was chosen on. With
`--warm` the families' first prompts are in the cache already and nothing is added, so both policies have the same sources:
a bad source spoils all of its followers, and which sources are picked is luck. Starts servers of its own in a throw-away
folder.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from chorus_batch.jobs.local import profile
from chorus_batch.jobs.settings import Settings

PROGRAM = Path(sys.executable).with_name("chorus-batch")
WORDS = {
    "colour": ["red", "green", "blue", "yellow", "purple", "orange", "cyan"],
    "texture": ["plain", "striped", "spotted"],
    "shape": ["circle", "square", "triangle", "ring", "star"],
    "motion": ["moves left", "moves right", "moves up", "moves down", "grows", "shrinks", "stays still"],
    "background": ["black", "white", "gray", "pink"],
}


def prompts(families: int, seed: int) -> list[str]:
    """Families of four prompts each, no prompt twice."""
    rng, found = random.Random(seed), dict[str, None]()
    while len(found) < 4 * families:
        first = {kind: rng.choice(words) for kind, words in WORDS.items()}
        family = [first]
        for kind in rng.sample(list(WORDS), 3):
            other = rng.choice([word for word in WORDS[kind] if word != first[kind]])
            family.append({**first, kind: other})
        texts = [
            "a {texture} {colour} {shape} {motion} over a {background} background".format(**each) for each in family
        ]
        if not any(text in found for text in texts) and len(set(texts)) == 4:
            found |= dict.fromkeys(texts)
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument(
        "--warm", action="store_true", help="ask for the variants alone, their first prompts in the cache"
    )
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chorus-bench-", dir="/tmp"))
    folder.chmod(0o711)
    environment = {**os.environ, "CHORUS_DATA_DIR": str(folder)}
    settings = profile.ensure(Settings(data_dir=folder))

    def run(*command: str) -> str:
        return subprocess.run(
            [PROGRAM, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    rows = [(text, 1000 + n) for n, text in enumerate(prompts(arguments.families, arguments.seed))]
    first = [row for n, row in enumerate(rows) if n % 4 == 0] if arguments.warm else []
    asked = [row for row in rows if row not in first]

    def submit(what: list[tuple[str, int]], policy: str, cache: str, prefix: str = "") -> str:
        path = folder / "rows.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["prompt", "seed"])
            writer.writerows(what)
        options = ("--policy", policy, "--cache", cache, "--set", f"steps={arguments.steps}")
        return run("submit", str(path), "--wait", "-q", "--name", prefix + policy, *options).strip()

    try:
        if first:
            for policy in ("nirvana", "chorus"):
                submit(first, policy, "exact", "sources of ")
        cache = "readonly" if first else "on"
        batches = [submit(asked, policy, cache) for policy in ("none", "nirvana", "chorus")]
        print(run("compare", *batches))
        print(run("compare", *batches, "--json"))
        # What a hit does before its first step, against a plain generation.
        print(run("sql", "with plain as (select percentile_cont(0.5) within group (order by"
                  " (seconds->>'denoise')::float8 + (seconds->>'decode')::float8) s from generations"
                  f" join jobs on id = job_id where batch_id = {batches[0]})"
                  " select percentile_cont(0.5) within group (order by h) / min(plain.s) share_median,"
                  " percentile_cont(0.9) within group (order by h) / min(plain.s) share_p90 from plain,"
                  " (select coalesce((seconds->>'lookup')::float8, 0) + coalesce((seconds->>'fetch')::float8, 0)"
                  " + coalesce((seconds->>'decide')::float8, 0) h from generations join jobs on id = job_id"
                  f" where cache_result = 'semantic' and batch_id = {batches[2]}) hits"))  # fmt: skip
        print(run("sql", "select k.batch_id, g.kind, count(*), avg(g.k1) k1, avg(g.k2) k2,"
                  " avg((not g.scores @? '$.* ? (@ == false)')::int) all_right"
                  " from generations g join jobs k on k.id = g.job_id where g.cache_result = 'semantic'"
                  " group by 1, 2 order by 1, 2"))  # fmt: skip
        # The hits of both policies: how many are right under both, under one alone, under none.
        print(
            run(
                "sql",
                "with hits as (select j.batch_id, j.prompt, not g.scores @? '$.* ? (@ == false)' fine"
                " from generations g join jobs j on j.id = g.job_id where g.cache_result = 'semantic')"
                " select n.fine nirvana, c.fine chorus, count(*) from hits n join hits c using (prompt)"
                f" where n.batch_id = {batches[1]} and c.batch_id = {batches[2]} group by 1, 2 order by 1, 2",
            )
        )
    finally:
        profile.down(settings)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
