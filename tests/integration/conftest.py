"""A migrated database, and batches written straight into it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from sqlalchemy import Engine, text

from chorus_batch.jobs import cache, leases
from chorus_batch.jobs.claims import Claim, EntryRecord, GenerationRecord
from chorus_batch.jobs.database import connect, transaction
from chorus_batch.jobs.models import CacheResult
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import StoredObject

DIMENSION = 4
DOMAIN = {
    "model": "builtin",
    "fingerprint": "0" * 64,
    "dtype": "float32",
    "width": 64,
    "height": 64,
    "frames": 9,
    "steps": 20,
    "guidance_scale": 2.5,
    "shift": 3.0,
    "scheduler": "euler",
    "negative_prompt": "",
}


@pytest.fixture
def database(migrated_url: str) -> Iterator[Engine]:
    """An engine on a fresh database at the newest schema."""
    engine = connect(migrated_url)
    yield engine
    engine.dispose()


@dataclass(frozen=True)
class Part:
    """One job to write: its row's source (an index into the batch) and what matters to the queue."""

    source: int | None = None
    role: str | None = None  # worked out from `source` if left out
    priority: int = 0
    prompt: str | None = None
    seed: int = 0
    vector: Sequence[float] | None = None
    domain: str = "a"
    policy: str = "chorus"


@dataclass(frozen=True)
class Writer:
    """Writes batches and takes the part of a worker."""

    engine: Engine

    def batch(self, parts: Sequence[Part], name: str = "batch") -> list[int]:
        """The ids of the jobs of a new batch."""
        with transaction(self.engine) as connection:
            space = cache.register_space(connection, "test", DIMENSION)
            batch_id = connection.execute(
                text(
                    "INSERT INTO batches (name, submission_key, cache, files, plan, total)"
                    " VALUES (:name, :name, 'on', '[]', '{}', :total) RETURNING id"
                ),
                {"name": name, "total": len(parts)},
            ).scalar_one()
            ids: list[int] = []
            for row, part in enumerate(parts):
                domain_key = part.domain if part.policy == "chorus" else f"{part.domain} {part.policy}"
                domain = cache.register_domain(connection, space, domain_key, {**DOMAIN, "policy": part.policy})
                prompt = part.prompt if part.prompt is not None else f"{name} prompt {row}"
                key = hashlib.sha256(prompt.encode()).digest()
                vector = np.array(part.vector or np.eye(DIMENSION)[row % DIMENSION], np.float32)
                cache.store_vectors(connection, space, [key], vector[None])
                role = part.role or ("source" if part.source is None else "follower")
                values = {
                    "batch": batch_id,
                    "row": row + 1,
                    "prompt": prompt,
                    "key": key,
                    "domain": domain,
                    "seed": part.seed,
                    "priority": part.priority,
                    "role": role,
                    "source": None if part.source is None else ids[part.source],
                    "similarity": 0.9 if role == "follower" else None,
                }
                insert = """
                    INSERT INTO jobs (batch_id, row, line, external_id, prompt, prompt_key, domain_id, seed, fps, reuse,
                        priority, role, source_job_id, similarity, position)
                    VALUES (:batch, :row, :row, CAST(:row AS text), :prompt, :key, :domain, :seed, 8, 'auto',
                        :priority, CAST(:role AS role), :source, :similarity, :row)
                    RETURNING id
                """
                ids.append(connection.execute(text(insert), values).scalar_one())
            connection.execute(
                text(
                    "INSERT INTO queue (job_id, batch_id, source_job_id, priority, position, state)"
                    " SELECT id, batch_id, source_job_id, priority, position,"
                    " (CASE WHEN source_job_id IS NULL THEN 'ready' ELSE 'waiting' END)::queue_state"
                    " FROM jobs WHERE batch_id = :batch"
                ),
                {"batch": batch_id},
            )
        return ids

    def worker(self, name: str, slot: str | None = None) -> str:
        """A registered worker."""
        with transaction(self.engine) as connection:
            leases.register(connection, name, slot=slot or name, host="host", pid=1, device="cpu")
        return name

    def silence(self, worker: str, seconds: float) -> None:
        """Let a worker's last heartbeat be so long ago."""
        with transaction(self.engine) as connection:
            connection.execute(
                text("UPDATE workers SET heartbeat_at = now() - make_interval(secs => :s) WHERE id = :id"),
                {"s": seconds, "id": worker},
            )

    def state(self, job_id: int) -> str:
        """What a person sees of a job."""
        with transaction(self.engine) as connection:
            return str(
                connection.execute(text("SELECT state FROM job_states WHERE job_id = :j"), {"j": job_id}).scalar()
            )


@pytest.fixture
def writer(database: Engine) -> Writer:
    return Writer(database)


Program = Callable[..., str]


@pytest.fixture
def program(servers: Settings, migrated_url: str, monkeypatch: pytest.MonkeyPatch, command: Program) -> Program:
    """What a command prints, on this test's database."""
    for name in ("broker_url", "s3_endpoint", "s3_access_key", "s3_secret_key"):
        monkeypatch.setenv(f"CHORUS_{name.upper()}", getattr(servers, name))
    monkeypatch.setenv("CHORUS_PROFILE", "production")
    monkeypatch.setenv("CHORUS_DATABASE_URL", migrated_url)
    return command


def made(claim: Claim, **changes: object) -> GenerationRecord:
    """The trace of a plain generation of a claim."""
    values: dict[str, object] = {
        "cache_result": CacheResult.miss,
        "video": StoredObject(f"video/{claim.job_id}/{claim.attempt}", 1, "a"),
        "latents": StoredObject(f"latents/{claim.job_id}/{claim.attempt}", 1, "b"),
        "steps_total": 20,
        "steps_computed": 20,
        "seconds": {"denoise": 1.0},
        "seconds_total": 1.5,
        "backend": {"device": "cpu"},
    }
    return GenerationRecord(**{**values, **changes})  # type: ignore[arg-type]


def left(claim: Claim) -> EntryRecord:
    """The cache entry of a claim's generation."""
    return EntryRecord(StoredObject(f"entry/{claim.job_id}/{claim.attempt}", 1, "c"), (6, 8))
