"""Seeds: a person's own, drawn, hashed or fixed; always settled when the file is read, never when the job runs."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.ingest.cells import CellError, whole

MAX_SEED = 2**63 - 1
_SAFE_DIGITS = 18  # that many are always below MAX_SEED
_DRAWN_BITS = 31  # short enough to type, and every tool takes them


@dataclass(frozen=True)
class SeedPolicy:
    """What a row without a seed gets (one with a seed keeps it, under every policy).

    `row`: drawn; `hash`: derived from the prompt, so that the same prompt has the same seed in every file;
    `fixed`: the same for all.
    """

    kind: str
    fixed: int = 0

    @classmethod
    def parse(cls, text: str) -> SeedPolicy:
        """Read `row`, `hash` or `fixed:N`. Raises UsageError."""
        if text in ("row", "hash"):
            return cls(text)
        match = re.fullmatch(r"fixed:([0-9]{1,19})", text)
        if match is None or int(match[1]) > MAX_SEED:
            raise UsageError(f"seed policy is {text!r}", hint="use row, hash or fixed:N")
        return cls("fixed", int(match[1]))

    def seed(self, stated: int | None, *, draw: str, prompt: str, repeat: int) -> int:
        """The seed of one repetition. Raises CellError where seed + repeat is too large.

        `draw` names the row: the same name draws the same seed, so that two readings of a file agree.
        """
        if stated is None and self.kind == "fixed":
            stated = self.fixed
        if stated is not None:
            if stated + repeat > MAX_SEED:
                raise CellError("seed", "out_of_range", f"must be up to {MAX_SEED} with its repetitions")
            return stated + repeat
        return _hashed(f"{prompt}\0{repeat}" if self.kind == "hash" else f"{draw}\0{repeat}")


def stated_seed(text: str | None) -> int | None:
    """The seed that a cell states; None for nothing, `-1` and `random`. Raises CellError."""
    if text is not None and len(text) <= _SAFE_DIGITS and text.isascii() and text.isdigit():
        return int(text)  # the usual case, without a regular expression
    if text is None or text.strip().lower() in ("", "-1", "-1.0", "random"):
        return None
    return whole("seed", text, 0, MAX_SEED)


def _hashed(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _DRAWN_BITS)
