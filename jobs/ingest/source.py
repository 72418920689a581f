"""A file of prompts that can be read twice: a path, or a stream kept in a temporary file."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from chorus_batch.jobs.ingest.rejection import FileRejected, RowError


@dataclass(frozen=True)
class Source:
    """`path` is what is read, `name` what the person calls it (`-` for standard input)."""

    path: Path
    name: str

    def rejected(self, code: str, message: str, *, line: int = 0, row: int = 0, hint: str = "") -> FileRejected:
        """The error that ends the reading of this file."""
        return FileRejected([RowError(self.name, row, line, "", code, message)], hint=hint)


@contextmanager
def open_source(name: str, stdin: IO[bytes] | None = None) -> Iterator[Source]:
    """The source of that name; `-` is `stdin`. Pipes are copied to a temporary file, gone afterwards.

    Every row is validated before the first is stored, and the file is hashed: both need to read it again.
    Raises FileRejected (code `unreadable`).
    """
    path = Path(name)
    if name == "-":
        if stdin is None:
            raise Source(path, name).rejected("unreadable", "there is no standard input")
        with _spooled(stdin, name) as source:
            yield source
        return
    try:
        if path.is_dir():
            raise Source(path, name).rejected("unreadable", "it is a folder", hint="name the files in it")
        with path.open("rb") as file:
            if not path.is_file():
                with _spooled(file, name) as source:
                    yield source
                return
    except OSError as error:
        raise Source(path, name).rejected("unreadable", f"can't be opened: {error.strerror}") from error
    yield Source(path, name)


@contextmanager
def _spooled(stream: IO[bytes], name: str) -> Iterator[Source]:
    with tempfile.NamedTemporaryFile(prefix="chorus-batch-") as copy:
        shutil.copyfileobj(stream, copy, 1 << 20)
        copy.flush()
        yield Source(Path(copy.name), name)


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
