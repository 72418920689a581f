"""Results on a person's disk: finished files beside their manifest, each complete under its name or not there."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorus_batch.jobs.errors import ObjectCorrupt, ObjectMissing, StorageError, UsageError
from chorus_batch.jobs.results.manifest import Kind, write_manifest
from chorus_batch.jobs.storage import ObjectStore, StoredObject

THREADS = 4


@dataclass(frozen=True)
class Delivery:
    """One file of a download.

    `fetched` is False if the right file was there already. `error`, if the store lost or damaged the object.
    """

    name: str
    stored: StoredObject
    fetched: bool
    error: StorageError | None = None


def prepare_folder(folder: Path) -> None:
    """Make the folder if it isn't there and try to write in it.

    Raises UsageError (code `output_unwritable`), so that nobody waits for a batch whose results have no place.
    """
    trial = folder / f".{secrets.token_hex(8)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise _unwritable(folder, error) from error


def download(
    store: ObjectStore, files: Iterable[tuple[StoredObject, str]], folder: Path, threads: int = THREADS
) -> Generator[Delivery, None, None]:
    """Bring each object into `folder` under its name, several at once, and yield them in the order given.

    A file that has the right size and sha256 already is kept. An object that the store lost or damaged doesn't stop the
    others; a store that can't be reached (StorageError) or a folder that can't be written (UsageError) does.
    Few objects are under way at any moment, however many there are.
    """
    prepare_folder(folder)
    executor = ThreadPoolExecutor(threads, thread_name_prefix="download")
    pending: deque[Future[Delivery]] = deque()
    try:
        for stored, name in files:
            pending.append(executor.submit(_deliver, store, stored, name, folder))
            if len(pending) >= 4 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        executor.shutdown(cancel_futures=True)


def save_manifest(
    rows: Iterable[Mapping[str, Any]], path: Path, kind: Kind = "jsonl", extras: Sequence[str] | None = None
) -> int:
    """Write a manifest that appears under its name only when it is complete; returns the number of rows.

    Raises UsageError (code `output_unwritable`) if it can't be written.
    """
    part = path.parent / f".{secrets.token_hex(8)}.part"
    try:
        with part.open("x", encoding="utf-8", newline="") as out:
            count = write_manifest(rows, out, kind, extras)
        part.replace(path)
        return count
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # what there was to say about the folder has been said
            part.unlink(missing_ok=True)


def _deliver(store: ObjectStore, stored: StoredObject, name: str, folder: Path) -> Delivery:
    if name in ("", "..") or Path(name).name != name:
        raise ValueError(f"not a file name: {name!r}")
    path = folder / name
    if _holds(path, stored):
        return Delivery(name, stored, fetched=False)
    try:
        store.download(stored.key, path, stored)
    except (ObjectMissing, ObjectCorrupt) as error:
        return Delivery(name, stored, fetched=False, error=error)
    return Delivery(name, stored, fetched=True)


def _holds(path: Path, stored: StoredObject) -> bool:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != stored.size:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == stored.sha256
    except OSError:
        return False  # if it is in the way, writing it will say so


def _unwritable(path: Path, error: OSError) -> UsageError:
    message, hint = f"can't write {path}: {error.strerror}", "choose another folder, or make room in this one"
    return UsageError(message, hint=hint, code="output_unwritable")
