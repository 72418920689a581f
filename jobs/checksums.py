"""sha256 of large files, remembered: the weights of one model are tens of gigabytes, and they seldom change."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

_CHUNK = 1 << 22

Told = Callable[[int, int], None]  # bytes done, of all


def _silent(done: int, total: int) -> None:
    pass


class Checksums:
    """Reads a file once, and again only when its path, size or time of change is another.

    What is remembered lies in one JSON file. Where that can't be written files are read each time.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    def of(self, files: Mapping[str, Path], *, anew: bool = False, tell: Told = _silent) -> dict[str, str]:
        """sha256 (hex) of each file, by its name; `anew` reads all of them. Raises OSError."""
        known = {} if anew else self._known()
        sizes = {name: path.stat().st_size for name, path in files.items()}
        total, done, found = sum(sizes.values()), 0, {}
        fresh: dict[str, str] = {}
        for name, path in files.items():
            key = _key(path)
            found[name] = known.get(key) or _read(path, partial(_told, tell, done, total))
            fresh[key] = found[name]
            done += sizes[name]
            tell(done, total)
        if fresh.items() - known.items():
            # What was read long ago may be of another process by now: read again, and added to.
            self._remember({**self._known(), **fresh})
        return found

    def remembered(self, files: Mapping[str, Path]) -> dict[str, str] | None:
        """What `of` gives, if it can be told without reading one of them. Raises OSError."""
        known = self._known()
        found = {name: known.get(_key(path)) for name, path in files.items()}
        return {name: sha256 for name, sha256 in found.items() if sha256} if all(found.values()) else None

    def _known(self) -> dict[str, str]:
        try:
            return dict(json.loads(self._memory.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return {}

    def _remember(self, known: Mapping[str, str]) -> None:
        try:
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._memory.parent, encoding="utf-8", delete=False) as file:
                json.dump(known, file)
            Path(file.name).replace(self._memory)
        except OSError:
            pass  # a read-only file system, or a full one: the next process reads the files itself


def combine(checksums: Mapping[str, str]) -> str:
    """One sha256 (hex) over sorted names and values."""
    return hashlib.sha256(json.dumps(sorted(checksums.items())).encode()).hexdigest()


def _told(tell: Told, before: int, total: int, count: int) -> None:
    tell(before + count, total)


def _key(path: Path) -> str:
    status = path.stat()
    return f"{os.path.realpath(path)}:{status.st_size}:{status.st_mtime_ns}"


def _read(path: Path, tell: Callable[[int], None]) -> str:
    sha256, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            sha256.update(chunk)
            done += len(chunk)
            tell(done)
    return sha256.hexdigest()
