"""Objects that nobody will ask for: what failed, cancelled and evicted work left in the store.

Nothing else removes them: a worker that dies after its upload and before its commit leaves orphans, and text features
and masks are kept for whoever may want them next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, text

from chorus_batch.jobs import keys
from chorus_batch.jobs.storage import ListedObject, ObjectStore

PREFIXES = (keys.BATCHES, keys.ENTRIES, keys.TEXTS, keys.MASKS, keys.PROBES)


@dataclass(frozen=True)
class References:
    """What the database's rows need of the store, at one moment."""

    known: bool  # the database has any batch at all
    objects: frozenset[str]  # keys: finished jobs' videos and latents, live entries, checkpoints to go on from
    running: frozenset[tuple[int, int]]  # (job, attempt) in a worker's hands: whatever these have stored
    entries: frozenset[str]  # sha256 (hex) of live entries' objects: their masks are needed
    texts: frozenset[str]  # sha256 (hex) of the cleaned texts of unfinished or recent jobs


@dataclass(frozen=True)
class Sweep:
    """What a look at the store found: all of its objects, those that nobody needs, and those of them to be removed."""

    listed: int
    size: int  # bytes of all
    young: int  # needed by nobody, but too young to tell
    garbage: tuple[ListedObject, ...]

    @property
    def freed(self) -> int:
        """Bytes of what is to be removed."""
        return sum(each.size for each in self.garbage)


def references(connection: Connection, since: datetime) -> References:
    """What is needed now. Texts are, if a job of theirs is unfinished or was submitted after `since`.

    Must be asked for after the store was listed: then whatever was written before is seen, by its row or by the attempt
    that holds it. It must be the first thing in its transaction.
    """
    # One moment for all queries: a job that finishes between two of them would be in neither.
    connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))

    def column(query: str, **values: object) -> Iterable[object]:
        return connection.execute(text(query), values).scalars()

    entries = connection.execute(text("SELECT object_key, sha256 FROM cache_entries WHERE evicted_at IS NULL")).all()
    objects = column(
        "SELECT video_key FROM generations UNION ALL SELECT latents_key FROM generations"
        " UNION ALL SELECT checkpoint->>'key' FROM queue WHERE checkpoint IS NOT NULL"
    )
    # A prompt's key is the sha256 of the cleaned text in NFC, which it nearly always is; another is encoded again.
    prompts = column(
        "SELECT DISTINCT encode(j.prompt_key, 'hex') FROM jobs j JOIN batches b ON b.id = j.batch_id"
        " WHERE j.outcome IS NULL OR b.created_at > :since",
        since=since,
    )
    negative = column("SELECT DISTINCT negative_prompt FROM domains")
    running = connection.execute(text("SELECT job_id, attempt FROM queue WHERE state = 'running'"))
    return References(
        known=bool(connection.execute(text("SELECT EXISTS (SELECT FROM batches)")).scalar()),
        objects=frozenset(map(str, objects)).union(row.object_key for row in entries),
        running=frozenset((row.job_id, row.attempt) for row in running),
        entries=frozenset(row.sha256 for row in entries),
        texts=frozenset(map(str, prompts)).union(hashlib.sha256(str(each).encode()).hexdigest() for each in negative),
    )


def is_needed(key: str, needed: References) -> bool:
    """Whether an object may be asked for; what isn't of this program's making counts as needed."""
    if (writer := keys.writer_of(key)) is not None:
        return key in needed.objects or writer in needed.running
    if (sha256 := keys.text_of(key)) is not None:
        return sha256 in needed.texts
    if (sha256 := keys.entry_of(key)) is not None:
        return sha256 in needed.entries
    return not key.startswith(keys.PROBES)


def sweep(listed: Sequence[ListedObject], needed: References, before: datetime) -> Sweep:
    """Sort what was listed: garbage is what nobody needs, and was written before that time."""
    unneeded = [each for each in listed if not is_needed(each.key, needed)]
    garbage = tuple(each for each in unneeded if each.modified < before)
    return Sweep(len(listed), sum(each.size for each in listed), len(unneeded) - len(garbage), garbage)


def listing(store: ObjectStore) -> list[ListedObject]:
    """Every object under the program's own prefixes."""
    return [each for prefix in PREFIXES for each in store.list(prefix)]
