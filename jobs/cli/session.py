"""What commands share: settings, the database, and how output is shaped."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from chorus_batch.jobs.settings import Settings, load_settings

if TYPE_CHECKING:
    from sqlalchemy import Engine

_UNFOLDED = 1 << 16  # columns
SCHEMA_VERSION = 1  # of everything that --json prints; raised when a field changes its meaning or goes

_C = TypeVar("_C", bound=Callable[..., Any])


class Session:
    """The settings with live servers behind them, and the database at this program's schema."""

    def __init__(self, settings: Settings) -> None:
        self.asked = settings  # as given, before servers were started

    @classmethod
    def of(cls, ctx: click.Context) -> Session:
        """The session of a command's context."""
        given = ctx.obj["data_dir"]
        logging.basicConfig(
            level=logging.INFO if ctx.obj["verbose"] else logging.ERROR,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        session = cls(load_settings(data_dir=Path(given) if given else None))
        ctx.call_on_close(session.close)
        return session

    def close(self) -> None:
        """Give back the connections; called when the command ends."""
        if "engine" in self.__dict__:
            self.engine.dispose()

    @cached_property
    def settings(self) -> Settings:
        """With addresses; in the local profile this starts the servers that aren't up."""
        from chorus_batch.jobs.local.profile import ensure

        return ensure(self.asked)

    @cached_property
    def engine(self) -> Engine:
        """The database with whatever schema it has."""
        from chorus_batch.jobs.database import connect

        return connect(self.settings.database_url)

    @cached_property
    def database(self) -> Engine:
        """The database with its schema upgraded."""
        from chorus_batch.jobs.database import ensure_schema

        ensure_schema(self.engine)
        return self.engine


def output_options(command: _C) -> _C:
    """--json and -q, as every command that prints data has them."""
    command = click.option("-q", "--quiet", is_flag=True, help="Print ids only.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def print_json(value: Any) -> None:
    """One object on one line, with the schema's version."""
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else dict(value)
    click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **fields}, default=plain))


def print_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Rows as a table; `columns` maps a row's key to the title."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in columns.values():
        table.add_column(Text(title), overflow="fold")
    for row in rows:
        # As Text: brackets in a prompt are no markup.
        table.add_row(*(Text(_cell(row[key])) for key in columns))
    # Lines are folded for a person's screen only, never for the next program of a pipe.
    Console(width=None if sys.stdout.isatty() else _UNFOLDED).print(table)


def plain(value: Any) -> Any:
    """What JSON lacks, as text."""
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return int(value) if value.is_finite() and value % 1 == 0 else float(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return str(value)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, dict | list):
        return json.dumps(value, default=plain, ensure_ascii=False)
    if isinstance(value, bytes | memoryview):
        return str(plain(value))
    return str(value)
