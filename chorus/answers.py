"""What a language model has answered, kept in a file: workers of one host, and later nights, ask about a pair once."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


class AnswerFile:
    """JSON Lines that are only ever added to, by several processes at once. A line that can't be read is skipped.

    `model` tells models apart, by their weights: an answer is given back to the model that wrote it alone. Where the
    file can't be read or written nothing is lost but time.
    """

    def __init__(self, path: Path, model: str) -> None:
        self._path, self._model = path, model
        self._answers: dict[str, str] = {}
        self._read = 0  # bytes

    def get(self, question: str) -> str | None:
        """The answer to a question, or None."""
        key = _key(question)
        if key not in self._answers:
            self._follow()
        return self._answers.get(key)

    def add(self, question: str, answer: str) -> None:
        """Keep an answer."""
        key = _key(question)
        self._answers[key] = answer
        line = json.dumps({"model": self._model, "question": key, "answer": answer}).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+", buffering=0) as file:
                # Whoever died while writing has left half a line.
                if file.seek(0, os.SEEK_END) and _last(file.fileno()) != b"\n":
                    line = b"\n" + line
                file.write(line)
        except OSError:
            pass  # a read-only file system, or a full one: the next process asks again

    def _follow(self) -> None:
        """Read what was added since, whole lines only."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except OSError:
            return  # nothing has been kept yet
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                told = json.loads(line)
                if told["model"] == self._model:
                    self._answers[str(told["question"])] = str(told["answer"])
            except (ValueError, LookupError, TypeError, RecursionError):
                continue


def _key(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()


def _last(descriptor: int) -> bytes:
    return os.pread(descriptor, 1, os.fstat(descriptor).st_size - 1)
