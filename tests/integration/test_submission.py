"""From files to a stored, planned batch, against a real Postgres and the real embedder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest
from sqlalchemy import Engine, text

from chorus_batch.jobs import batch, queue, submission
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.database import connect, transaction
from chorus_batch.jobs.embed import Embedder, MiniLMEmbedder
from chorus_batch.jobs.errors import Conflict, DependencyDown
from chorus_batch.jobs.ingest.rows import FileRejected, IngestOptions, Source
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.submission import SubmitOptions, Submitted, submit

from .conftest import Writer, left, made

CARD = load_card("builtin")
CATALOG = Path(str(resources.files("chorus_batch.jobs") / "examples" / "catalog.csv"))
NEAR = (
    "prompt\na red circle moves right over a black background\na blue circle moves right over a black background\n"
    "a yellow circle moves right over a black background\n"
)
TABLES = ("batches", "jobs", "queue")


@dataclass
class Counting:
    """The embedder, and what it was asked."""

    inner: Embedder
    asked: list[str] = field(default_factory=list)

    @property
    def space(self) -> str:
        return self.inner.space

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    def embed(self, prompts: Sequence[str]) -> np.ndarray:
        self.asked.extend(prompts)
        return self.inner.embed(prompts)


@pytest.fixture(scope="session")
def minilm() -> Embedder:
    return MiniLMEmbedder()


@pytest.fixture
def embedder(minilm: Embedder, monkeypatch: pytest.MonkeyPatch) -> Counting:
    """The real one, loaded once for all tests."""
    counting = Counting(minilm)
    monkeypatch.setattr(submission, "make_embedder", lambda _: counting)
    return counting


Send = Callable[..., Submitted]


@pytest.fixture
def send(database: Engine, servers: Settings, embedder: Counting, tmp_path: Path) -> Send:
    """Submit texts (or paths) as files `prompts-0.csv` and so on."""

    def send(
        *contents: str | Path, dry_run: bool = False, ingest: dict[str, Any] | None = None, **options: Any
    ) -> Submitted:
        sources = []
        for n, content in enumerate(contents):
            path = content if isinstance(content, Path) else tmp_path / f"prompts-{n}.csv"
            if isinstance(content, str):
                path.write_text(content)
            sources.append(Source(path, path.name))
        salted = IngestOptions(CARD, **{"salt": 1, **(ingest or {})})
        return submit(servers, database, sources, salted, SubmitOptions(**options), dry_run=dry_run)

    return send


def rows(database: Engine, query: str, **values: Any) -> list[dict[str, Any]]:
    with transaction(database) as connection:
        return [dict(row._mapping) for row in connection.execute(text(query), values)]


def jobs(database: Engine, done: Submitted) -> list[dict[str, Any]]:
    query = """
        SELECT j.*, q.state::text AS state, q.source_job_id AS waits_for FROM jobs j JOIN queue q ON q.job_id = j.id
        WHERE j.batch_id = :batch ORDER BY j.file, j.row, j.copy
    """
    return rows(database, query, batch=done.batch_id)


def counts(database: Engine) -> dict[str, int]:
    return {table: rows(database, f"SELECT count(*) AS n FROM {table}")[0]["n"] for table in TABLES}


def run_all(writer: Writer, database: Engine) -> int:
    """Let a worker finish every job in the queue; sources leave a cache entry."""
    worker, count = writer.worker(f"worker {time.monotonic()}"), 0
    while True:
        with transaction(database) as connection:
            taken = queue.claim(connection, worker)
            if taken is None:
                return count
            entry = left(taken) if taken.role.value == "source" else None
            queue.finish(connection, taken, made(taken), entry)
            count += 1


def test_the_example_is_stored_and_planned(send: Send, database: Engine) -> None:
    done = send(CATALOG, labels={"team": "blue"})
    (batch,) = rows(database, "SELECT *, state::text AS state, cache::text AS cache FROM batches")
    stored = jobs(database, done)
    assert (batch["id"], batch["name"], batch["state"], batch["cache"]) == (done.batch_id, done.name, "active", "on")
    assert (batch["total"], len(stored), batch["labels"]) == (24, 24, {"team": "blue"})
    assert batch["files"][0]["name"] == "catalog.csv" and len(batch["files"][0]["sha256"]) == 64
    assert [job["external_id"] for job in stored] == [f"clip-{n:02}" for n in range(1, 25)]
    assert [job["line"] for job in stored] == list(range(2, 26)) and [job["row"] for job in stored] == list(
        range(1, 25)
    )
    assert [job["seed"] for job in stored][:5] == [7, 7, 7, 7, 21]
    assert stored[0]["prompt"] == "a red circle moves right over a black background"
    roles = [job["role"] for job in stored]
    forecast = done.forecast
    assert batch["plan"] == {**batch["plan"], "sources": forecast.sources, "hit_rate": forecast.hit_rate}
    assert (roles.count("source"), roles.count("follower")) == (forecast.sources, forecast.followers)
    assert roles.count("duplicate") == forecast.duplicates == 1
    assert forecast.rows == 24 and forecast.followers >= 8 and forecast.followers_of_cache == 0
    assert forecast.hit_rate == pytest.approx((24 - forecast.sources) / 24)
    assert forecast.steps_total == 24 * 20 and 0 < forecast.steps_skipped < forecast.steps_total
    assert (done.rejected, done.errors) == (0, ())
    assert set(done.seconds) == {"read", "embed", "plan", "forecast", "store"}


def test_roles_fit_their_sources(send: Send, database: Engine) -> None:
    stored = {job["id"]: job for job in jobs(database, send(CATALOG))}
    assert sorted(job["position"] for job in stored.values()) == list(range(24))
    for job in stored.values():
        source = stored.get(job["source_job_id"])
        if job["role"] == "source":
            assert (job["source_job_id"], job["source_entry_id"], job["similarity"]) == (None, None, None)
            assert job["state"] == "ready"
            continue
        assert source is not None and source["position"] < job["position"]
        assert (job["state"], job["waits_for"]) == ("waiting", source["id"])
        if job["role"] == "duplicate":
            assert (source["prompt_key"], source["seed"]) == (job["prompt_key"], job["seed"])
        else:
            assert source["role"] == "source" and source["domain_id"] == job["domain_id"]
            assert source["prompt_key"] != job["prompt_key"]
            assert CARD.boundaries[20][0][0] <= job["similarity"] <= 1.0
        assert job["fallback_job_id"] is None or stored[job["fallback_job_id"]]["role"] == "source"


def test_similarities_are_those_of_the_embedder(send: Send, database: Engine, minilm: Embedder) -> None:
    followers = [job for job in jobs(database, send(CATALOG)) if job["role"] == "follower"]
    prompts = {job["id"]: job["prompt"] for job in rows(database, "SELECT id, prompt FROM jobs")}
    for job in followers:
        one, other = minilm.embed([job["prompt"], prompts[job["source_job_id"]]])
        assert job["similarity"] == pytest.approx(float(one @ other), abs=1e-4)


def test_the_same_file_again_is_a_conflict_that_names_the_batch(
    send: Send, database: Engine, embedder: Counting
) -> None:
    first = send(NEAR)
    asked = len(embedder.asked)
    with pytest.raises(Conflict, match=rf"as batch {first.batch_id} \({first.name}\)") as caught:
        send(NEAR)
    assert caught.value.exit_code == 5 and "--new" in caught.value.hint
    assert counts(database) == {"batches": 1, "jobs": 3, "queue": 3}
    second = send(NEAR, new=True)
    assert second.batch_id != first.batch_id and second.name == f"{first.name}-2"
    assert counts(database)["jobs"] == 6
    assert len(embedder.asked) == asked == 3  # prompts are embedded once


@pytest.mark.parametrize(
    "changed",
    [
        {"ingest": {"overrides": {"steps": "4"}}},
        {"ingest": {"seed_policy": "hash"}},
        {"cache": CacheMode.off},
        {"ingest": {"policy": "nirvana"}},
        {"ingest": {"overrides": {"policy": "none"}}},
        {"ingest": {"overrides": {"step_cache": "pab"}}},
    ],
    ids=["parameters", "seeds", "cache", "policy", "set policy", "step cache"],
)
def test_other_options_make_another_batch(send: Send, database: Engine, changed: dict[str, Any]) -> None:
    send(NEAR)
    send(NEAR, **changed)
    assert counts(database)["batches"] == 2


def test_naming_the_policy_that_rows_have_anyway_makes_no_other_batch(send: Send) -> None:
    send(NEAR)
    with pytest.raises(Conflict):
        send(NEAR, ingest={"policy": "chorus"})
    send(NEAR, ingest={"policy": "none"})
    with pytest.raises(Conflict):
        send(NEAR, ingest={"policy": "none"})


def test_a_salt_makes_no_other_batch(send: Send) -> None:
    send(NEAR, ingest={"salt": 1})
    with pytest.raises(Conflict):
        send(NEAR, ingest={"salt": 2})


def test_two_submits_of_one_file_at_once(
    send: Send, database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have looked for the batch and found none before either stores it."""
    (tmp_path / "one.csv").write_text(NEAR)
    together = threading.Barrier(2)
    stored = submission.store

    def meet(*values: Any) -> tuple[int, str]:
        together.wait(20)
        return stored(*values)

    monkeypatch.setattr(submission, "store", meet)

    def attempt(_: int) -> Submitted | Conflict:
        try:
            return send(tmp_path / "one.csv")
        except Conflict as conflict:
            return conflict

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(attempt, range(2)))
    (done,) = (result for result in results if isinstance(result, Submitted))
    (conflict,) = (result for result in results if isinstance(result, Conflict))
    assert f"batch {done.batch_id}" in str(conflict)
    assert counts(database) == {"batches": 1, "jobs": 3, "queue": 3}


def test_two_files_of_one_name_at_once(
    send: Send, database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / folder / "prompts.csv" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"prompt\na red circle moves {'left' if path.parent.name == 'a' else 'up'}\n")
    together = threading.Barrier(2)
    free = batch._free_name

    def meet(*values: Any) -> str:
        name = free(*values)
        if not together.broken:
            together.wait(20)
            together.abort()  # the second try of one of them meets nobody
        return name

    monkeypatch.setattr(batch, "_free_name", meet)

    def attempt(path: Path) -> str:
        try:
            return send(path).name
        except threading.BrokenBarrierError:
            return send(path).name

    with ThreadPoolExecutor(2) as pool:
        names = sorted(pool.map(attempt, paths))
    assert names[1] == f"{names[0]}-2"
    assert counts(database)["batches"] == 2


def test_names(send: Send) -> None:
    assert send(NEAR, name="nightly").name == "nightly"
    with pytest.raises(Conflict, match="'nightly'"):
        send(NEAR, name="nightly", new=True)
    today = time.strftime("%m%d")
    assert [send(NEAR, new=True).name for _ in range(3)] == [f"prompts-0-{today}{end}" for end in ("", "-2", "-3")]


def test_an_invalid_row_stores_nothing(send: Send, database: Engine) -> None:
    with pytest.raises(FileRejected, match=r"prompts-0\.csv, line 3, row 2, column steps") as caught:
        send("prompt,steps\na red circle,4\na blue circle,many\n")
    assert (caught.value.exit_code, caught.value.errors[0].code) == (3, "not_a_number")
    assert counts(database) == {"batches": 0, "jobs": 0, "queue": 0}
    assert rows(database, "SELECT * FROM embeddings") == []


def test_a_broken_second_file_stores_nothing_of_the_first(send: Send, database: Engine) -> None:
    with pytest.raises(FileRejected, match=r"prompts-1\.csv"):
        send(NEAR, 'prompt\n"a red circle\n', on_invalid="row")
    assert counts(database) == {"batches": 0, "jobs": 0, "queue": 0}


def test_invalid_rows_may_be_left_out(send: Send, database: Engine) -> None:
    text = "prompt,steps\na red circle,4\na blue circle,many\n,nothing\na green circle,4\n"
    done = send(text, on_invalid="row")
    assert (done.rejected, [error.row for error in done.errors]) == (2, [2, 3, 3])
    assert [(job["row"], job["line"], job["external_id"]) for job in jobs(database, done)] == [
        (1, 2, "row-000001"),
        (4, 5, "row-000004"),
    ]
    with pytest.raises(FileRejected):
        send('prompt\n""\n', on_invalid="row")


def test_a_dry_run_stores_nothing(send: Send, database: Engine) -> None:
    done = send(NEAR, dry_run=True)
    assert done.batch_id is None and done.forecast.rows == 3 and done.forecast.followers == 2
    assert counts(database) == {"batches": 0, "jobs": 0, "queue": 0}
    assert send(NEAR).batch_id is not None


def test_rows_without_ids_get_some_that_no_row_has(send: Send, database: Engine) -> None:
    done = send("id,prompt,repeat\nrow-000002,a red circle,\n,a blue circle,\n,a green circle,2\nx,a white ring,\n")
    assert [job["external_id"] for job in jobs(database, done)] == [
        "row-000002", "own-row-000002", "row-000003", "row-000003-2", "x",
    ]  # fmt: skip


def test_several_files_are_one_batch(send: Send, database: Engine) -> None:
    done = send(NEAR, "prompt,mood\na purple circle moves right over a black background,calm\n")
    stored = jobs(database, done)
    assert [(job["file"], job["row"], job["external_id"]) for job in stored] == [
        (0, 1, "file-1-row-000001"),
        (0, 2, "file-1-row-000002"),
        (0, 3, "file-1-row-000003"),
        (1, 1, "file-2-row-000001"),
    ]
    assert [job["role"] for job in stored].count("source") == 1  # planned together
    assert stored[3]["extra"] == {"mood": "calm"} and stored[0]["extra"] is None
    with pytest.raises(FileRejected, match="duplicate_id"):
        send("id,prompt\nx,a red circle\n", "id,prompt\nx,a blue circle\n")


def test_rows_of_different_domains_do_not_reuse_each_other(send: Send, database: Engine) -> None:
    text = "prompt,steps\n" + "".join(
        f"a {colour} circle moves right over a black background,{steps}\n"
        for steps in (4, 20)
        for colour in ("red", "blue")
    )
    stored = jobs(database, send(text))
    assert [job["role"] for job in stored].count("follower") == 2
    assert stored[0]["domain_id"] == stored[1]["domain_id"] != stored[2]["domain_id"] == stored[3]["domain_id"]
    domain = {job["id"]: job["domain_id"] for job in stored}
    assert all(domain[job["source_job_id"]] == job["domain_id"] for job in stored if job["source_job_id"])
    steps = rows(database, "SELECT steps FROM domains ORDER BY steps")
    assert [row["steps"] for row in steps] == [4, 20]


def test_the_frame_rate_is_no_domain(send: Send, database: Engine) -> None:
    """Latents don't depend on it; the finished file does."""
    lines = "a red circle moves right,5,8\na red circle moves right,5,24\na blue circle moves right,5,24\n"
    stored = jobs(database, send(f"prompt,seed,fps\n{lines}"))
    assert len({job["domain_id"] for job in stored}) == 1
    assert [job["fps"] for job in stored] == [8, 24, 24]
    assert "duplicate" not in [job["role"] for job in stored]


def test_one_row(send: Send, database: Engine) -> None:
    done = send("prompt\na red circle\n")
    (job,) = jobs(database, done)
    assert (job["role"], job["state"], job["position"]) == ("source", "ready", 0)
    assert (done.forecast.hit_rate, done.forecast.steps_skipped) == (0.0, 0)


def test_equal_rows_are_made_once(send: Send, database: Engine) -> None:
    done = send("prompt,seed\n" + "a red circle,7\n" * 50)
    stored = jobs(database, done)
    assert [job["role"] for job in stored] == ["source", *["duplicate"] * 49]
    assert {job["source_job_id"] for job in stored[1:]} == {stored[0]["id"]}
    assert (done.forecast.steps_skipped, done.forecast.hit_rate) == (49 * 20, 49 / 50)


def test_one_prompt_with_many_seeds_is_made_each_time(send: Send, database: Engine) -> None:
    lines = "".join(f"a red circle,{seed},\n" for seed in range(5))
    assert {job["role"] for job in jobs(database, send(f"prompt,seed,reuse\n{lines}"))} == {"source"}
    forced = jobs(database, send(f"prompt,seed,reuse\n{lines.replace(',' + chr(10), ',force' + chr(10))}"))
    assert [job["role"] for job in forced].count("follower") == 4


def test_priority_and_reuse_are_stored(send: Send, database: Engine) -> None:
    text = "prompt,priority,reuse,output_name\na red circle,5,off,one\na blue circle,,force,\n"
    stored = jobs(database, send(text, ingest={"priority": 2}))
    assert [(job["priority"], job["reuse"], job["output_name"]) for job in stored] == [
        (5, "off", "one"),
        (2, "force", None),
    ]
    assert rows(database, "SELECT priority FROM queue ORDER BY job_id") == [{"priority": 5}, {"priority": 2}]


# What a batch may do with the cache


@pytest.mark.parametrize(
    ("mode", "roles"),
    [
        (CacheMode.on, {"source": 1, "follower": 2, "duplicate": 1}),
        (CacheMode.exact, {"source": 3, "duplicate": 1}),
        (CacheMode.readonly, {"source": 3, "duplicate": 1}),
        (CacheMode.off, {"source": 4}),
    ],
)
def test_modes_on_an_empty_cache(
    send: Send, database: Engine, embedder: Counting, mode: CacheMode, roles: dict[str, int]
) -> None:
    text = "prompt,seed\n" + "".join(f"{line},1\n" for line in [*NEAR.splitlines()[1:], NEAR.splitlines()[1]])
    stored = jobs(database, send(text, cache=mode))
    found = [job["role"] for job in stored]
    assert {role: found.count(role) for role in set(found)} == roles
    assert (embedder.asked == []) == (mode is CacheMode.off)


@pytest.mark.parametrize(
    ("mode", "follows"),
    [(CacheMode.on, True), (CacheMode.readonly, True), (CacheMode.exact, False), (CacheMode.off, False)],
)
def test_entries_of_earlier_batches_are_sources(
    send: Send, database: Engine, writer: Writer, mode: CacheMode, follows: bool
) -> None:
    send("prompt\na red circle moves right over a black background\n")
    assert run_all(writer, database) == 1
    (entry,) = rows(database, "SELECT id FROM cache_entries")
    done = send("prompt\na blue circle moves right over a black background\n", cache=mode)
    (job,) = jobs(database, done)
    assert done.forecast.followers_of_cache == int(follows)
    assert (job["role"], job["source_entry_id"]) == (("follower", entry["id"]) if follows else ("source", None))
    assert job["state"] == "ready"  # what it reuses is there already
    assert (job["similarity"] or 0) > 0.7 or not follows


def test_evicted_entries_are_no_sources(send: Send, database: Engine, writer: Writer) -> None:
    send("prompt\na red circle moves right over a black background\n")
    run_all(writer, database)
    with transaction(database) as connection:
        connection.execute(text("UPDATE cache_entries SET evicted_at = now(), evicted_reason = 'test'"))
    (job,) = jobs(database, send("prompt\na blue circle moves right over a black background\n"))
    assert job["role"] == "source"


def test_a_higher_threshold_reuses_less(send: Send, servers: Settings, database: Engine, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(NEAR)
    strict = replace(servers, min_similarity=0.99)
    done = submit(strict, database, [Source(tmp_path / "p.csv", "p.csv")], IngestOptions(CARD), SubmitOptions())
    assert (done.forecast.sources, done.forecast.followers) == (3, 0)


def test_vectors_are_kept_by_prompt(send: Send, database: Engine, embedder: Counting) -> None:
    send("prompt\na red circle\na  red   circle\nA red circle\n")
    assert embedder.asked == ["a red circle", "A red circle"]
    send("prompt\nA red circle\na green ring\n")
    assert embedder.asked == ["a red circle", "A red circle", "a green ring"]
    assert rows(database, "SELECT count(*) AS n FROM embeddings") == [{"n": 3}]
    (space,) = rows(database, "SELECT name, dimension FROM embedding_spaces")
    assert (space["name"], space["dimension"]) == (embedder.space, 384)


# What is reused under which policy


def test_the_same_rows_under_each_policy(send: Send, database: Engine, writer: Writer, embedder: Counting) -> None:
    """One domain is one policy: no batch follows another's entries or repeats its requests."""
    text = "prompt,seed\n" + "".join(f"{line},1\n" for line in [*NEAR.splitlines()[1:], NEAR.splitlines()[1]])
    roles = {}
    for policy in ("none", "nirvana", "chorus"):
        done = send(text, ingest={"policy": policy})
        stored = jobs(database, done)
        roles[policy] = sorted(job["role"] for job in stored)
        assert done.forecast.followers_of_cache == 0
        assert (embedder.asked == []) == (policy == "none")  # nothing is looked up, so nothing is embedded
        run_all(writer, database)
    assert roles == {
        "none": ["duplicate", "source", "source", "source"],
        "nirvana": ["duplicate", "follower", "follower", "source"],
        "chorus": ["duplicate", "follower", "follower", "source"],
    }
    domains = rows(database, "SELECT DISTINCT d.policy::text FROM jobs j JOIN domains d ON d.id = j.domain_id")
    assert {domain["policy"] for domain in domains} == {"none", "nirvana", "chorus"}
    assert rows(database, "SELECT count(*) AS n FROM domains") == [{"n": 3}]


def test_rows_of_several_policies_in_one_batch(send: Send, database: Engine) -> None:
    lines = "".join(
        f"a {colour} circle moves right over a black background,1,{policy}\n"
        for policy in ("none", "chorus")
        for colour in ("red", "blue", "red")
    )
    stored = jobs(database, send(f"prompt,seed,policy\n{lines}"))
    assert [job["role"] for job in stored[:3]] == ["source", "source", "duplicate"]
    assert sorted(job["role"] for job in stored[3:]) == ["duplicate", "follower", "source"]
    domain = {job["id"]: job["domain_id"] for job in stored}
    assert all(domain[job["source_job_id"]] == job["domain_id"] for job in stored if job["source_job_id"])


def test_without_reuse_entries_are_no_sources(send: Send, database: Engine, writer: Writer) -> None:
    """Not even those of its own domain, which a mixed batch left with a vector."""
    place = "circle moves right over a black background"
    send(f"prompt,policy\na red {place},none\na red {place},chorus\n")
    assert run_all(writer, database) == 2
    assert rows(database, "SELECT count(*) AS n FROM cache_entries") == [{"n": 2}]
    done = send(f"prompt,policy\na blue {place},none\na blue {place},chorus\n")
    assert [job["role"] for job in jobs(database, done)] == ["source", "follower"]


def test_a_step_cache_is_a_domain(send: Send, database: Engine) -> None:
    line = "a red circle moves right,1,"
    send(f"prompt,seed,step_cache\n{line}\n{line}teacache\n{line}none\n")
    found = rows(
        database, "SELECT step_cache, count(*) AS n FROM domains d JOIN jobs j ON j.domain_id = d.id GROUP BY 1"
    )
    assert {row["step_cache"]: row["n"] for row in found} == {"none": 2, "teacache": 1}


# What happens in the middle


def many(path: Path, count: int = 3000) -> Path:
    path.write_text("prompt,seed\n" + "".join(f"a red circle,{n}\n" for n in range(count)))
    return path


@pytest.fixture
def in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Do something once, when half of the rows have gone to Postgres."""

    def arrange(act: Callable[[], None]) -> None:
        through = batch._job_rows

        def interrupted(*values: Any) -> Iterator[tuple[Any, ...]]:
            for n, row in enumerate(through(*values)):
                if n == 1500:
                    act()
                yield row

        monkeypatch.setattr(batch, "_job_rows", interrupted)

    return arrange


def test_an_error_in_the_middle_of_storing_leaves_nothing(
    send: Send, database: Engine, tmp_path: Path, in_the_middle: Callable[[Callable[[], None]], None]
) -> None:
    def fail() -> None:
        raise RuntimeError("in the middle")

    path = many(tmp_path / "many.csv")
    with pytest.MonkeyPatch.context() as patch:
        in_the_middle(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            send(path)
        patch.undo()
    assert counts(database) == {"batches": 0, "jobs": 0, "queue": 0}


def test_a_connection_lost_in_the_middle_of_storing_leaves_nothing(
    send: Send, database: Engine, tmp_path: Path, migrated_url: str, in_the_middle: Callable[[Callable[[], None]], None]
) -> None:
    lost: list[int] = []

    def cut() -> None:
        """Ends the session that stores, once."""
        query = """
            SELECT pid, pg_terminate_backend(pid, 5000) FROM pg_stat_activity
            WHERE datname = current_database() AND query LIKE 'COPY jobs%%'
        """
        if not lost:
            with psycopg.connect(migrated_url, autocommit=True) as connection:
                lost.extend(row[0] for row in connection.execute(query))

    path = many(tmp_path / "many.csv")
    in_the_middle(cut)
    with pytest.raises(DependencyDown, match="database") as caught:
        send(path)
    assert caught.value.exit_code == 6 and len(lost) == 1
    assert counts(database) == {"batches": 0, "jobs": 0, "queue": 0}
    assert send(path).forecast.rows == 3000  # and can be done again
    assert counts(database) == {"batches": 1, "jobs": 3000, "queue": 3000}


def test_a_file_rewritten_meanwhile_changes_nothing(
    send: Send, database: Engine, tmp_path: Path, embedder: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was validated is what is stored."""
    path = tmp_path / "p.csv"
    path.write_text(NEAR)
    inner = embedder.inner.embed

    def rewrite(prompts: Sequence[str]) -> np.ndarray:
        path.write_text("nonsense")
        return inner(prompts)

    monkeypatch.setattr(embedder, "embed", rewrite)
    assert [job["prompt"] for job in jobs(database, send(path))] == NEAR.splitlines()[1:]
    assert path.read_text() == "nonsense"


PRODUCER = """
import sys
from pathlib import Path
from dataclasses import replace
from chorus_batch.jobs import batch, submission
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.database import connect
from chorus_batch.jobs.ingest.rows import IngestOptions, Source
from chorus_batch.jobs.models import CacheMode
from chorus_batch.jobs.settings import Settings
path, url = Path(sys.argv[1]), sys.argv[2]
through = batch._job_rows
def told(*values):
    for n, row in enumerate(through(*values)):
        if n == 10_000:
            print("halfway", flush=True)
        yield row
batch._job_rows = told
options = submission.SubmitOptions(cache=CacheMode.exact)
embedder = type("NoEmbedder", (), {"space": "none", "dimension": 2, "embed": lambda self, p: __import__("numpy").eye(2, dtype="f4")[[0] * len(p)]})
submission.make_embedder = lambda _: embedder()
submission.submit(Settings(), connect(url), [Source(path, "p.csv")], IngestOptions(load_card("builtin")), options)
print("done", flush=True)
"""


@pytest.mark.parametrize("when", ["halfway", "done"])
def test_a_killed_producer_stores_all_or_nothing(
    database: Engine, migrated_url: str, tmp_path: Path, when: str
) -> None:
    path = many(tmp_path / "many.csv", 20_000)
    process = subprocess.Popen(
        [sys.executable, "-c", PRODUCER, str(path), migrated_url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as told:
        while told.readline().strip() != when:
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    backends = (
        "SELECT count(*) AS n FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    while rows(database, backends)[0]["n"] and time.monotonic() < deadline:
        time.sleep(0.05)  # Postgres notices that its client is gone
    n = 0 if when == "halfway" else 20_000
    assert counts(database) == {"batches": min(n, 1), "jobs": n, "queue": n}


def test_a_database_that_is_away_is_named(servers: Settings, embedder: Counting, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(NEAR)
    away = connect("postgresql://u:secret@127.0.0.1:1/x")
    with pytest.raises(DependencyDown, match="database") as caught:
        submit(servers, away, [Source(tmp_path / "p.csv", "p.csv")], IngestOptions(CARD), SubmitOptions())
    away.dispose()
    assert caught.value.exit_code == 6 and "secret" not in str(caught.value) and embedder.asked == []


def test_a_source_is_claimed_as_urgently_as_its_most_urgent_follower(send: Send, database: Engine) -> None:
    header, *prompts = NEAR.splitlines()
    texts = [f"{header},priority", *(f"{prompt},{n}" for n, prompt in enumerate(prompts)), "a lone tree at night,1"]
    done = send("\n".join(texts) + "\n")
    stored = {job["id"]: job for job in jobs(database, done)}
    sources = {job["source_job_id"] for job in stored.values()} - {None}
    assert len(sources) == 1
    (source,) = sources
    queued = {row["job_id"]: row["priority"] for row in rows(database, "SELECT job_id, priority FROM queue")}
    assert queued[source] == max(queued.values()) == 2
    # The file's own word stays; and nobody else is hurried.
    assert [job["priority"] for job in stored.values()] == [0, 1, 2, 1]
    assert all(queued[job] == stored[job]["priority"] for job in queued if job != source)
    assert stored[source]["position"] == 0
