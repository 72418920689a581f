"""Manifests."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chorus_batch.jobs.errors import UsageError
from chorus_batch.jobs.results.download import prepare_folder, save_manifest
from chorus_batch.jobs.results.manifest import COLUMNS, Kind, manifest_row, write_manifest

DONE: dict[str, Any] = {
    "id": "a1",
    "row": 1,
    "prompt": "a red fox",
    "seed": 2**63 - 1,
    "state": "done",
    "file": "a1.mp4",
    "sha256": "0" * 64,
    "bytes": 1234,
    "cache_result": "semantic",
    "source": "a0",
    "similarity": 0.925,
    "steps_total": 20,
    "steps_computed": 12,
    "error_code": None,
    "error_message": None,
    "extra": {"shot": "wide"},
}
FAILED: dict[str, Any] = {
    "id": "a2",
    "row": 2,
    "prompt": "b",
    "seed": 1,
    "state": "failed",
    "error_code": "object_missing",
    "error_message": "gone",
}


def written(rows: list[dict[str, Any]], kind: Kind, extras: list[str] | None = None) -> str:
    out = io.StringIO(newline="")
    assert write_manifest(rows, out, kind, extras) == len(rows)
    return out.getvalue()


def cells(rows: list[dict[str, Any]], extras: list[str] | None = None) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(written(rows, "csv", extras), newline=""), strict=True))


def test_json_lines_hold_every_column_and_the_persons_own() -> None:
    first, second = map(json.loads, written([DONE, FAILED], "jsonl").splitlines())
    assert first == {**{name: DONE[name] for name in COLUMNS}, "shot": "wide"}
    assert list(second) == list(COLUMNS)
    assert second["file"] is None
    assert second["error_code"] == "object_missing"


def test_a_csv_holds_the_same() -> None:
    first, second = cells([DONE, FAILED])
    assert list(first) == [*COLUMNS, "shot"]
    assert (first["seed"], first["similarity"], first["shot"]) == ("9223372036854775807", "0.925", "wide")
    assert (second["file"], second["shot"], second["error_message"]) == ("", "", "gone")


def test_a_csv_cell_never_is_a_formula() -> None:
    for bad in ("=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx", "=cmd|' /C calc'!A0"):
        (line,) = cells([DONE | {"prompt": bad, "extra": {bad: bad}}])
        assert line["prompt"] == f"'{bad}"
        assert line[f"'{bad}"] == f"'{bad}"
    (line,) = cells([DONE | {"similarity": -0.5, "prompt": "1-2=3"}])
    assert (line["similarity"], line["prompt"]) == (
        "-0.5",
        "1-2=3",
    )  # numbers of ours and harmless text stay as they are


def test_json_lines_leave_text_alone() -> None:
    (line,) = map(json.loads, written([DONE | {"prompt": "=1+1"}], "jsonl").splitlines())
    assert line["prompt"] == "=1+1"


@pytest.mark.parametrize(
    "text", ['say "hi", fox', "two\nlines", "two\r\nlines", "a\rb", "a;b\tc", "狐 🦊 \u202e", " padded "]
)
def test_any_prompt_survives_both_kinds(text: str) -> None:
    assert cells([DONE | {"prompt": text}])[0]["prompt"] == text
    assert json.loads(written([DONE | {"prompt": text}], "jsonl"))["prompt"] == text


def test_a_persons_column_never_hides_one_of_ours() -> None:
    own = {"state": "CA", "extra.state": "NV", "extra.extra.state": "UT", "extra.shot": "1", "Bytes": "2"}
    line = manifest_row(DONE | {"extra": own})
    assert line["state"] == "done"
    assert {name: line[name] for name in line if name not in COLUMNS} == {
        "extra.state": "CA",
        "extra.extra.state": "NV",
        "extra.extra.extra.state": "UT",
        "extra.shot": "1",
        "Bytes": "2",
    }


def test_columns_that_only_some_rows_have_are_filled_up() -> None:
    first, second = cells([DONE, DONE | {"extra": {"mood": ["calm", 1]}}])
    assert (first["shot"], first["mood"]) == ("wide", "")
    assert (second["shot"], second["mood"]) == ("", '["calm", 1]')


def test_rows_stream_when_the_columns_are_known() -> None:
    out = io.StringIO(newline="")

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            # The row before this one has been written already.
            assert len(list(csv.reader(io.StringIO(out.getvalue(), newline="")))) == number + 1
            yield DONE

    assert write_manifest(rows(), out, "csv", ["shot"]) == 3


def test_a_column_that_was_not_announced_is_not_dropped() -> None:
    with pytest.raises(ValueError, match="shot"):
        written([DONE], "csv", ["mood"])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="parquet"):
        write_manifest([], io.StringIO(), "parquet")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_manifest_appears_whole_or_not_at_all(kind: Kind, tmp_path: Path) -> None:
    target = tmp_path / "manifest"

    def broken() -> Iterator[dict[str, Any]]:
        yield DONE
        raise RuntimeError("database gone")

    with pytest.raises(RuntimeError, match="gone"):
        save_manifest(broken(), target, kind, ["shot"])
    assert list(tmp_path.iterdir()) == []
    assert save_manifest([DONE, FAILED], target, kind) == 2
    assert target.read_bytes().decode() == written([DONE, FAILED], kind)
    assert list(tmp_path.iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (
        lambda: prepare_folder(tmp_path / "file"),
        lambda: prepare_folder(tmp_path / "file" / "below"),
        lambda: prepare_folder(Path("/proc/none")),
        lambda: save_manifest([DONE], tmp_path / "none" / "m.jsonl"),
        lambda: save_manifest([DONE], tmp_path / "file" / "m.jsonl"),
    ):
        with pytest.raises(UsageError, match="can't write") as caught:
            call()
        assert caught.value.code == "output_unwritable"
        assert caught.value.hint
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "a" / "b")
    prepare_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
