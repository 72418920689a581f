"""The look-up of the nearest cached prompt, against a real Postgres with pgvector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, event, text

from chorus_batch.jobs import cache, queue
from chorus_batch.jobs.cards.card import load_card
from chorus_batch.jobs.claims import Claim
from chorus_batch.jobs.database import transaction
from chorus_batch.jobs.models import Reuse
from chorus_batch.jobs.neighbours import Neighbour, NeighbourSearch
from chorus_batch.jobs.parameters import POLICIES, STEP_CACHES, Parameters, domain_key

from .conftest import DIMENSION, Part, Writer, left, made

EXACT, APPROXIMATE = 100_000, 0
MODES = pytest.mark.parametrize("exact_rows", [EXACT, APPROXIMATE], ids=["exact", "approximate"])


def unit(angle: float) -> list[float]:
    """A vector whose cosine with [1, 0, 0, 0] is cos(angle), angle in degrees."""
    return [float(np.cos(np.radians(angle))), float(np.sin(np.radians(angle))), 0.0, 0.0]


def run_all(writer: Writer, database: Engine, parts: Sequence[Part], name: str = "cached") -> list[int]:
    """Let each part be computed and leave a cache entry; the ids of the jobs."""
    jobs = writer.batch(parts, name)
    worker = writer.worker(f"worker of {name}")
    for _ in parts:
        with transaction(database) as connection:
            taken = queue.claim(connection, worker)
            assert taken is not None
            queue.finish(connection, taken, made(taken), left(taken))
    return jobs


def asking(writer: Writer, database: Engine, part: Part, name: str = "asking") -> Claim:
    """The claim of a job that looks for a neighbour."""
    (job,) = writer.batch([part], name)
    with transaction(database) as connection:
        taken = queue.claim(connection, writer.worker(f"worker of {name}"))
    assert taken is not None and taken.job_id == job
    return taken


def nearest(database: Engine, taken: Claim, exact_rows: int, least: float = 0.5) -> Neighbour | None:
    with transaction(database) as connection:
        return next(iter(NeighbourSearch(exact_rows).nearest(connection, taken, least, 1)), None)


@MODES
def test_the_most_similar_entry_is_found(writer: Writer, database: Engine, exact_rows: int) -> None:
    jobs = run_all(writer, database, [Part(vector=unit(angle)) for angle in (50, 10, 30, 80)])
    found = nearest(database, asking(writer, database, Part(vector=unit(0))), exact_rows)
    assert found is not None
    assert found.job_id == jobs[1]
    assert found.similarity == pytest.approx(np.cos(np.radians(10)), abs=1e-6)
    assert (found.steps, found.object.sha256, found.object.size) == ((6, 8), "c", 1)
    assert found.object.key == f"entry/{jobs[1]}/1"


@MODES
def test_the_next_ones_follow_and_the_planned_one_is_always_among_them(
    writer: Writer, database: Engine, exact_rows: int
) -> None:
    jobs = run_all(writer, database, [Part(vector=unit(angle)) for angle in (50, 10, 30, 55)])
    taken = asking(writer, database, Part(vector=unit(0)))

    def found(taken: Claim, least: float = 0.0) -> list[int]:
        with transaction(database) as connection:
            search = NeighbourSearch(exact_rows)
            return [each.job_id for each in search.nearest(connection, taken, least, 2)]

    assert found(taken) == [jobs[1], jobs[2]]
    assert found(replace(taken, planned_job_id=jobs[2])) == [jobs[1], jobs[2]]
    assert found(replace(taken, planned_job_id=jobs[3])) == [jobs[1], jobs[2], jobs[3]]
    with transaction(database) as connection:
        entry = connection.execute(
            text("SELECT id FROM cache_entries WHERE job_id = :job"), {"job": jobs[0]}
        ).scalar_one()
    assert found(replace(taken, source_entry_id=entry)) == [jobs[1], jobs[2], jobs[0]]
    assert found(replace(taken, source_entry_id=entry), 0.9) == [jobs[1]]  # planned, and yet too far away


@MODES
def test_nothing_below_the_least_similarity(writer: Writer, database: Engine, exact_rows: int) -> None:
    run_all(writer, database, [Part(vector=unit(60))])
    taken = asking(writer, database, Part(vector=unit(0)))
    assert nearest(database, taken, exact_rows, 0.51) is None
    assert nearest(database, taken, exact_rows, 0.49) is not None


@MODES
def test_an_empty_cache_has_no_neighbour(writer: Writer, database: Engine, exact_rows: int) -> None:
    assert nearest(database, asking(writer, database, Part(vector=unit(0))), exact_rows, -1.0) is None


@MODES
def test_a_prompt_without_a_vector_has_no_neighbour(writer: Writer, database: Engine, exact_rows: int) -> None:
    run_all(writer, database, [Part(vector=unit(1))])
    taken = asking(writer, database, Part(vector=unit(0)))
    with transaction(database) as connection:
        connection.execute(text("DELETE FROM embeddings WHERE prompt_key = :key"), {"key": taken.prompt_key})
    assert nearest(database, taken, exact_rows, -1.0) is None


@MODES
def test_other_domains_do_not_count(writer: Writer, database: Engine, exact_rows: int) -> None:
    jobs = run_all(writer, database, [Part(vector=unit(1), domain="b"), Part(vector=unit(30))])
    found = nearest(database, asking(writer, database, Part(vector=unit(0))), exact_rows)
    assert found is not None and found.job_id == jobs[1]


@MODES
def test_evicted_entries_do_not_count(writer: Writer, database: Engine, exact_rows: int) -> None:
    jobs = run_all(writer, database, [Part(vector=unit(1)), Part(vector=unit(30))])
    taken = asking(writer, database, Part(vector=unit(0)))
    first = nearest(database, taken, exact_rows)
    assert first is not None and first.job_id == jobs[0]
    with transaction(database) as connection:
        cache.evict(connection, first.entry_id, "damaged")
    second = nearest(database, taken, exact_rows)
    assert second is not None and second.job_id == jobs[1]


@MODES
def test_the_same_prompt_with_another_seed_only_if_the_row_asks(
    writer: Writer, database: Engine, exact_rows: int
) -> None:
    jobs = run_all(writer, database, [Part(prompt="a cat", vector=unit(0), seed=1), Part(vector=unit(30))])
    taken = asking(writer, database, Part(prompt="a cat", vector=unit(0), seed=2))
    found = nearest(database, taken, exact_rows)
    assert found is not None and found.job_id == jobs[1]
    forced = nearest(database, replace(taken, reuse=Reuse.force), exact_rows)
    assert forced is not None and forced.job_id == jobs[0] and forced.similarity == pytest.approx(1.0)


@MODES
def test_its_own_entry_is_no_neighbour(writer: Writer, database: Engine, exact_rows: int) -> None:
    """A job that runs again (its video was lost) must not start from what it left itself."""
    run_all(writer, database, [Part(prompt="a cat", vector=unit(0), seed=1)])
    taken = asking(writer, database, Part(prompt="a cat", vector=unit(0), seed=1))
    for reuse in (Reuse.auto, Reuse.force):
        assert nearest(database, replace(taken, reuse=reuse), exact_rows) is None


def fill(database: Engine, count: int, domain_id: int, space: int, rng: np.random.Generator) -> None:
    """Entries with random vectors, straight into the table."""
    vectors = rng.standard_normal((count, DIMENSION))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    insert = """
        INSERT INTO cache_entries
            (domain_id, space_id, job_id, prompt, prompt_key, seed, embedding, steps, object_key, sha256, size)
        VALUES (:domain, :space, 0, 'p', CAST(:key AS bytea), 0, CAST(:vector AS vector), '{6}', :key, '', 1)
    """
    rows = [
        {"domain": domain_id, "space": space, "key": f"{domain_id}-{n}", "vector": str(list(map(float, vector)))}
        for n, vector in enumerate(vectors)
    ]
    with transaction(database) as connection:
        connection.execute(text(insert), rows)


def test_the_approximate_index_serves_a_small_domain_of_a_large_space(writer: Writer, database: Engine) -> None:
    """Without iterative scans a filter that few rows pass leaves nothing of the index's first candidates."""
    rng = np.random.default_rng(1)
    jobs = run_all(writer, database, [Part(vector=unit(89), domain="small"), Part(vector=unit(1), domain="large")])
    with transaction(database) as connection:
        large = connection.execute(text("SELECT id, space_id FROM domains WHERE key = 'large'")).one()
    fill(database, 4000, large.id, large.space_id, rng)
    taken = asking(writer, database, Part(vector=unit(0), domain="small"))
    plans: list[str] = []
    with transaction(database) as connection:
        connection.execute(text("ANALYZE cache_entries"))
        # What the planner would choose for millions of entries: the B-tree of a domain is no way to sort them.
        connection.execute(text("SET LOCAL enable_sort = off"))

        def explain(_connection: object, cursor: object, statement: str, values: object, *_: object) -> None:
            if "ORDER BY e.embedding" in statement:
                driver = cursor.connection  # type: ignore[attr-defined]
                plans.extend(row[0] for row in driver.execute(f"EXPLAIN {statement}", values))

        event.listen(connection, "before_cursor_execute", explain)
        found = NeighbourSearch(APPROXIMATE).nearest(connection, taken, 0.0, 1)
    assert [each.job_id for each in found] == jobs[:1]
    assert any(f"ix_cache_entries_space_{taken.domain.space_id}" in line for line in plans)


def test_the_approximate_search_agrees_with_the_exact_one(writer: Writer, database: Engine) -> None:
    rng = np.random.default_rng(2)
    run_all(writer, database, [Part(vector=unit(0))])
    with transaction(database) as connection:
        domain = connection.execute(text("SELECT id, space_id FROM domains")).one()
    fill(database, 2000, domain.id, domain.space_id, rng)
    for n in range(10):
        vector = rng.standard_normal(DIMENSION).astype(float)
        taken = asking(writer, database, Part(vector=list(vector / np.linalg.norm(vector))), f"asking {n}")
        exact, near = (nearest(database, taken, rows, -1.0) for rows in (EXACT, APPROXIMATE))
        assert exact is not None and near is not None
        assert near.entry_id == exact.entry_id
        assert near.similarity == pytest.approx(exact.similarity, abs=1e-6)


# Law 8: no reuse across domains. Whatever must be equal changes the domain's key.

CARD = load_card("builtin")
SPACE = "minilm"
OTHER: dict[str, st.SearchStrategy[object]] = {
    "width": st.integers(1, 4096),
    "height": st.integers(1, 4096),
    "frames": st.integers(0, 100).map(lambda k: 4 * k + 1),
    "steps": st.integers(1, 1000),
    "guidance_scale": st.floats(0, 30),
    "shift": st.floats(0.01, 100),
    "scheduler": st.sampled_from(["unipc", "dpm", "euler "]),
    "negative_prompt": st.text(min_size=1),
    "policy": st.sampled_from(POLICIES),
    "step_cache": st.sampled_from(STEP_CACHES),
}


@pytest.mark.parametrize("name", [f.name for f in fields(Parameters) if f.name not in ("fps", "model")])
def test_law_8_every_parameter_parts_domains(name: str) -> None:
    @given(OTHER[name])
    def parted(value: object) -> None:
        changed = replace(CARD.defaults, **{name: value})
        same = changed == CARD.defaults
        assert (domain_key(changed, CARD, SPACE) == domain_key(CARD.defaults, CARD, SPACE)) == same

    parted()


def test_law_8_the_model_parts_domains() -> None:
    key = domain_key(CARD.defaults, CARD, SPACE)
    other = replace(CARD, name="other", defaults=replace(CARD.defaults, model="other"))
    assert domain_key(other.defaults, other, SPACE) != key
    assert domain_key(CARD.defaults, replace(CARD, fingerprint="0" * 64), SPACE) != key
    assert domain_key(CARD.defaults, replace(CARD, dtype="bfloat16"), SPACE) != key
    assert domain_key(CARD.defaults, CARD, "clip") != key


def test_the_frame_rate_parts_no_domains() -> None:
    key = domain_key(CARD.defaults, CARD, SPACE)
    assert domain_key(replace(CARD.defaults, fps=24), CARD, SPACE) == key
