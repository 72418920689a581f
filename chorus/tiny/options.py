"""Command-line options from dataclasses: one for each field."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Fields = TypeVar("Fields")
_TYPES = {"int": int, "float": float}


def add_options(parser: argparse.ArgumentParser, kind: type[Any]) -> None:
    """One option for each field of the dataclass `kind`, required where it has no default."""
    for field in fields(kind):
        name = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(name, action="store_true")
        elif field.default is MISSING:
            parser.add_argument(name, type=_TYPES.get(str(field.type), str), required=True)
        else:
            parser.add_argument(name, type=_TYPES.get(str(field.type), str), default=field.default)


def read_options(options: argparse.Namespace, kind: type[Fields]) -> Fields:
    """The `kind` that the options of `add_options` say."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})  # type: ignore[arg-type]


def parse(kind: type[Fields], description: str, arguments: list[str] | None = None) -> Fields:
    """A command that has no other options."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser, kind)
    return read_options(parser.parse_args(arguments), kind)
