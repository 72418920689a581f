"""What result files are called: names that are safe on every file system and the same at every download."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from chorus_batch.jobs.errors import UsageError

DEFAULT_TEMPLATE = "{id}-{slug}"
LONGEST = 255  # bytes: what the common file systems allow for a name
SLUG = 80  # bytes

_FIELDS = {"id": str, "row": int, "seed": int, "slug": str}
_WIDTH = re.compile(r"0?[1-9]?\d?d?")  # {row:05}; nothing that could make a name of a gigabyte
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]')  # by POSIX or by Windows
_UNSEEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # categories that nobody sees, some of which turn text around
_WORD = {"L", "M", "N"}  # letters, the marks on them, digits
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # device names of Windows


def output_names(
    rows: Iterable[Mapping[str, Any]], template: str = DEFAULT_TEMPLATE, suffix: str = ".mp4"
) -> Iterator[str]:
    """The file name of each row: of its `output_name` if it has one, else of the template.

    A row needs `id`, `row`, `seed` and `prompt`; the template may use {id}, {row}, {seed} and {slug} (its words).
    A name that was given before, in capitals or not, gets -2, -3 and so on: give all rows of a batch in one order,
    finished or not, and each keeps its name at every later download.
    Raises UsageError for a template that can't be used.
    """
    check_template(template)
    taken: set[str] = set()
    counts: dict[str, int] = {}
    for row in rows:
        stem = safe_name(_wish(row, suffix) or _filled(template, row), LONGEST - len(suffix.encode()))
        name = stem + suffix
        while _folded(name) in taken:
            count = counts[_folded(stem)] = counts.get(_folded(stem), 1) + 1
            ending = f"-{count}{suffix}"
            name = _cut(stem, LONGEST - len(ending.encode())) + ending
        taken.add(_folded(name))
        yield name


def check_template(template: str) -> None:
    """Raise UsageError, saying what is wrong, unless `output_names` can use the template."""
    hint = f"fields: {', '.join('{' + name + '}' for name in _FIELDS)}; numbers take a width, as in {{row:05}}"
    if "/" in template or "\\" in template:
        raise UsageError(f"the name template {template!r} holds a path separator", hint="name files, not folders")
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageError(f"the name template {template!r} can't be read: {error}", hint=hint) from error
    for _, field, width, conversion in parts:
        if field is None:
            continue
        if field not in _FIELDS:
            raise UsageError(f"the name template {template!r} has an unknown field {{{field}}}", hint=hint)
        if conversion or (width and not (_FIELDS[field] is int and _WIDTH.fullmatch(width))):
            raise UsageError(f"the name template {template!r} can't format {{{field}}} that way", hint=hint)
    if all(field is None for _, field, _, _ in parts):
        raise UsageError(f"the name template {template!r} has no field: all names would be the same", hint=hint)


def safe_name(text: str, longest: int = LONGEST) -> str:
    """`text` as a file name of at most `longest` bytes: no separators, no "..", nothing hidden, reserved or unseen."""
    text = unicodedata.normalize("NFC", text)
    text = _FORBIDDEN.sub("_", text)
    text = "".join(c for c in text if unicodedata.category(c) not in _UNSEEN)
    text = re.sub(r"\.{2,}", ".", text)
    text = _trimmed(re.sub(r"^-", "_", text.strip(" .")))  # a leading hyphen would be read as an option
    if _RESERVED.match(text):
        text = f"_{text}"
    return _cut(text, longest) or "_"


def slug(prompt: str) -> str:
    """A prompt's words in small letters, joined by hyphens, as many as fit into 80 bytes; "prompt" if it has none."""
    text = unicodedata.normalize("NFKC", prompt).lower()
    words = "".join(c if unicodedata.category(c)[0] in _WORD else " " for c in text).split()
    kept = ""
    for word in words:
        longer = f"{kept}-{word}" if kept else word
        if len(longer.encode()) > SLUG:
            return kept or _cut(word, SLUG)
        kept = longer
    return kept or "prompt"


def _wish(row: Mapping[str, Any], suffix: str) -> str:
    name = str(row.get("output_name") or "")
    return name[: -len(suffix)] if suffix and name.lower().endswith(suffix) else name


def _filled(template: str, row: Mapping[str, Any]) -> str:
    return template.format(id=row["id"], row=row["row"], seed=row["seed"], slug=slug(row["prompt"]))


def _folded(name: str) -> str:
    """What two names share that some file systems take for the same."""
    return unicodedata.normalize("NFC", name.casefold())


def _cut(text: str, longest: int) -> str:
    """The beginning of `text` in at most so many bytes of UTF-8, no character halved."""
    return _trimmed(text.encode()[:longest].decode(errors="ignore"))


def _trimmed(text: str) -> str:
    return text.rstrip(" .")  # Windows drops these silently, so that another name would be opened
