"""The file of answers: shared, added to, and read whatever stands in it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chorus_batch.chorus.answers import AnswerFile


def test_what_one_adds_another_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "answers.jsonl"
    first, second = AnswerFile(path, "m"), AnswerFile(path, "m")
    assert second.get("a?") is None
    first.add("a?", "yes\nno\u2028é")
    first.add("b?", "")
    assert (second.get("a?"), second.get("b?"), second.get("c?")) == ("yes\nno\u2028é", "", None)
    second.add("c?", "c")
    assert first.get("c?") == "c"
    assert len(path.read_bytes().splitlines()) == 3


def test_another_models_answers_are_not_taken(tmp_path: Path) -> None:
    AnswerFile(tmp_path / "a", "m").add("a?", "yes")
    other = AnswerFile(tmp_path / "a", "n")
    assert other.get("a?") is None
    other.add("a?", "no")
    assert (AnswerFile(tmp_path / "a", "m").get("a?"), AnswerFile(tmp_path / "a", "n").get("a?")) == ("yes", "no")


@pytest.mark.parametrize(
    "line",
    [b"\n", b"{\n", b"[]\n", b"null\n", b"\xff\xfe\n", b'{"model": "m"}\n', b'{"model": "m", "question": "x', b"["],
)
def test_what_cant_be_read_is_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a"
    answers = AnswerFile(path, "m")
    answers.add("a?", "1")
    with path.open("ab") as file:
        file.write(line)
    # Also where whoever died while writing left half a line.
    answers.add("b?", "2")
    fresh = AnswerFile(path, "m")
    assert (fresh.get("a?"), fresh.get("b?")) == ("1", "2")


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    AnswerFile(tmp_path / "whole", "m").add("a?", "1")
    line = (tmp_path / "whole").read_bytes()
    reader, path = AnswerFile(tmp_path / "a", "m"), tmp_path / "a"
    path.write_bytes(line[:20])
    assert reader.get("a?") is None
    path.write_bytes(line)
    assert reader.get("a?") == "1"


def test_several_write_at_once(tmp_path: Path) -> None:
    writers = [AnswerFile(tmp_path / "a", "m") for _ in range(4)]

    def write(number: int) -> None:
        for i in range(25):
            writers[number].add(f"{number}.{i}?", "x" * 500)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(4)))
    fresh = AnswerFile(tmp_path / "a", "m")
    assert all(fresh.get(f"{number}.{i}?") == "x" * 500 for number in range(4) for i in range(25))
    assert all(json.loads(line) for line in (tmp_path / "a").read_bytes().splitlines() if line)


def test_a_file_that_cant_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answers = AnswerFile(tmp_path / "file" / "a", "m")
    answers.add("a?", "1")
    assert (answers.get("a?"), answers.get("b?")) == ("1", None)
