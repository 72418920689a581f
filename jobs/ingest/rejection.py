"""What is wrong with a file of prompts: where, what, and what to do about it."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chorus_batch.jobs.errors import InputRejected
from chorus_batch.jobs.spreadsheet import safe_cell

SHOWN = 20  # errors that a rejection lists; the rest is counted

# Every code that a RowError can carry. Those of the first group concern the whole file: it can't be read on.
FILE_CODES = {
    "unreadable": "the file can't be opened",
    "empty_file": "there is nothing in it",
    "no_rows": "there is a header and nothing below",
    "binary_file": "it isn't text",
    "unknown_format": "none of csv, tsv, txt, jsonl, openai",
    "encoding": "a byte that isn't valid in the file's encoding, or an unknown encoding",
    "quote_unclosed": "a quote that is never closed",
    "quote_misplaced": "text after a closing quote",
    "line_too_long": "a line beyond any sensible length",
    "missing_prompt": "no column holds prompts",
    "duplicate_column": "two columns mean the same",
    "map_unknown": "--map names a column that isn't there",
}
ROW_CODES = {
    "too_few_fields": "fewer fields than the header",
    "too_many_fields": "more fields than the header",
    "field_too_long": "a field over 64 KB",
    "nul": "a NUL character, which no database text can hold",
    "surrogate": "half of a surrogate pair, which isn't text",
    "json": "not one JSON object on the line",
    "duplicate_key": "two keys of a JSON object are equal or mean the same",
    "value_type": "a JSON value of the wrong type",
    "openai_request": "not a request of an OpenAI batch file",
    "unknown_flag": "an inline flag that isn't known",
    "empty_prompt": "no prompt",
    "prompt_too_long": "more tokens than the model reads",
    "not_a_number": "not a number",
    "out_of_range": "a number outside its range",
    "bad_value": "a word that isn't one of the allowed",
    "conflict": "two columns contradict each other",
    "unsupported_size": "the model doesn't make this size",
    "unsupported_frames": "the model doesn't make this number of frames",
    "unsupported_scheduler": "the model doesn't run this scheduler",
    "too_few_steps": "a step cache with so few steps that it can't skip any",
    "unsupported_lora": "LoRA columns aren't supported",
    "bad_name": "not a file name",
    "bad_id": "not an id",
    "duplicate_id": "an id that an earlier row has",
}
CODES = {**FILE_CODES, **ROW_CODES}


@dataclass(frozen=True, slots=True)
class RowError:
    """One thing wrong. `row` counts data rows from 1 (0: the file as a whole); `line` is the physical line where the
    row starts (0: unknown); `column` is the person's own name for it (empty: the whole row)."""

    file: str
    row: int
    line: int
    column: str
    code: str
    message: str

    def __str__(self) -> str:
        where = [self.file]
        where += [f"line {self.line}"] if self.line else []
        where += [f"row {self.row}"] if self.row else []
        where += [f"column {self.column}"] if self.column else []
        return f"{', '.join(where)}: {self.message} [{self.code}]"


class FileRejected(InputRejected):
    """An input that isn't accepted. `errors` are the first of `count`; `code` is the first error's if it's fatal."""

    def __init__(self, errors: Sequence[RowError], count: int | None = None, *, hint: str = "") -> None:
        self.errors = tuple(errors[:SHOWN])
        self.count = len(errors) if count is None else count
        fatal = self.errors[0].code if self.errors and self.errors[0].code in FILE_CODES else None
        super().__init__(self._text(), hint=hint, code=fatal)

    def _text(self) -> str:
        if self.count == 1:
            return str(self.errors[0])
        rest = self.count - len(self.errors)
        lines = [f"{self.count} errors; nothing was stored", *map(str, self.errors)]
        return "\n".join(lines + ([f"... and {rest} more"] if rest else []))


def rejected_path(path: Path) -> Path:
    """Where the rejected rows of a file are listed: beside it, `FILE.rejected.csv`."""
    return path.with_name(path.name + ".rejected.csv")


def write_rejected(path: Path, errors: Iterable[RowError]) -> int:
    """Write a CSV of the errors to `path`, whole or not at all; return how many. Cells are safe for spreadsheets."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with unfinished.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["row", "line", "column", "code", "message", "file"])
            for error in errors:
                cells = (error.row, error.line, error.column, error.code, error.message, error.file)
                writer.writerow([safe_cell(cell) for cell in cells])
                count += 1
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count
