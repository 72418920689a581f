"""Downloading results from a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chorus_batch.jobs import storage
from chorus_batch.jobs.errors import ObjectCorrupt, ObjectMissing, StorageError, UsageError
from chorus_batch.jobs.results.download import Delivery, download
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore, StoredObject

Files = list[tuple[StoredObject, str]]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02))


@pytest.fixture
def store(store_settings: Settings) -> ObjectStore:
    store = ObjectStore.from_settings(store_settings)
    store.ensure_bucket()
    return store


@pytest.fixture
def files(store: ObjectStore) -> Files:
    return [(store.put(f"v/{n}", f"video {n}".encode() * 1000, "video/mp4"), f"{n}.mp4") for n in range(20)]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_file_arrives_in_order(store: ObjectStore, files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    delivered = list(download(store, files, folder))
    assert delivered == [Delivery(name, stored, fetched=True) for stored, name in files]
    assert content(folder) == {f"{n}.mp4": f"video {n}".encode() * 1000 for n in range(20)}


def test_only_what_is_missing_or_wrong_is_fetched_again(store: ObjectStore, files: Files, tmp_path: Path) -> None:
    list(download(store, files, tmp_path))
    untouched = (tmp_path / "5.mp4").stat().st_mtime_ns
    (tmp_path / "2.mp4").unlink()
    (tmp_path / "3.mp4").write_bytes(b"video X" * 1000)  # as long as the right one
    (tmp_path / "4.mp4").write_bytes(b"half")
    fetched = [delivery.name for delivery in download(store, files, tmp_path) if delivery.fetched]
    assert fetched == ["2.mp4", "3.mp4", "4.mp4"]
    assert (tmp_path / "5.mp4").stat().st_mtime_ns == untouched
    assert content(tmp_path) == {f"{n}.mp4": f"video {n}".encode() * 1000 for n in range(20)}


def test_a_lost_object_does_not_stop_the_others(store: ObjectStore, files: Files, tmp_path: Path) -> None:
    store.remove([files[3][0].key])
    store.put(files[6][0].key, b"something else", "video/mp4")
    delivered = list(download(store, files, tmp_path))
    assert {n: type(d.error) for n, d in enumerate(delivered) if d.error} == {3: ObjectMissing, 6: ObjectCorrupt}
    assert set(content(tmp_path)) == {name for n, (_, name) in enumerate(files) if n not in (3, 6)}


def test_a_store_that_cannot_be_reached_stops_all(store_settings: Settings, files: Files, tmp_path: Path) -> None:
    nowhere = ObjectStore.from_settings(replace(store_settings, s3_endpoint="127.0.0.1:1"))
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1"):
        list(download(nowhere, files, tmp_path))
    assert content(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_fetched(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def never() -> Iterator[tuple[StoredObject, str]]:
        raise AssertionError("a file was asked for")
        yield

    with pytest.raises(UsageError, match="can't write") as caught:
        list(download(None, never(), tmp_path / "file"))  # type: ignore[arg-type]
    assert caught.value.code == "output_unwritable"


def test_something_in_the_way_of_a_file_is_named(store: ObjectStore, files: Files, tmp_path: Path) -> None:
    (tmp_path / "7.mp4").mkdir()
    with pytest.raises(UsageError, match=r"can't write .*7\.mp4"):
        list(download(store, files, tmp_path))
    assert not list(tmp_path.glob(".*"))


def test_no_name_leaves_the_folder(store: ObjectStore, files: Files, tmp_path: Path) -> None:
    for name in ("../out.mp4", "a/b.mp4", "..", ".", "", "/out.mp4"):
        with pytest.raises(ValueError, match="not a file name"):
            list(download(store, [(files[0][0], name)], tmp_path / "in"))
    assert list(tmp_path.rglob("*.mp4")) == []


def test_few_files_are_under_way_at_once(store: ObjectStore, files: Files, tmp_path: Path) -> None:
    asked = 0

    def counted() -> Iterator[tuple[StoredObject, str]]:
        nonlocal asked
        for file in files:
            asked += 1
            yield file

    delivering = download(store, counted(), tmp_path, threads=2)
    next(delivering)
    assert asked == 8
    delivering.close()  # as when a person stops the command
    assert not list(tmp_path.glob(".*"))
