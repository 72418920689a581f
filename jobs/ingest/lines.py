"""The physical lines of a text file, counted, with the position of a byte that can't be decoded."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

MAX_LINE = 1 << 22  # characters


class LineTooLongError(Exception):
    """A line of more than MAX_LINE characters."""


class Lines:
    """Iterates over lines with their ends, so that `csv` sees them as they are.

    `number` is the line just read, from 1; `record` holds the lines since `begin`, for error messages.
    """

    def __init__(self, file: TextIOWrapper) -> None:
        self._read = file.readline
        self.number = 0
        self.record: list[str] = []

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = self._read(MAX_LINE)
        if not line:
            raise StopIteration
        self.number += 1
        if self.number == 1:
            line = line.removeprefix("\ufeff")
        if len(line) >= MAX_LINE:
            raise LineTooLongError
        self.record.append(line)
        return line

    def begin(self) -> int:
        """Begin a record; the number of its first line."""
        self.record.clear()
        return self.number + 1


@dataclass(frozen=True)
class BadByte:
    """Where decoding failed: `line` from 1, `offset` in bytes from 0."""

    line: int
    offset: int
    byte: int


def find_bad_byte(path: Path, encoding: str) -> BadByte | None:
    """The first byte of a file that isn't valid in an encoding.

    A second, slower reading: the fast one decodes ahead and can't say where it is.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    line, position, last = 1, 0, ""
    with path.open("rb") as file:
        while True:
            chunk = file.read(1 << 16)
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                start = position - (len(error.object) - len(chunk)) + error.start
                before = error.object[: error.start].decode(error.encoding, "replace")
                return BadByte(line + _breaks(last + before) - _breaks(last), start, error.object[error.start])
            if not chunk:
                return None
            line += _breaks(last + text) - _breaks(last)
            last = text[-1:] or last
            position += len(chunk)


def _breaks(text: str) -> int:
    return text.count("\n") + text.count("\r") - text.count("\r\n")
