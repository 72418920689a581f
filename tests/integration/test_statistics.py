"""What is read back: progress, jobs, sums, and people's own SQL."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Engine, text

from chorus_batch.jobs import control, queue, statistics
from chorus_batch.jobs.claims import Claim
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.errors import DependencyDown, NotFound, UsageError
from chorus_batch.jobs.models import CacheResult
from chorus_batch.jobs.statistics import Progress, read_only_query

from .conftest import Part, Program, Writer, left, made

DETAILS = {
    "phrases": ["a red ball", "a blue ball"],
    "tokens": [2, 3],
    "gains": [[1.25, 1.1], [1.25, 1.1], *[[1.0, 1.0]] * 10],
    "visible": [0.375, 0.375, *[1.0] * 10],
    "regions": "f" * 64,
    "differ": "lexical",
}


@pytest.fixture
def mixed(writer: Writer, database: Engine) -> list[int]:
    """A batch with a miss, a semantic hit, an exact hit, a failure, one running, one waiting and one ready."""
    jobs = writer.batch(
        [Part(), Part(source=0), Part(source=0, role="duplicate"), Part(), Part(), Part(source=4), Part()], "mixed"
    )
    worker = writer.worker("w")

    def claim() -> Claim:
        with transaction(database) as connection:
            taken = queue.claim(connection, worker)
        assert taken is not None
        return taken

    def finish(taken: Claim, **changes: object) -> None:
        with transaction(database) as connection:
            entry = left(taken) if not changes else None
            queue.finish(connection, taken, made(taken, **changes), entry)

    finish(claim())
    with transaction(database) as connection:
        entry = connection.execute(text("SELECT id FROM cache_entries")).scalar_one()
    semantic = {"cache_result": CacheResult.semantic, "entry_id": entry, "similarity": 0.9, "k1": 8, "k2": 10}
    semantic |= {"kind": "attribute", "scope": "object", "details": DETAILS, "scores": {"colour": True, "shape": False}}
    semantic |= {"tokens_total": 400, "tokens_computed": 160}
    finish(claim(), **semantic, steps_computed=12, seconds={"denoise": 0.5, "lookup": 0.1}, seconds_total=0.75)
    finish(
        claim(), cache_result=CacheResult.exact, origin_job_id=jobs[0], steps_computed=0, seconds={}, seconds_total=0.25
    )
    failing = claim()
    with transaction(database) as connection:
        queue.fail(connection, failing, "out_of_memory", "no room", retry=False, max_failures=3)
    running = claim()
    assert running.job_id == jobs[4]
    return jobs


def progress(database: Engine, name: str = "mixed") -> Progress:
    with transaction(database) as connection:
        return statistics.progress(connection, statistics.find_batch(connection, name))


def test_counts_sum_to_the_total(mixed: list[int], database: Engine) -> None:
    found = progress(database)
    assert (found.state, found.total) == ("running", 7)
    assert (found.done, found.failed, found.running, found.queued) == (3, 1, 1, 2)
    assert (found.quarantined, found.cancelled) == (0, 0)
    assert found.finished + found.running + found.queued == found.total
    assert (found.hits, found.exact_hits, found.workers) == (2, 1, 1)
    assert (found.steps_total, found.steps_skipped) == (60, 28)
    assert found.seconds_compute == pytest.approx(2.5)
    assert not found.is_over


def test_states_of_a_batch(mixed: list[int], database: Engine) -> None:
    batch_id = progress(database).batch_id
    control.pause(database, batch_id)
    paused = progress(database)
    assert (paused.state, paused.queued, paused.running) == ("paused", 2, 1)
    control.resume(database, batch_id)
    assert progress(database).state == "running"
    assert control.cancel(database, batch_id) == 3
    over = progress(database)
    assert (over.state, over.cancelled, over.done, over.failed) == ("cancelled", 3, 3, 1)
    assert over.is_over and over.finished == over.total


def test_a_finished_batch_has_stopped_its_clock(writer: Writer, database: Engine) -> None:
    writer.batch([Part()], "short")
    with transaction(database) as connection:
        taken = queue.claim(connection, writer.worker("w"))
        assert taken is not None
        queue.finish(connection, taken, made(taken), left(taken))
    first = progress(database, "short")
    time.sleep(0.05)
    assert first.state == "finished" and progress(database, "short").elapsed == first.elapsed > 0


def test_a_finished_batch_is_not_cancelled_and_can_be_retried(writer: Writer, database: Engine) -> None:
    writer.batch([Part()], "short")
    with transaction(database) as connection:
        taken = queue.claim(connection, writer.worker("w"))
        assert taken is not None
        queue.fail(connection, taken, "video", "broken", retry=False, max_failures=3)
    batch_id = progress(database, "short").batch_id
    assert control.cancel(database, batch_id) == 0
    assert progress(database, "short").state == "finished"
    assert control.retry(database, batch_id) == 1
    assert progress(database, "short").state == "running"


def test_a_paused_batch_stays_paused_when_jobs_are_retried(mixed: list[int], database: Engine, writer: Writer) -> None:
    batch_id = progress(database).batch_id
    control.pause(database, batch_id)
    assert control.retry(database, batch_id, "another_code") == 0
    assert control.retry(database, batch_id, "out_of_memory") == 1
    assert writer.state(mixed[3]) == "paused"
    control.resume(database, batch_id)
    assert writer.state(mixed[3]) == "ready"


def test_batches_come_newest_first(writer: Writer, database: Engine) -> None:
    for name in ("one", "two", "three"):
        writer.batch([Part()], name)
    with transaction(database) as connection:
        assert [found.name for found in statistics.batches(connection)] == ["three", "two", "one"]
        assert [found.name for found in statistics.batches(connection, 1)] == ["three"]


def test_jobs_in_row_order(mixed: list[int], database: Engine) -> None:
    with transaction(database) as connection:
        batch_id = statistics.find_batch(connection, "mixed")
        rows = list(statistics.jobs(connection, batch_id))
        failed = list(statistics.jobs(connection, batch_id, state="failed"))
        coded = list(statistics.jobs(connection, batch_id, code="out_of_memory"))
        none = list(statistics.jobs(connection, batch_id, state="done", code="out_of_memory"))
    assert [row["job"] for row in rows] == mixed
    assert [row["state"] for row in rows] == ["done", "done", "done", "failed", "running", "waiting", "ready"]
    assert [row["cache_result"] for row in rows] == ["miss", "semantic", "exact", None, None, None, None]
    assert (rows[1]["source"], rows[1]["similarity"], rows[1]["steps_computed"]) == (mixed[0], 0.9, 12)
    assert (rows[2]["origin_job_id"], rows[2]["steps_total"]) == (mixed[0], 20)
    assert {row["policy"] for row in rows} == {"chorus"} and {row["step_cache"] for row in rows} == {"none"}
    assert [(row["kind"], row["scope"]) for row in rows[:2]] == [(None, None), ("attribute", "object")]
    assert (rows[1]["details"], rows[1]["scores"]) == (DETAILS, {"colour": True, "shape": False})
    assert (rows[1]["k1"], rows[1]["k2"], rows[1]["tokens_total"], rows[1]["tokens_computed"]) == (8, 10, 400, 160)
    assert (rows[0]["details"], rows[0]["scores"], rows[3]["details"]) == ({}, None, None)
    assert failed == coded and [(row["job"], row["error_message"]) for row in failed] == [(mixed[3], "no room")]
    assert none == []


def test_one_job_whole(mixed: list[int], database: Engine) -> None:
    with transaction(database) as connection:
        hit, failed, ready = (statistics.job(connection, mixed[n]) for n in (1, 3, 6))
    assert (hit["batch"], hit["state"], hit["prompt"]) == ("mixed", "done", "mixed prompt 1")
    assert (hit["domain"]["policy"], hit["domain"]["step_cache"]) == ("chorus", "none")
    assert (hit["generation"]["kind"], hit["generation"]["scope"]) == ("attribute", "object")
    assert (hit["generation"]["details"], hit["generation"]["scores"]["shape"]) == (DETAILS, False)
    assert hit["domain"]["steps"] == 20 and "space_id" not in hit["domain"]
    assert hit["generation"]["cache_result"] == "semantic" and hit["generation"]["seconds"]["denoise"] == 0.5
    assert hit["entry"]["job_id"] == mixed[0] and "embedding" not in hit["entry"]
    (attempt,) = hit["attempts"]
    assert (attempt["attempt"], attempt["result"], attempt["worker_id"]) == (1, "done", "w")
    assert (failed["generation"], failed["attempts"][0]["error_code"]) == (None, "out_of_memory")
    assert (ready["attempts"], ready["entry"], ready["state"]) == ([], None, "ready")


def test_a_job_as_a_person_sees_it(mixed: list[int], program: Program) -> None:
    miss, hit, ready = (program("show", str(mixed[n])) for n in (0, 1, 6))
    for line in (
        "  policy      chorus\n",
        "              steps 0..8 of 20 taken from it\n",
        "              steps 8..10 computed where the prompts differ, the rest taken from it\n",
        '  difference  attribute, object, "a red ball" became "a blue ball"\n',
        "  amplified   tokens 2, 3\n",
        "  gains       of keys   2 x 1.25, 10 x 1\n",
        "              of output 2 x 1.1, 10 x 1\n",
        "  visible     2 x 0.375, 10 x 1 of the tokens\n",
        f"  masks       sha256 {'f' * 64}\n",
        "  differ      lexical\n",
        "160 of 400 tokens",
        "  attributes  colour right, shape WRONG\n",
    ):
        assert line in hit, line
    for label in ("difference", "amplified", "gains", "visible", "masks", "attributes", "where the prompts differ"):
        assert label not in miss
    assert "policy      chorus" in ready and "computed" not in ready
    stored = json.loads(program("show", str(mixed[1]), "--json"))
    assert (stored["generation"]["details"], stored["domain"]["policy"]) == (DETAILS, "chorus")
    listed = [json.loads(line) for line in program("jobs", "mixed", "--json").splitlines()]
    assert (listed[1]["details"], listed[1]["scores"], listed[1]["policy"]) == (
        DETAILS,
        {"colour": True, "shape": False},
        "chorus",
    )


def test_finding(mixed: list[int], database: Engine, writer: Writer) -> None:
    writer.batch([Part()], "1")
    with transaction(database) as connection:
        mixed_id = statistics.find_batch(connection, "mixed")
        assert statistics.find_batch(connection, str(mixed_id + 1)) == mixed_id + 1
        if mixed_id == 1:
            assert statistics.find_batch(connection, "1") == 2  # a name wins over a number
        assert statistics.find_job(connection, str(mixed[2])) == mixed[2]
        assert statistics.find_job(connection, "mixed/3") == mixed[2]
        for name in ("nothing", "", "-1", "99", "9" * 30, "٣", "mixed/99"):
            with pytest.raises(NotFound):
                statistics.find_batch(connection, name)
        for name in ("0", "mixed/99", "none/1", "", "9" * 30, "/"):
            with pytest.raises(NotFound):
                statistics.find_job(connection, name)


def test_sums_agree_with_the_views(mixed: list[int], database: Engine, writer: Writer) -> None:
    writer.batch([Part()], "other")
    with transaction(database) as connection:
        batch_id = statistics.find_batch(connection, "mixed")
        totals = statistics.totals(connection)
        of_one = statistics.totals(connection, batch_id)
        phases = statistics.seconds_by_phase(connection, batch_id)
        (view,) = connection.execute(text("SELECT * FROM cache_hits_by_batch WHERE batch = 'mixed'")).mappings()
        (day,) = connection.execute(text("SELECT * FROM cache_hits_by_day")).mappings()
        (block,) = connection.execute(text("SELECT * FROM hit_rate_per_100")).mappings()
        (entry,) = connection.execute(text("SELECT * FROM savings_by_entry")).mappings()
    assert (of_one["jobs"], of_one["finished"], of_one["hits"]) == (7, 3, 2)
    assert (of_one["semantic_hits"], of_one["exact_hits"], of_one["misses"]) == (1, 1, 1)
    assert of_one["hit_rate"] == pytest.approx(2 / 3)
    assert (of_one["steps_total"], of_one["steps_skipped"]) == (60, 28)
    assert of_one["steps_skipped_share"] == pytest.approx(28 / 60)
    assert of_one["seconds"] == pytest.approx(2.5)
    assert (of_one["tokens_total"], of_one["tokens_computed"]) == (400, 160)
    assert of_one["tokens_skipped_share"] == pytest.approx(0.6)
    assert {*view} - {*of_one} == {"batch_id", "batch"}  # whatever is counted in the view is counted here
    for name, value in of_one.items():
        if name in view and name != "batches":
            assert view[name] == value, name
    assert totals == {**of_one, "batches": 2, "jobs": 8}
    assert phases == {"denoise": 1.5, "lookup": 0.1}
    assert {name: day[name] for name in ("finished", "hits", "steps_skipped")} == {
        "finished": 3,
        "hits": 2,
        "steps_skipped": 28,
    }
    assert (block["block"], block["jobs"], block["hits"]) == (0, 3, 2)
    assert (entry["hits"], entry["steps_skipped"], entry["source_job_id"]) == (1, 8, mixed[0])
    assert entry["tokens_skipped"] == 240


def test_sums_of_nothing(database: Engine) -> None:
    with transaction(database) as connection:
        totals = statistics.totals(connection)
        sums = statistics.cache_totals(connection)
        assert statistics.seconds_by_phase(connection) == {}
        assert statistics.batches(connection) == [] and statistics.entries(connection) == []
    assert totals["hit_rate"] is None and totals["finished"] == totals["hits"] == 0
    assert totals["tokens_skipped_share"] is None and totals["tokens_total"] == totals["tokens_computed"] == 0
    assert set(sums) == {"entries", "evicted", "bytes", "hits", "steps_skipped", "tokens_skipped", "never_used"}
    assert set(sums.values()) == {0}


def test_the_cache_in_sums(mixed: list[int], database: Engine) -> None:
    with transaction(database) as connection:
        sums = statistics.cache_totals(connection)
        (entry,) = statistics.entries(connection)
    counts = {"entries": 1, "evicted": 0, "bytes": 1, "hits": 1, "steps_skipped": 8, "never_used": 0}
    assert sums == {**counts, "tokens_skipped": 240}
    assert (entry["hits"], entry["bytes"], entry["prompt"]) == (1, 1, "mixed prompt 0")


def test_blocks_hold_a_hundred_jobs_in_order_of_their_end(writer: Writer, database: Engine) -> None:
    """Every fifth job of the first hundred is a hit, every one after that."""
    jobs = writer.batch([Part() for _ in range(205)])
    worker = writer.worker("w")
    with transaction(database) as connection:
        for n in range(205):
            taken = queue.claim(connection, worker)
            assert taken is not None and taken.job_id == jobs[n]
            hit = n >= 100 or n % 5 == 4
            record = made(taken)
            if hit:
                record = replace(record, cache_result=CacheResult.exact, origin_job_id=jobs[0], steps_computed=0)
            queue.finish(connection, taken, record)
        blocks = connection.execute(
            text("SELECT block, jobs, hits, hit_rate FROM hit_rate_per_100 ORDER BY block")
        ).all()
    assert [tuple(block) for block in blocks] == [(0, 100, 20, 0.2), (1, 100, 100, 1.0), (2, 5, 5, 1.0)]


# People's own SQL


def ask(database: Engine, query: str, timeout: float = 10.0) -> tuple[list[str], list[tuple[object, ...]]]:
    with transaction(database) as connection:
        return read_only_query(connection, query, timeout)


def test_a_query_of_ones_own(mixed: list[int], database: Engine) -> None:
    columns, rows = ask(database, "SELECT hits, hit_rate FROM hit_rate_per_100;")
    assert columns == ["hits", "hit_rate"] and rows == [(2, pytest.approx(2 / 3))]
    assert ask(database, "SELECT 1 AS a, 2 AS a, 'x%sy' AS b -- a comment") == (["a", "a", "b"], [(1, 2, "x%sy")])
    assert ask(database, "SELECT id FROM jobs WHERE false") == (["id"], [])
    assert ask(database, "TABLE embedding_spaces")[1][0][1] == "test"
    assert ask(database, "EXPLAIN SELECT 1")[0] == ["QUERY PLAN"]
    assert ask(database, "SELECT ARRAY[1, 2], NULL, 1.50, DATE '2026-01-02', '{\"a\": 1}'::jsonb")[1][0][4] == {"a": 1}
    assert ask(database, "SELECT current_user")[1] == [("chorus_reader",)]


def test_all_tables_and_views_can_be_read(database: Engine) -> None:
    query = "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'v')"
    names = [str(row[0]) for row in ask(database, query)[1]]
    assert len(names) == 16
    for name in names:
        if name != "alembic_version":
            assert ask(database, f"SELECT count(*) FROM {name}")[1] == [(0,)]


REFUSED = {
    "INSERT INTO embedding_spaces (name, dimension) VALUES ('x', 1)": "returns no rows",
    "INSERT INTO embedding_spaces (name, dimension) VALUES ('x', 1) RETURNING id": "INSERT",
    "UPDATE jobs SET prompt = 'x'": "returns no rows",
    "UPDATE jobs SET prompt = 'x' RETURNING id": "UPDATE",
    "DELETE FROM jobs RETURNING id": "DELETE",
    "WITH gone AS (DELETE FROM jobs RETURNING id) SELECT * FROM gone": "read-only",
    "EXPLAIN ANALYZE DELETE FROM jobs": "DELETE",
    "MERGE INTO jobs USING (SELECT 1) x ON true WHEN MATCHED THEN DELETE RETURNING id": "MERGE",
    "DROP TABLE jobs": "returns no rows",
    "TRUNCATE jobs": "returns no rows",
    "CREATE TABLE x AS SELECT 1": "returns no rows",
    "SELECT 1 AS x INTO y": "returns no rows",
    "CREATE TEMP TABLE x (a int)": "returns no rows",
    "COPY (SELECT 1) TO PROGRAM 'touch {mark}'": "returns no rows",
    "COPY (SELECT 1) TO '{mark}'": "returns no rows",
    "COPY (SELECT 1) TO STDOUT": "returns no rows",
    "SELECT 1; DROP TABLE jobs": "multiple commands",
    "RESET ROLE; COPY (SELECT 1) TO PROGRAM 'touch {mark}'": "multiple commands",
    "COMMIT; DROP TABLE jobs": "multiple commands",
    "SELECT 1); DROP TABLE jobs; SELECT (1": "syntax error",
    "RESET ROLE": "returns no rows",
    "SET ROLE chorus": "returns no rows",
    "SET SESSION AUTHORIZATION DEFAULT": "returns no rows",
    "SET TRANSACTION READ WRITE": "returns no rows",
    "COMMIT": "returns no rows",
    "DO $$ BEGIN RESET ROLE; COPY (SELECT 1) TO PROGRAM 'touch {mark}'; END $$": "returns no rows",
    "SELECT set_config('role', 'none', true)": "security-definer",
    "SELECT set_config('role', 'none', false)": "security-definer",
    "SELECT pg_catalog.\"set_config\"('role', 'chorus', false)": "security-definer",
    "SELECT set_config('session_authorization', 'chorus', false)": "security-definer",
    "SELECT set_config('role', 'none', true), query_to_xml('SELECT pg_read_file(''/etc/passwd'')', true, false, '')": "security-definer",
    "SELECT query_to_xml('SELECT pg_read_file(''/etc/passwd'')', true, false, '')": "permission denied",
    "SELECT query_to_xml('RESET ROLE', true, false, '')": "not allowed",
    "SELECT set_config('transaction_read_only', 'off', true)": "transaction read-write mode",
    "SELECT pg_read_file('/etc/passwd')": "permission denied",
    "SELECT pg_ls_dir('/')": "permission denied",
    "SELECT lo_export(1, '{mark}')": "permission denied",
    "SELECT lo_from_bytea(0, 'x')": "read-only",
    "SELECT rolpassword FROM pg_authid": "permission denied",
    "SELECT nextval('jobs_id_seq')": "permission denied",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'chorus'": "permission denied",
    "SELECT pg_reload_conf()": "permission denied",
    "SELECT * FROM jobs FOR UPDATE": "FOR UPDATE",
    "LOCK TABLE jobs": "returns no rows",
    "CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql AS 'SELECT 1'": "returns no rows",
    "": "returns no rows",
    "-- nothing": "returns no rows",
    "SELECT $1": "parameter",
    "SELECT '\udcff'": "isn't text",
}


@pytest.fixture
def kept(mixed: list[int], database: Engine) -> Iterator[None]:
    """Everything is as it was."""
    count = "SELECT (SELECT count(*) FROM jobs WHERE prompt <> 'x'), (SELECT count(*) FROM pg_class WHERE relpersistence = 'p')"
    with transaction(database) as connection:
        before = connection.execute(text(count)).one()
    yield
    with transaction(database) as connection:
        assert connection.execute(text("SELECT current_user, current_setting('transaction_read_only')")).one() == (
            "chorus",
            "off",
        )
        assert connection.execute(text(count)).one() == before


@pytest.mark.usefixtures("kept")
def test_what_may_not_be_done(database: Engine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    mark = Path(f"/tmp/chorus-test-mark-{time.time_ns()}")
    allowed = []
    for query, why in REFUSED.items():
        try:
            answer = ask(database, query.replace("{mark}", str(mark)))
        except UsageError as error:
            if why not in str(error) or error.code != "sql":
                allowed.append((query, str(error)))
        else:
            allowed.append((query, str(answer)))
    assert allowed == []
    assert not mark.exists()


def test_errors_say_where(database: Engine) -> None:
    with pytest.raises(UsageError, match=r'column "hitz" does not exist \(at character 8\)') as caught:
        ask(database, "SELECT hitz FROM hit_rate_per_100")
    assert caught.value.exit_code == 2 and "hits" in caught.value.hint
    with pytest.raises(UsageError, match=r'syntax error at or near "SELEC" \(at character 1\)'):
        ask(database, "SELEC 1")
    with pytest.raises(UsageError, match="division by zero"):
        ask(database, "SELECT 1 / count(*) FROM jobs")


def test_a_query_has_its_time(database: Engine) -> None:
    began = time.monotonic()
    with pytest.raises(UsageError, match="statement timeout"):
        ask(database, "SELECT count(*) FROM generate_series(1, 100000000000)", timeout=0.2)
    assert time.monotonic() - began < 5
    with transaction(database) as connection:  # and the next user of the connection has all of it again
        assert connection.execute(text("SHOW statement_timeout")).scalar() == "0"


def test_a_server_that_goes_away_is_no_mistake_in_the_query(database: Engine, migrated_url: str) -> None:
    def cut() -> None:
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%chorus_read($1)%' AND pid <> pg_backend_pid()"
        with psycopg.connect(migrated_url, autocommit=True) as connection:
            for _ in range(200):
                if connection.execute(query).fetchall():
                    return
                time.sleep(0.02)

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(DependencyDown):
        ask(database, "SELECT count(*) FROM generate_series(1, 100000000000)")
    cutter.join()


def test_a_database_without_the_reader_is_still_read_only(mixed: list[int], database: Engine) -> None:
    """As on a managed server that lets nobody make roles: the transaction's own mode is what is left."""
    with database.connect() as connection:
        connection.execute(text("CREATE ROLE poor LOGIN"))
        try:
            connection.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO poor"))
            connection.execute(text("SET LOCAL SESSION AUTHORIZATION poor"))
            assert read_only_query(connection, "SELECT count(*) FROM jobs")[1] == [(7,)]
            with pytest.raises(UsageError, match="read-only"):
                read_only_query(connection, "DELETE FROM jobs RETURNING id")
        finally:
            connection.rollback()
