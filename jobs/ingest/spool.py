"""Validated rows on disk, between the reading that checks them and the transaction that stores them.

Reading the file a second time would be slower, and wrong if somebody wrote to it in between.
"""

from __future__ import annotations

import marshal
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from chorus_batch.jobs.ingest.rows import Row

_CHUNK = 1000  # rows written at once


class SpooledRow(NamedTuple):
    """What of a row isn't in the plan's columns."""

    file: int  # 0-based, in the order of the submit
    row: int
    line: int
    repeat: int
    external_id: str | None
    prompt: str
    seed: int
    fps: int
    reuse: str
    priority: int
    output_name: str | None
    extra: dict[str, Any]


class Spool:
    """Rows in the order in which they were added. The file has no name and goes with the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="chorus-batch-")  # noqa: SIM115 - __exit__ closes it
        self._pending: list[tuple[Any, ...]] = []

    def add(self, file: int, row: Row) -> None:
        """Append a row of the file with that number."""
        self._pending.append(
            (
                file,
                row.row,
                row.line,
                row.repeat,
                row.external_id,
                row.prompt,
                row.seed,
                row.parameters.fps,
                row.reuse,
                row.priority,
                row.output_name,
                row.extra,
            )
        )
        if len(self._pending) == _CHUNK:
            self._write()

    def __iter__(self) -> Iterator[SpooledRow]:
        if self._pending:
            self._write()
        self._file.seek(0)
        while True:
            try:
                chunk = marshal.load(self._file)  # noqa: S302 - written by this process, into a file without a name
            except EOFError:
                return
            yield from map(SpooledRow._make, chunk)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self) -> None:
        marshal.dump(self._pending, self._file)
        self._pending = []
