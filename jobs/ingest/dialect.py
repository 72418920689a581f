"""How a file of prompts is written: its format, encoding and delimiter."""

from __future__ import annotations

import codecs
import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from chorus_batch.jobs.ingest.columns import ColumnNames
from chorus_batch.jobs.ingest.source import Source

Format = Literal["csv", "tsv", "txt", "jsonl", "openai"]
FORMATS: tuple[str, ...] = get_args(Format)

SAMPLE = 1 << 16  # bytes from the start that detection looks at
_DELIMITERS = ",;\t|"
_EXTENSIONS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl"}
# The four-byte marks come first: they begin with a two-byte one.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MAGIC = (
    (b"PK\x03\x04", "a zip file or an Excel workbook", "save it as CSV UTF-8, or unpack it"),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "save it as CSV UTF-8"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it: gunzip, or `zcat FILE | chorus-batch submit -`"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: `zstdcat FILE | chorus-batch submit -`"),
    (b"BZh", "compressed with bzip2", "unpack it: `bzcat FILE | chorus-batch submit -`"),
    (b"PAR1", "a Parquet file", "export it as CSV or JSONL"),
    (b"SQLite format 3", "an SQLite database", "export a table as CSV"),
    (b"%PDF", "a PDF", "save the prompts as CSV or TXT"),
    (b"\x89PNG", "a picture", "name the file that holds the prompts"),
    (b"\xff\xd8\xff", "a picture", "name the file that holds the prompts"),
)


@dataclass(frozen=True)
class Dialect:
    """`encoding` is a Python codec; `delimiter` is empty for formats without; `preamble` lines precede the header."""

    format: Format
    encoding: str
    delimiter: str = ""
    preamble: int = 0


def detect(source: Source, names: ColumnNames, format: str = "auto", encoding: str | None = None) -> Dialect:
    """Look at the start of a file. Only marks, the extension and the header decide, never the prompts (they are full of
    commas), and an encoding is never guessed: a wrong guess is mojibake in every video.

    Raises FileRejected with one of the codes `unreadable`, `empty_file`, `binary_file`, `encoding`, `unknown_format`.
    """
    try:
        with source.path.open("rb") as file:
            sample = file.read(SAMPLE)
    except OSError as error:
        raise source.rejected("unreadable", f"can't be opened: {error.strerror}") from error
    if not sample.strip(b" \t\r\n\xef\xbb\xbf\xfe\xff"):
        raise source.rejected("empty_file", "the file is empty")
    codec = _encoding(source, sample, encoding)
    text = codecs.getincrementaldecoder(codec)(errors="replace").decode(sample).removeprefix("\ufeff")
    lines = re.split(r"\r\n|\r|\n", text)
    preamble, forced = _separator_line(lines[0])
    kind = _format(source, lines[preamble:], names, format, forced)
    if kind in ("csv", "tsv"):
        return Dialect(kind, codec, forced or _delimiter(lines[preamble:], names, kind), preamble)
    return Dialect(kind, codec)


def _encoding(source: Source, sample: bytes, asked: str | None) -> str:
    marked = next((codec for mark, codec in _MARKS if sample.startswith(mark)), None)
    if asked is not None:
        try:
            known = codecs.lookup(asked).name
            "".encode(asked)
        except LookupError as error:
            hint = "for example utf-8, cp1252, shift_jis, gb18030, utf-16-le"
            raise source.rejected("encoding", f"unknown encoding {asked!r}", hint=hint) from error
        if marked is None:
            return known
        if _squash(known)[:4] != _squash(marked)[:4]:
            message = f"the file begins with the mark of {marked.removesuffix('-sig')}, which isn't {asked}"
            raise source.rejected("encoding", message, hint="leave --encoding out")
        return marked
    if marked is not None:
        return marked
    for magic, what, hint in _MAGIC:
        if sample.startswith(magic):
            raise source.rejected("binary_file", f"not text: {what}", hint=hint)
    _refuse_binary(source, sample)
    return "utf-8"


def _squash(codec: str) -> str:
    """A codec's name without dashes and underscores."""
    return re.sub("[-_]", "", codec.lower())


def _refuse_binary(source: Source, sample: bytes) -> None:
    zeros = sample.count(0)
    if zeros * 5 > len(sample):
        odd = sample[1::2].count(0)
        if zeros * 3 > len(sample) and max(odd, zeros - odd) > 0.9 * zeros:
            guess = "utf-16-le" if odd * 2 > zeros else "utf-16-be"
            message = "every second byte is zero: UTF-16 without a byte order mark"
            raise source.rejected("encoding", message, hint=f"try --encoding {guess}")
        raise source.rejected(
            "binary_file", "not text: full of zero bytes", hint="name the file that holds the prompts"
        )
    controls = sum(sample.count(byte) for byte in range(32) if byte not in b"\t\n\f\r\x1b")
    if controls > max(8, len(sample) // 10):
        raise source.rejected(
            "binary_file", "not text: full of control characters", hint="name the file that holds the prompts"
        )


def _separator_line(line: str) -> tuple[int, str]:
    """Excel's `sep=;` first line: (lines to skip, delimiter)."""
    match = re.fullmatch(r'"?sep=(.)"?', line, re.IGNORECASE)
    return (1, match[1]) if match else (0, "")


def _format(source: Source, lines: list[str], names: ColumnNames, asked: str, forced: str) -> Format:
    if asked != "auto" and asked not in FORMATS:
        raise source.rejected("unknown_format", f"unknown format {asked!r}", hint=f"one of auto, {', '.join(FORMATS)}")
    first = next((line for line in lines if line.strip()), "")
    by_name = "csv" if forced else _EXTENSIONS.get(Path(source.name).suffix.lower())
    chosen = by_name if asked == "auto" else asked
    if chosen == "txt" and asked == "auto":
        chosen = _table_in_txt(first, names) or "txt"
    if chosen is None:
        chosen = _by_content(source, first, lines, names)
    if chosen == "jsonl" and asked == "auto" and _is_openai(first):
        chosen = "openai"
    return chosen  # type: ignore[return-value]


def _by_content(source: Source, first: str, lines: list[str], names: ColumnNames) -> str:
    if first.lstrip().startswith("{") and _object(first) is not None:
        return "jsonl"
    if first.lstrip()[:1] in ("[", "{"):
        raise source.rejected(
            "unknown_format",
            "a JSON document over several lines, not one object a line",
            hint="turn it into JSON Lines, for example `jq -c '.[]' FILE > FILE.jsonl`",
        )
    header = _header(lines, _delimiter(lines, names, "csv"))
    if any(names.resolve(cell) == "prompt" for cell in header):
        return "csv"
    raise source.rejected(
        "unknown_format",
        "can't tell how the file is written: the first line is neither a header with a prompt column nor JSON",
        hint="say it with --format csv|tsv|txt|jsonl|openai (txt: one prompt a line)",
    )


def _table_in_txt(first: str, names: ColumnNames) -> str | None:
    """Excel saves "Unicode text", a table with tabs, as .txt; a comma decides only if every cell is a column's name."""
    tabs = first.split("\t")
    if len(tabs) > 1 and any(names.resolve(cell) == "prompt" for cell in tabs):
        return "tsv"
    commas = first.split(",")
    if len(commas) > 1 and "prompt" in (meanings := [names.resolve(cell) for cell in commas]) and None not in meanings:
        return "csv"
    return None


def _is_openai(first: str) -> bool:
    record = _object(first)
    return record is not None and "custom_id" in record and isinstance(record.get("body"), dict)


def _object(line: str) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _delimiter(lines: list[str], names: ColumnNames, kind: str) -> str:
    """The delimiter under which the header has a prompt column; among several the one with the most columns."""
    ranked = []
    for rank, delimiter in enumerate(_DELIMITERS if kind == "csv" else "\t"):
        header = _header(lines, delimiter)
        ranked.append((any(names.resolve(cell) == "prompt" for cell in header), len(header), -rank, delimiter))
    return max(ranked)[3]


def _header(lines: list[str], delimiter: str) -> list[str]:
    try:
        reader = csv.reader((line + "\n" for line in lines), delimiter=delimiter, strict=True)
        return next((cells for cells in reader if cells), [])
    except csv.Error:
        return []
