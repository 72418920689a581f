"""The cache's memory: embedding spaces, domains, prompt vectors and entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pgvector import Vector
from pgvector.psycopg import register_vector
from sqlalchemy import Connection, text

from chorus_batch.jobs.claims import DomainRecord
from chorus_batch.jobs.storage import StoredObject


def register_space(connection: Connection, name: str, dimension: int) -> int:
    """The id of an embedding space; a new one gets its approximate index."""
    known = text("SELECT id FROM embedding_spaces WHERE name = :name")
    space = connection.execute(known, {"name": name}).scalar()
    if space is not None:
        return int(space)
    # Not INSERT .. ON CONFLICT: two first submits at once would both try to make the index.
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('chorus-batch embedding spaces'))"))
    space = connection.execute(known, {"name": name}).scalar()
    if space is not None:
        return int(space)
    space = connection.execute(
        text("INSERT INTO embedding_spaces (name, dimension) VALUES (:name, :dimension) RETURNING id"),
        {"name": name, "dimension": dimension},
    ).scalar_one()
    connection.execute(
        text(
            f"CREATE INDEX ix_cache_entries_space_{int(space)} ON cache_entries"
            f" USING hnsw ((embedding\\:\\:vector({int(dimension)})) vector_cosine_ops)"
            f" WHERE space_id = {int(space)} AND evicted_at IS NULL"
        )
    )
    return int(space)


def register_domain(connection: Connection, space_id: int, key: str, values: Mapping[str, Any]) -> int:
    """The id of the domain `key`; `values` are the columns of DomainRecord without id, key and space."""
    columns = {**values, "key": key, "space_id": space_id}
    insert = (
        f"INSERT INTO domains ({', '.join(columns)}) VALUES ({', '.join(':' + c for c in columns)})"
        " ON CONFLICT (key) DO NOTHING"
    )
    connection.execute(text(insert), columns)
    return int(connection.execute(text("SELECT id FROM domains WHERE key = :key"), {"key": key}).scalar_one())


def domain(connection: Connection, domain_id: int) -> DomainRecord:
    """One domain's values."""
    row = connection.execute(text("SELECT * FROM domains WHERE id = :id"), {"id": domain_id}).one()
    return DomainRecord(**dict(row._mapping))


def stored_vectors(connection: Connection, space_id: int, prompt_keys: Sequence[bytes]) -> dict[bytes, np.ndarray]:
    """The vectors [dimension] float32 of those prompts that were embedded before."""
    driver = connection.connection.driver_connection
    assert driver is not None
    register_vector(driver)
    # Binary: parsing the text form of a vector takes fifty times as long.
    found = driver.cursor(binary=True).execute(
        "SELECT prompt_key, embedding FROM embeddings WHERE space_id = %s AND prompt_key = ANY(%s)",
        (space_id, list(prompt_keys)),
    )
    return {bytes(key): _array(vector) for key, vector in found}


def store_vectors(connection: Connection, space_id: int, prompt_keys: Sequence[bytes], vectors: np.ndarray) -> None:
    """Add vectors [n, dimension]; those that another command added meanwhile are kept."""
    driver = connection.connection.driver_connection
    assert driver is not None
    register_vector(driver)
    with driver.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE new_embeddings (prompt_key bytea, embedding vector) ON COMMIT DROP")
        with cursor.copy("COPY new_embeddings FROM STDIN WITH (FORMAT BINARY)") as copy:
            copy.set_types(["bytea", "vector"])
            for key, vector in zip(prompt_keys, vectors, strict=True):
                copy.write_row((key, Vector(vector)))
        cursor.execute(
            "INSERT INTO embeddings (space_id, prompt_key, embedding)"
            " SELECT %s, prompt_key, embedding FROM new_embeddings ON CONFLICT DO NOTHING",
            (space_id,),
        )
        cursor.execute("DROP TABLE new_embeddings")


def live_entries(connection: Connection, domain_id: int, limit: int) -> list[tuple[int, bytes, str, np.ndarray]]:
    """(id, prompt key, prompt, vector) of a domain's newest live entries: the planner's free sources."""
    driver = connection.connection.driver_connection
    assert driver is not None
    register_vector(driver)
    found = driver.cursor(binary=True).execute(
        "SELECT id, prompt_key, prompt, embedding FROM cache_entries WHERE domain_id = %s AND evicted_at IS NULL"
        " ORDER BY id DESC LIMIT %s",
        (domain_id, limit),
    )
    return [(int(i), bytes(key), prompt, _array(vector)) for i, key, prompt, vector in found]


def video_of(connection: Connection, job_id: int) -> StoredObject | None:
    """The video of a finished job, or None."""
    query = "SELECT video_key, video_bytes, video_sha256 FROM generations WHERE job_id = :job"
    row = connection.execute(text(query), {"job": job_id}).one_or_none()
    return None if row is None else StoredObject(*row)


def evict(connection: Connection, entry_id: int, reason: str) -> None:
    """An entry that must not be used again. The row stays: finished jobs name it."""
    connection.execute(
        text(
            "UPDATE cache_entries SET evicted_at = now(), evicted_reason = :reason"
            " WHERE id = :id AND evicted_at IS NULL"
        ),
        {"id": entry_id, "reason": reason},
    )


def _array(vector: Any) -> np.ndarray:
    return np.asarray(vector.to_numpy() if isinstance(vector, Vector) else vector, dtype=np.float32)
