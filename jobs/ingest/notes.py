"""What was done to an input that its author should know, counted by kind so that a million rows stay readable."""

from __future__ import annotations

from dataclasses import dataclass

KINDS_SHOWN = 100  # different messages of one kind; further ones are counted together


@dataclass(frozen=True, slots=True)
class Note:
    """`count` rows had it, the first of them on line `line`."""

    kind: str
    column: str
    message: str
    count: int
    line: int

    def __str__(self) -> str:
        times = f" ({self.count} times, first on line {self.line})" if self.count > 1 else ""
        return f"{self.message}{times}"


class Notes:
    """Collects notes in bounded memory."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], list[int]] = {}
        self._kinds: dict[str, int] = {}

    def add(self, kind: str, column: str, message: str, line: int) -> None:
        """Count one more row."""
        key = (kind, column, message)
        counted = self._counts.get(key)
        if counted is None:
            seen = self._kinds.get(kind, 0)
            if seen >= KINDS_SHOWN:
                key = (kind, "", f"more of the same kind: {kind}")
                counted = self._counts.get(key)
            else:
                self._kinds[kind] = seen + 1
        if counted is None:
            self._counts[key] = [1, line]
        else:
            counted[0] += 1

    def summary(self) -> tuple[Note, ...]:
        """The notes in the order in which their kinds first appeared."""
        return tuple(Note(*key, count=count, line=line) for key, (count, line) in self._counts.items())
