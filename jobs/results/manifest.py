"""The manifest: one line for each row of a batch, saying what became of it and where its file is."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TextIO, get_args

from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.spreadsheet import safe_cell

Kind = Literal["jsonl", "csv"]

COLUMNS = (
    "id",
    "row",
    "prompt",
    "seed",
    "state",
    "file",
    "sha256",
    "bytes",
    "cache_result",
    "source",
    "similarity",
    "steps_total",
    "steps_computed",
    "error_code",
    "error_message",
)


def write_manifest(
    rows: Iterable[Mapping[str, Any]], out: TextIO, kind: Kind = "jsonl", extras: Sequence[str] | None = None
) -> int:
    """Write a line for each row as it comes, and return how many; the caller opens `out` in UTF-8 with newline="".

    A row has any of `COLUMNS` (what is absent is null) and, under "extra", the person's own columns by their own names;
    one that is also the name of a column here comes back as `extra.<name>`. A CSV's header needs all their names before
    the first row: give `extras`, or every row is held in memory to find them. JSON Lines always stream.
    """
    if kind == "jsonl":
        return _write_jsonl(rows, out)
    if kind == "csv":
        return _write_csv(rows, out, extras)
    raise UsageError(f"there is no manifest of kind {kind!r}", hint=f"kinds: {', '.join(get_args(Kind))}")


def manifest_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One line: `COLUMNS` in their order, then the person's own."""
    own = row.get("extra") or {}
    return {name: row.get(name) for name in COLUMNS} | {_own_name(name): value for name, value in own.items()}


def _write_jsonl(rows: Iterable[Mapping[str, Any]], out: TextIO) -> int:
    count = 0
    for row in rows:
        out.write(json.dumps(manifest_row(row), ensure_ascii=False, allow_nan=False) + "\n")
        count += 1
    return count


def _write_csv(rows: Iterable[Mapping[str, Any]], out: TextIO, extras: Sequence[str] | None) -> int:
    if extras is None:
        rows = list(rows)
        extras = list(dict.fromkeys(name for row in rows for name in row.get("extra") or {}))
    names = [*COLUMNS, *(_own_name(name) for name in extras)]
    writer = csv.writer(out)  # ends lines with CR LF; with any other end Python leaves a lone CR in a cell unquoted
    writer.writerow(_cell(name) for name in names)
    count = 0
    for row in rows:
        line = manifest_row(row)
        if unknown := line.keys() - set(names):
            raise ValueError(f"columns that the header lacks: {sorted(unknown)}")
        writer.writerow(_cell(line.get(name)) for name in names)
        count += 1
    return count


def _own_name(name: str) -> str:
    return f"extra.{name}" if re.sub(r"^(extra\.)+", "", name) in COLUMNS else name


def _cell(value: Any) -> str:
    if isinstance(value, bool | int | float | dict | list):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    return safe_cell(value)
