"""Files of prompts to validated rows, by streaming: a million rows pass in bounded memory.

A file is read twice, once to validate every row (`check`) and once to store them; both readings give the same rows.
What grows with the file is only the set of its ids, about 100 bytes for each row that has one.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from chorus_batch.jobs.cards.card import ModelCard
from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.ingest.cells import PARAMETER_COLUMNS, SAME, CellError, Settled, Settler, whole
from chorus_batch.jobs.ingest.columns import ColumnNames, meaning
from chorus_batch.jobs.ingest.dialect import FORMATS, detect
from chorus_batch.jobs.ingest.notes import Note, Notes
from chorus_batch.jobs.ingest.reader import Record, RecordReader
from chorus_batch.jobs.ingest.rejection import FileRejected, RowError, rejected_path, write_rejected
from chorus_batch.jobs.ingest.seeds import SeedPolicy, stated_seed
from chorus_batch.jobs.ingest.source import Source, file_sha256, open_source
from chorus_batch.jobs.ingest.tokens import TokenCounter
from chorus_batch.jobs.parameters import POLICIES, Parameters, clean_prompt

__all__ = [
    "FileRejected",
    "IngestOptions",
    "Note",
    "Notes",
    "Row",
    "RowError",
    "Source",
    "file_sha256",
    "open_source",
    "parse_pairs",
    "read_batch",
    "rejected_path",
    "write_rejected",
]

Reuse = Literal["auto", "force", "off"]
DupPolicy = Literal["error", "skip", "suffix"]

MAX_REPEAT = 10_000
MAX_PRIORITY = 1_000_000
MAX_ID = 255  # characters
MAX_NAME = 255  # bytes: what file systems take
_ON: Reuse = "auto"
_OFF: Reuse = "off"
_REUSE: dict[str, Reuse] = {
    **dict.fromkeys(("auto", "on", "true", "yes", "1"), _ON),
    "force": "force",
    **dict.fromkeys(("off", "false", "no", "0"), _OFF),
}
_CHUNK = 1024  # rows whose prompts are tokenized together
_SETTLED = 4096  # different sets of parameters kept


@dataclass(frozen=True, slots=True)
class Row:
    """One video asked for. A source row that repeats gives several, which differ in `repeat` (from 0) and `seed`.

    `prompt` is as given, for display; `cleaned_prompt` is what the model reads. `extra` can be stored as JSON.
    """

    row: int  # data row of the file, from 1
    line: int  # physical line where it starts, from 1
    external_id: str | None
    prompt: str
    cleaned_prompt: str
    parameters: Parameters
    seed: int  # 0..2**63-1
    priority: int
    reuse: Reuse
    output_name: str | None  # a file name without folders
    extra: dict[str, Any]
    repeat: int = 0


@dataclass(frozen=True)
class IngestOptions:
    """How to read a file. Raises UsageError for options that can't be.

    `overrides` (`--set key=value`) win over the file, which wins over the card's defaults. `salt` is drawn once per
    batch (`secrets.randbits(64)`): all seeds that are drawn follow from it.
    """

    card: ModelCard
    format: str = "auto"
    encoding: str | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours
    overrides: Mapping[str, str] = field(default_factory=dict)
    seed_policy: str = "row"  # row | hash | fixed:N
    repeat: int = 1  # of rows that don't say
    dup_policy: DupPolicy = "error"
    truncate: bool = False  # accept prompts that the model doesn't read to their end
    salt: int = 0
    priority: int = 0  # of rows that don't say
    reuse: Reuse = "auto"  # of rows that don't say
    policy: str | None = None  # of rows that don't say; None: the card's

    def __post_init__(self) -> None:
        SeedPolicy.parse(self.seed_policy)
        ColumnNames(self.mapping)
        if self.format != "auto" and self.format not in FORMATS:
            raise UsageError(f"format is {self.format!r}", hint=f"use auto, {', '.join(FORMATS)}")
        for name, value, allowed in (("dup_policy", self.dup_policy, DupPolicy), ("reuse", self.reuse, Reuse)):
            if value not in get_args(allowed):
                raise UsageError(f"{name} is {value!r}", hint=f"use {', '.join(get_args(allowed))}")
        if self.policy not in (None, *POLICIES):
            raise UsageError(f"policy is {self.policy!r}", hint=f"use {', '.join(POLICIES)}")
        if not 1 <= self.repeat <= MAX_REPEAT:
            raise UsageError(f"repeat is {self.repeat}", hint=f"use 1 to {MAX_REPEAT}")
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise UsageError(f"priority is {self.priority}", hint=f"use -{MAX_PRIORITY} to {MAX_PRIORITY}")
        self._check_overrides()

    def _check_overrides(self) -> None:
        cells = self.set_cells
        for column in ("prompt", "id", "output_name"):
            if column in cells:
                raise UsageError(f"--set can't give every row the same {column}")
        asked = {k: v for k, v in cells.items() if k in PARAMETER_COLUMNS}
        errors = list(Settler(self.own_card).settle(asked).errors)
        if "steps" not in cells:
            # The rows say how many; each of them is held against its own.
            errors = [error for error in errors if error.code != "too_few_steps"]
        for column, reading in _READINGS.items():
            try:
                if column in cells:
                    reading(cells[column])
            except CellError as error:
                errors.append(error)
        if errors:
            raise UsageError(f"--set {errors[0].column}: {errors[0].message}")

    @property
    def own_card(self) -> ModelCard:
        """The card, with this batch's policy among its defaults."""
        defaults = self.card.defaults
        return replace(self.card, defaults=replace(defaults, policy=self.policy or defaults.policy))

    @property
    def set_cells(self) -> dict[str, str]:
        """The overrides under canonical names. Raises UsageError for an unknown one."""
        cells: dict[str, str] = {}
        for key, value in self.overrides.items():
            column = meaning(key)
            if column is None:
                raise UsageError(f"--set {key}={value}: there is no parameter {key!r}")
            if column in cells:
                raise UsageError(f"--set gives {column} twice")
            cells[column] = value
        return cells


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """`key=value` texts of a repeatable option. Raises UsageError."""
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{option} {text!r}: must be key=value")
        if key in pairs:
            raise UsageError(f"{option} gives {key!r} twice")
        pairs[key.strip()] = value
    return pairs


def read_batch(
    source: Source, options: IngestOptions, notes: Notes | None = None, seen: dict[str, int] | None = None
) -> Iterator[Row | RowError]:
    """The rows of a file in its order, and what is wrong with the rows that aren't valid, as a stream.

    A row with several faults gives a RowError for each and no Row. `seen` carries the ids from one file of a batch to
    the next (start each reading of the batch with an empty dict); `notes` collects what was changed on the way.
    Raises FileRejected where the file can't be read on: a broken encoding or quote, no prompt column, no rows. Rows
    that came before must then not be stored either.
    """
    notes = Notes() if notes is None else notes
    names = ColumnNames(options.mapping)
    dialect = detect(source, names, options.format, options.encoding)
    reader = RecordReader(source, dialect, names, notes)
    rows = _Rows(source, options, notes, {} if seen is None else seen)
    records = iter(reader)
    empty = True
    while chunk := list(itertools.islice(records, _CHUNK)):
        empty = False
        yield from rows.build(chunk)
    if empty:
        raise source.rejected("no_rows", "there are no prompts in the file")


class _Rows:
    """Turns records into rows."""

    def __init__(self, source: Source, options: IngestOptions, notes: Notes, seen: dict[str, int]) -> None:
        self._source = source
        self._options = options
        self._notes = notes
        self._seen = seen
        self._seeds = SeedPolicy.parse(options.seed_policy)
        self._settler = Settler(options.own_card)
        self._settled: dict[tuple[str | None, ...], Settled] = {}
        self._counter = TokenCounter(options.card.tokenizer)
        self._set = options.set_cells
        self._dropped = set(self._set).union(*(same for same in SAME if same & set(self._set)))

    def build(self, items: list[Record | RowError]) -> Iterator[Row | RowError]:
        """Rows and errors of some records, in order."""
        cleaned = [clean_prompt(item.cells.get("prompt", "")) if isinstance(item, Record) else "" for item in items]
        card = self._options.card
        warn = card.warn_prompt_tokens or card.max_prompt_tokens
        over = self._counter.over(cleaned, min(warn, card.max_prompt_tokens))
        for index, item in enumerate(items):
            if isinstance(item, RowError):
                yield item
            else:
                yield from self._rows(item, cleaned[index], over.get(index, 0))

    def _rows(self, record: Record, cleaned: str, tokens: int) -> Iterator[Row | RowError]:
        if self._set:
            self._override(record)
        cells = record.cells
        errors: list[CellError] = []

        def attempt(reading: Any, default: Any, *columns: str) -> Any:
            try:
                return reading(*(cells[column] for column in columns))
            except CellError as error:
                errors.append(error)
                return default

        options = self._options
        self._check_prompt(record, cleaned, tokens, errors)
        settled = self._parameters(cells)
        errors.extend(settled.errors)
        seed = attempt(stated_seed, None, "seed") if "seed" in cells else None
        repeat = attempt(_repeat, 1, "repeat") if "repeat" in cells else options.repeat
        priority = attempt(_priority, 0, "priority") if "priority" in cells else options.priority
        reuse = attempt(_reuse, "auto", "reuse") if "reuse" in cells else options.reuse
        name = attempt(_name, None, "output_name") if "output_name" in cells else None
        external_id = attempt(_id, None, "id") if "id" in cells else None
        draw = f"{options.salt}\0{self._source.name}\0{record.row}"
        seeds: list[int] = []
        try:
            seeds = [self._seeds.seed(seed, draw=draw, prompt=cleaned, repeat=index) for index in range(repeat)]
        except CellError as error:
            errors.append(error)
        if errors or settled.parameters is None:
            yield from (self._error(record, error) for error in errors)
            return
        for note in settled.notes:
            self._notes.add(*note, record.line)
        if name is not None and name != cells["output_name"].strip():
            self._notes.add("name_shortened", "output_name", "folders in output names are left out", record.line)
        prompt, parameters = cells["prompt"], settled.parameters
        for index, drawn in enumerate(seeds):
            ending = f"-{index + 1}" if repeat > 1 else ""
            own_id = None if external_id is None else external_id + ending
            if own_id is not None:
                unique = self._unique(own_id, record)
                if unique is None or isinstance(unique, RowError):
                    if unique is not None:
                        yield unique
                    continue
                own_id = unique
            own_name = None if name is None else _numbered(name, ending)
            yield Row(
                record.row,
                record.line,
                own_id,
                prompt,
                cleaned,
                parameters,
                drawn,
                priority,
                reuse,
                own_name,
                record.extra,
                index,
            )

    def _override(self, record: Record) -> None:
        lost = [column for column in record.cells if column in self._dropped]
        for column in lost:
            name = record.names.get(column, column)
            self._notes.add("overridden", name, f"column {name!r} gives way to --set", record.line)
            del record.cells[column]
        record.cells.update(self._set)

    def _check_prompt(self, record: Record, cleaned: str, tokens: int, errors: list[CellError]) -> None:
        if not cleaned or not (cleaned.isascii() or any(map(_visible, cleaned))):
            errors.append(CellError("prompt", "empty_prompt", "the prompt is empty"))
            return
        limit = self._options.card.max_prompt_tokens
        if tokens > limit:
            message = f"{tokens} tokens, the model {self._options.card.name} reads {limit}"
            if not self._options.truncate:
                hint = "shorten it, or pass --truncate to leave the rest unread"
                errors.append(CellError("prompt", "prompt_too_long", f"{message}: {hint}"))
            else:
                self._notes.add(
                    "truncated", "prompt", f"prompts of more than {limit} tokens are cut there", record.line
                )
        elif tokens:
            warn = self._options.card.warn_prompt_tokens
            self._notes.add("long_prompt", "prompt", f"above {warn} tokens the model's quality suffers", record.line)

    def _parameters(self, cells: Mapping[str, str]) -> Settled:
        """Rows mostly share their parameters: the same cells are settled once."""
        key = tuple(map(cells.get, PARAMETER_COLUMNS))
        settled = self._settled.get(key)
        if settled is None:
            if len(self._settled) >= _SETTLED:
                self._settled.clear()
            settled = self._negative_checked(self._settler.settle(cells))
            self._settled[key] = settled
        return settled

    def _negative_checked(self, settled: Settled) -> Settled:
        limit = self._options.card.max_prompt_tokens
        if settled.parameters is None or self._options.truncate:
            return settled
        over = self._counter.over([settled.parameters.negative_prompt], limit)
        if not over:
            return settled
        message = f"{over[0]} tokens, the model {self._options.card.name} reads {limit}"
        return Settled(None, (CellError("negative_prompt", "prompt_too_long", message),), ())

    def _unique(self, external_id: str, record: Record) -> str | RowError | None:
        """The id, made unique as the policy says; None to skip the row."""
        seen = self._seen
        if external_id not in seen:
            seen[external_id] = 1
            return external_id
        if self._options.dup_policy == "skip":
            self._notes.add("duplicate_skipped", "id", "rows whose id an earlier row has were left out", record.line)
            return None
        if self._options.dup_policy == "error":
            message = f"the id {external_id[:60]!r} stands in an earlier row (--dup-policy skip or suffix accepts it)"
            return self._error(record, CellError("id", "duplicate_id", message))
        number = seen[external_id]
        while (fresh := f"{external_id}-{number + 1}") in seen:
            number += 1
        seen[external_id] = number + 1
        seen[fresh] = 1
        self._notes.add("duplicate_suffixed", "id", "ids that an earlier row has got a number", record.line)
        return fresh

    def _error(self, record: Record, error: CellError) -> RowError:
        column = record.names.get(error.column, error.column)
        return RowError(self._source.name, record.row, record.line, column, error.code, error.message)


def _visible(character: str) -> bool:
    return unicodedata.category(character)[0] not in "CZ"


def _repeat(text: str) -> int:
    return whole("repeat", text, 1, MAX_REPEAT)


def _priority(text: str) -> int:
    return whole("priority", text, -MAX_PRIORITY, MAX_PRIORITY)


def _reuse(text: str) -> Reuse:
    try:
        return _REUSE[text.strip().lower()]
    except KeyError:
        raise CellError("reuse", "bad_value", f"must be auto (or on), force or off, not {text[:40]!r}") from None


def _id(text: str) -> str | None:
    plain = text.strip()
    if len(plain) > MAX_ID or not all(map(str.isprintable, plain)):
        raise CellError("id", "bad_id", f"must be up to {MAX_ID} printable characters, not {text[:40]!r}")
    return plain or None


def _name(text: str) -> str | None:
    """The file name of a path, of Windows or not: where the videos go is not for the file to say."""
    plain = text.strip()
    name = re.split(r"[/\\]", plain)[-1]
    size = len(name.encode())
    if plain and (name in ("", ".", "..") or size > MAX_NAME - len(f"-{MAX_REPEAT}") or not name.isprintable()):
        raise CellError("output_name", "bad_name", f"must be a file name of up to 249 bytes, not {text[:40]!r}")
    return name or None


def _numbered(name: str, ending: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}{ending}.{suffix}" if dot and stem else name + ending


_READINGS: dict[str, Any] = {"seed": stated_seed, "repeat": _repeat, "priority": _priority, "reuse": _reuse}
