"""What identifies a folder of weights: names and bytes of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from .errors import WeightsError

# The list itself is no weight, so that writing it doesn't change what it lists.
CHECKSUMS = "checksums.json"


def file_checksums(folder: Path) -> dict[str, str]:
    """sha256 of every file below `folder`, by its relative name with forward slashes."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != CHECKSUMS)
    return {p.relative_to(folder).as_posix(): file_checksum(p) for p in files}


def file_checksum(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def combine(checksums: Mapping[str, str]) -> str:
    """One sha256 over sorted (name, checksum) pairs."""
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()


def verify(folder: Path, expected: Mapping[str, str], repair: str) -> None:
    """Every file of `expected` is below `folder` with that sha256. Raises WeightsError, with `repair` as its hint."""
    for name, checksum in expected.items():
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"weight file {path} is missing", hint=repair)
        if file_checksum(path) != checksum:
            raise WeightsError(f"weight file {path} is not the one that was shipped", hint=repair)
