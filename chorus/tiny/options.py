"""Command-line options from dataclasses: one for each field."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Fields = TypeVar("Fields", bound="DataclassInstance")
_TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "Path": Path}


def add_options(parser: argparse.ArgumentParser, kind: type[DataclassInstance]) -> None:
    """One option for each field of the dataclass `kind`, required where it has no default."""
    for field in fields(kind):
        name = "--" + field.name.replace("_", "-")
        if field.type == "bool":
            parser.add_argument(name, action="store_true")
        else:
            required = field.default is MISSING
            default = None if required else field.default
            parser.add_argument(name, type=_TYPES.get(str(field.type), str), required=required, default=default)


def read_options(options: argparse.Namespace, kind: type[Fields]) -> Fields:
    """The `kind` that the options of `add_options` say."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def parse(kind: type[Fields], description: str, arguments: list[str] | None = None) -> Fields:
    """A command that has no other options."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser, kind)
    return read_options(parser.parse_args(arguments), kind)
