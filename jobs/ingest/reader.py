"""Records of a file of prompts, one at a time: cells under canonical names, everything else in `extra`."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chorus_batch.jobs.ingest.columns import ColumnNames
from chorus_batch.jobs.ingest.dialect import Dialect
from chorus_batch.jobs.ingest.inline import FlagError, split_flags
from chorus_batch.jobs.ingest.lines import Lines, LineTooLongError, find_bad_byte
from chorus_batch.jobs.ingest.notes import Notes
from chorus_batch.jobs.ingest.rejection import FileRejected, RowError
from chorus_batch.jobs.ingest.source import Source

MAX_FIELD = 1 << 16  # characters of one field
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")


@dataclass(slots=True)
class Record:
    """`row` counts records from 1, `line` is where it starts.

    `cells` has no empty values; `names` gives the person's name of a column.
    """

    row: int
    line: int
    cells: dict[str, str]
    names: Mapping[str, str]
    extra: dict[str, Any]


class RecordReader:
    """Reads one file in one dialect. Iterating yields a Record or RowErrors for each row, in the order of the file.

    Raises FileRejected where the file can't be read on: what would follow a broken quote or byte is guesswork.
    """

    def __init__(self, source: Source, dialect: Dialect, names: ColumnNames, notes: Notes) -> None:
        self.source = source
        self.dialect = dialect
        self.names = names
        self.notes = notes
        self.row = 0

    def __iter__(self) -> Iterator[Record | RowError]:
        # newline="" leaves line ends inside quotes as they are; \n, \r\n and \r all end a line.
        with self.source.path.open(encoding=self.dialect.encoding, newline="") as file:
            lines = Lines(file)
            try:
                for _ in range(self.dialect.preamble):
                    next(lines)
                if self.dialect.format in ("csv", "tsv"):
                    yield from self._table(lines)
                else:
                    yield from self._lines(lines)
            except UnicodeDecodeError as error:
                raise self._undecodable(error) from error
            except LineTooLongError as error:
                message = "the line is longer than any prompt"
                hint = "is this a file of prompts, and --format right?"
                raise self.source.rejected("line_too_long", message, line=lines.number, hint=hint) from error

    def _error(self, line: int, column: str, code: str, message: str) -> RowError:
        return RowError(self.source.name, self.row, line, column, code, message)

    # Tables

    def _table(self, lines: Lines) -> Iterator[Record | RowError]:
        reader = csv.reader(lines, delimiter=self.dialect.delimiter, strict=True)
        header = self._header(reader, lines)
        columns = [self.names.resolve(name) for name in header]
        theirs = {column: name for column, name in zip(columns, header, strict=True) if column}
        known = [(index, column) for index, column in enumerate(columns) if column]
        unknown = [(index, name or f"column {index + 1}") for index, name in enumerate(header) if not columns[index]]
        for _, name in unknown:
            self.notes.add("column_unused", name, f"column {name!r} is kept with its rows but not used", 1)
        while True:
            line = lines.begin()
            fields = self._next(reader, lines, line)
            if fields is None:
                return
            if not fields:
                continue
            self.row += 1
            if not any(fields) and len(header) > 1:
                self.notes.add("blank_row", "", "rows without any value were passed over", line)
                continue
            if len(fields) != len(header):
                yield self._ragged(line, header, fields)
                continue
            bad = self._bad_field(line, header, fields, lines.record)
            if bad is not None:
                yield bad
                continue
            cells = {column: fields[index] for index, column in known if fields[index]}
            extra = {name: fields[index] for index, name in unknown if fields[index]}
            yield Record(self.row, line, cells, theirs, extra)

    def _header(self, reader: Iterator[list[str]], lines: Lines) -> list[str]:
        header: list[str] = []
        line = 1
        while not header:
            line = lines.begin()
            fields = self._next(reader, lines, line)
            if fields is None:
                raise self.source.rejected("empty_file", "there is no header")
            header = [name.strip() for name in fields]
        if any(_NOT_TEXT.search(name) for name in header):
            raise self.source.rejected("binary_file", "the header has NUL characters", line=line)
        missing = self.names.unmatched(header)
        shown = ", ".join(map(repr, header))[:400]
        if missing:
            raise self.source.rejected(
                "map_unknown", f"--map {missing[0]}=...: the columns are {shown}", line=line, hint="check its spelling"
            )
        self._refuse_twins(header, line)
        if not any(self.names.resolve(name) == "prompt" for name in header):
            raise self.source.rejected(
                "missing_prompt",
                f"no column holds the prompts; the columns are {shown}",
                line=line,
                hint="name it with --map theirs=prompt, or use --format txt for a file with one prompt a line",
            )
        return header

    def _refuse_twins(self, header: list[str], line: int) -> None:
        seen: dict[str, str] = {}
        for name in filter(None, header):
            column = self.names.resolve(name)
            key = column or f"extra {name}"
            if key in seen:
                what = f"both mean {column}" if column else "have the same name"
                keep = f"--map {name!r}=extra keeps the second without using it; or rename one"
                raise self.source.rejected(
                    "duplicate_column",
                    f"columns {seen[key]!r} and {name!r} {what}",
                    line=line,
                    hint=keep if column else "rename one",
                )
            seen[key] = name

    def _next(self, reader: Iterator[list[str]], lines: Lines, start: int) -> list[str] | None:
        try:
            return next(reader, None)
        except csv.Error as error:
            raise self._broken_quote(str(error), lines.record, start) from error

    def _broken_quote(self, reason: str, record: list[str], start: int) -> FileRejected:
        """csv says where it gave up, often the end of the file; the person needs the line where the quote began."""
        opened = start + opening_quote(record, self.dialect.delimiter)
        row = self.row + 1 if self.row or self.dialect.format == "tsv" or start > 1 else 0
        if reason.startswith(("unexpected end", "field larger")):
            message = f"the quote that begins on line {opened} is never closed"
            if reason.startswith("field larger"):
                message += f" within {MAX_FIELD * 2} characters"
            return self.source.rejected(
                "quote_unclosed", message, line=opened, row=row, hint='close it, or double a quote that is text: ""'
            )
        return self.source.rejected(
            "quote_misplaced",
            f"the quoted field that begins on line {opened} goes on after its closing quote",
            line=opened,
            row=row,
            hint='double quotes that are text (""), and look for a missing quote just before',
        )

    def _ragged(self, line: int, header: list[str], fields: list[str]) -> RowError:
        if len(fields) < len(header):
            column = header[len(fields)]
            return self._error(line, column, "too_few_fields", f"{len(fields)} fields, the header has {len(header)}")
        message = f"{len(fields)} fields, the header has {len(header)}: quote a field that holds the delimiter"
        return self._error(line, "", "too_many_fields", message)

    def _bad_field(self, line: int, header: list[str], fields: list[str], raw: list[str]) -> RowError | None:
        size = len(raw[0]) if len(raw) == 1 else sum(map(len, raw))
        if size > MAX_FIELD:
            for name, field in zip(header, fields, strict=True):
                if len(field) > MAX_FIELD:
                    message = f"{len(field)} characters, more than {MAX_FIELD}: is a quote missing?"
                    return self._error(line, name, "field_too_long", message)
        if all(map(str.isprintable, fields)):
            return None
        for name, field in zip(header, fields, strict=True):
            if found := _NOT_TEXT.search(field):
                return self._error(line, name, *_not_text(found[0]))
        return None

    # One record a line

    def _lines(self, lines: Lines) -> Iterator[Record | RowError]:
        read = {"txt": self._prompt_line, "jsonl": self._object_line, "openai": self._openai_line}[self.dialect.format]
        while True:
            line = lines.begin()
            text = next(lines, None)
            if text is None:
                return
            text = text.strip()
            if not text or (self.dialect.format == "txt" and text.startswith("#")):
                continue
            self.row += 1
            if "\0" in text:
                yield self._error(line, "", *_not_text("\0"))
            elif self.dialect.format == "txt" and len(text) > MAX_FIELD:
                yield self._error(line, "", "field_too_long", f"{len(text)} characters, more than {MAX_FIELD}")
            else:
                yield read(line, text)

    def _prompt_line(self, line: int, text: str) -> Record | RowError:
        if found := _NOT_TEXT.search(text):
            return self._error(line, "", *_not_text(found[0]))
        try:
            cells, names = split_flags(text)
        except FlagError as error:
            return self._error(line, error.flag, error.code, str(error))
        return Record(self.row, line, {column: cell for column, cell in cells.items() if cell}, names, {})

    def _object_line(self, line: int, text: str) -> Record | RowError:
        value = self._json(line, text)
        return value if isinstance(value, RowError) else self._from_object(line, value, {})

    def _openai_line(self, line: int, text: str) -> Record | RowError:
        value = self._json(line, text)
        if isinstance(value, RowError):
            return value
        wrong = _wrong_request(value)
        if wrong:
            return self._error(line, wrong[0], "openai_request", wrong[1])
        outside = {key: value[key] for key in value if key not in ("custom_id", "method", "url", "body")}
        return self._from_object(line, {"custom_id": value["custom_id"], **value["body"]}, outside)

    def _json(self, line: int, text: str) -> dict[str, Any] | RowError:
        try:
            value = _DECODER.decode(text)
        except _TwinKeysError as error:
            return self._error(line, str(error), "duplicate_key", f"the key {str(error)!r} stands twice in the object")
        except (ValueError, RecursionError) as error:
            return self._error(line, "", "json", f"not valid JSON: {str(error)[:200]}")
        if not isinstance(value, dict):
            return self._error(line, "", "json", f"not a JSON object: {text[:40]!r}")
        # Half a surrogate pair and NUL can only come from an escape.
        if "\\u" in text and (found := _not_text_in(value)):
            return self._error(line, found[0], *_not_text(found[1]))
        return value

    def _from_object(self, line: int, value: dict[str, Any], extra: dict[str, Any]) -> Record | RowError:
        cells: dict[str, str] = {}
        names: dict[str, str] = {}
        for key, item in value.items():
            column = self.names.resolve(key)
            if column is None:
                extra[key] = item
                self.notes.add("column_unused", key, f"{key!r} is kept with its rows but not used", line)
                continue
            if column in names:
                message = f"{names[column]!r} and {key!r} both mean {column}"
                return self._error(line, key, "duplicate_key", message)
            names[column] = key
            if isinstance(item, bool) or not isinstance(item, str | int | float | None):
                message = f"must be text or a number, not {json.dumps(item)[:40]}"
                return self._error(line, key, "value_type", message)
            cell = "" if item is None else str(item)
            if len(cell) > MAX_FIELD:
                return self._error(line, key, "field_too_long", f"{len(cell)} characters, more than {MAX_FIELD}")
            if cell:
                cells[column] = cell
        return Record(self.row, line, cells, names, extra)

    def _undecodable(self, error: UnicodeDecodeError) -> FileRejected:
        encoding = self.dialect.encoding
        bad = find_bad_byte(self.source.path, encoding)
        what = "UTF-8" if encoding in ("utf-8", "utf-8-sig") else encoding
        hint = (
            "say how the file is encoded, e.g. --encoding cp1252 (Windows), shift_jis or gb18030; or save it as UTF-8"
        )
        if bad is None:
            return self.source.rejected("encoding", f"not valid {what}: {error.reason}", hint=hint)
        message = f"not valid {what}: byte 0x{bad.byte:02X} at offset {bad.offset}"
        return self.source.rejected("encoding", message, line=bad.line, hint=hint)


def opening_quote(record: list[str], delimiter: str) -> int:
    """Index of the line, within a record, on which its last quoted field begins."""
    opened, quoted, fresh = 0, False, True
    for index, line in enumerate(record):
        for position, character in enumerate(line):
            if quoted:
                if character == '"':
                    quoted = False
            elif character == '"':
                # A quote right after a closing one is an escaped quote, and the field goes on.
                if fresh:
                    opened = index
                    quoted = True
                elif position and line[position - 1] == '"':
                    quoted = True
            fresh = not quoted and (character == delimiter or character in "\r\n")
    return opened


class _TwinKeysError(ValueError):
    """A JSON object has a key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwinKeysError(next(key for key in keys if keys.count(key) > 1))
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large a number")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} isn't JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_refuse_constant)


def _wrong_request(value: dict[str, Any]) -> tuple[str, str] | None:
    """(field, what is wrong) with a line of an OpenAI batch file."""
    if not isinstance(value.get("custom_id"), str) or not value["custom_id"]:
        return "custom_id", "every request needs a custom_id"
    if value.get("method", "POST") != "POST":
        return "method", f"must be POST, not {value['method']!r}"
    url = value.get("url", "/v1/videos")
    if not isinstance(url, str) or not re.fullmatch(r"/v1/videos(/generations)?/?", url):
        return "url", f"must be /v1/videos, not {str(url)[:60]!r}"
    if not isinstance(value.get("body"), dict):
        return "body", "must be an object with the prompt"
    twin = next((key for key in value["body"] if key == "custom_id"), None)
    return ("body", "has a custom_id of its own") if twin else None


def _not_text(character: str) -> tuple[str, str]:
    if character == "\0":
        return "nul", "a NUL character: databases can't store it; remove it"
    return "surrogate", f"half of a surrogate pair (\\u{ord(character):04x}): not valid text"


def _not_text_in(value: Any, path: str = "") -> tuple[str, str] | None:
    """(key, character) of the first string in a JSON value that isn't text."""
    if isinstance(value, str):
        found = _NOT_TEXT.search(value)
        return (path, found[0]) if found else None
    if isinstance(value, dict):
        for key, item in value.items():
            if hit := _not_text_in(key, path or "") or _not_text_in(item, path or key):
                return hit
    elif isinstance(value, list):
        for item in value:
            if hit := _not_text_in(item, path):
                return hit
    return None
