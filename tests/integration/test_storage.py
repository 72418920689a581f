"""The object store against a real S3 server."""

from __future__ import annotations

import hashlib
import io
import os
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from minio import Minio

from chorus_batch.jobs import storage
from chorus_batch.jobs.errors import ObjectCorrupt, ObjectMissing, SettingsError, UsageError
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore, StoredObject


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02))


@pytest.fixture
def store(store_settings: Settings) -> ObjectStore:
    store = ObjectStore.from_settings(store_settings)
    store.ensure_bucket()
    return store


@pytest.fixture
def prefix(store: ObjectStore) -> Iterator[str]:
    prefix = f"test/{uuid4().hex}"
    yield prefix
    store.remove([found.key for found in store.list(prefix)])


@pytest.fixture
def bucket(store_settings: Settings) -> str:
    return store_settings.s3_bucket


@pytest.fixture
def stranger(store_settings: Settings) -> Minio:
    """Someone else's client, writing what `ObjectStore` never would."""
    settings = store_settings
    return Minio(settings.s3_endpoint, settings.s3_access_key, settings.s3_secret_key, secure=False, region="us-east-1")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_processes_that_start_together_share_one_bucket(store_settings: Settings) -> None:
    settings = replace(store_settings, s3_bucket=f"race-{uuid4().hex}")
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: ObjectStore.from_settings(settings).ensure_bucket(), range(6)))
    assert list(ObjectStore.from_settings(settings).list("")) == []


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40_000], ids=["empty", "one byte", "10 MB"])
def test_what_is_stored_comes_back(store: ObjectStore, prefix: str, data: bytes) -> None:
    stored = store.put(f"{prefix}/a", data, "video/mp4")
    assert stored == StoredObject(f"{prefix}/a", len(data), sha256(data))
    assert store.stat(stored.key) == stored
    assert store.get(stored.key, stored) == data
    assert store.get(stored.key) == data
    assert store.exists(stored.key)


def test_a_file_is_stored_with_its_type(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(b"frames")
    stored = store.put(f"{prefix}/v.mp4", tmp_path / "v.mp4", "video/mp4")
    assert store.get(stored.key) == b"frames"
    with urllib.request.urlopen(store.presign(stored.key, 60)) as answer:
        assert answer.headers["content-type"] == "video/mp4"


def test_a_missing_object_is_named(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    key = f"{prefix}/none"
    for call in (store.get, store.stat, lambda key: store.download(key, tmp_path / "none")):
        with pytest.raises(ObjectMissing, match=key) as caught:
            call(key)
        assert caught.value.code == "object_missing"
    assert not store.exists(key)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_changed_is_not_handed_out(
    store: ObjectStore, prefix: str, stranger: Minio, bucket: str, tmp_path: Path
) -> None:
    stored = store.put(f"{prefix}/a", b"latents", "application/octet-stream")
    for changed in (b"LATENTS", b"latent", b"latents!"):  # same size, shorter, longer
        stranger.put_object(bucket, stored.key, io.BytesIO(changed), len(changed))
        with pytest.raises(ObjectCorrupt, match=stored.key):
            store.get(stored.key, stored)
        with pytest.raises(ObjectCorrupt, match=stored.key):
            store.download(stored.key, tmp_path / "a", stored)
    assert list(tmp_path.iterdir()) == []


def test_a_stored_checksum_is_checked_without_being_asked(
    store: ObjectStore, prefix: str, stranger: Minio, bucket: str
) -> None:
    key = f"{prefix}/a"
    stranger.put_object(bucket, key, io.BytesIO(b"flipped"), 7, metadata={"sha256": sha256(b"written")})
    with pytest.raises(ObjectCorrupt, match=sha256(b"flipped")):
        store.get(key)


def test_an_object_without_checksum_is_told_apart(
    store: ObjectStore, prefix: str, stranger: Minio, bucket: str
) -> None:
    stranger.put_object(bucket, f"{prefix}/a", io.BytesIO(b"foreign"), 7)
    assert store.stat(f"{prefix}/a") == StoredObject(f"{prefix}/a", 7, "")
    assert store.get(f"{prefix}/a") == b"foreign"


def test_listing_goes_on_after_a_full_page(store: ObjectStore, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_PAGE", 3)
    # Servers put "-" before or after "/"; whatever they do, nothing may be left out or come twice.
    names = ["a", "a-b", "a/b", "a.b", "b/c/d", "b/c/e", "b.c", "z"]
    for name in names:
        store.put(f"{prefix}/{name}", name.encode(), "text/plain")
    listed = list(store.list(f"{prefix}/"))
    assert sorted(found.key for found in listed) == sorted(f"{prefix}/{name}" for name in names)
    assert {found.key: found.size for found in listed} == {f"{prefix}/{name}": len(name) for name in names}
    assert {found.key for found in store.list(f"{prefix}/b")} == {f"{prefix}/{n}" for n in names if n.startswith("b")}


def test_removing_takes_many_and_forgives_missing(store: ObjectStore, prefix: str) -> None:
    written = [store.put(f"{prefix}/{n}", b"x", "text/plain").key for n in range(5)]
    store.remove([*written[:4], *(f"{prefix}/none{n}" for n in range(1500))])
    assert [found.key for found in store.list(prefix)] == written[4:]
    store.remove([])


def test_a_download_replaces_its_target_whole(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    data = os.urandom(3_000_000)
    stored = store.put(f"{prefix}/a", data, "video/mp4")
    target = tmp_path / ("n" * 251 + ".mp4")  # the longest name there is
    target.write_bytes(b"old")
    assert store.download(stored.key, target, stored) == stored
    assert target.read_bytes() == data
    with pytest.raises(ObjectCorrupt):
        store.download(stored.key, target, replace(stored, sha256="0" * 64))
    assert target.read_bytes() == data
    assert list(tmp_path.iterdir()) == [target]


def test_a_download_that_cannot_be_written_says_so(store: ObjectStore, prefix: str, tmp_path: Path) -> None:
    stored = store.put(f"{prefix}/a", b"x", "video/mp4")
    (tmp_path / "file").touch()
    for target in (tmp_path / "none" / "a.mp4", tmp_path / "file" / "a.mp4", tmp_path / ("n" * 256)):
        with pytest.raises(UsageError) as caught:
            store.download(stored.key, target)
        assert caught.value.code == "output_unwritable"
        assert str(target) in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_link_needs_no_credentials_and_can_be_neither_changed_nor_kept(store: ObjectStore, prefix: str) -> None:
    store.put(f"{prefix}/a", b"shown", "text/plain")
    store.put(f"{prefix}/b", b"hidden", "text/plain")
    link = store.presign(f"{prefix}/a", 60)
    with urllib.request.urlopen(link) as answer:
        assert answer.read() == b"shown"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(link.replace(f"{prefix}/a", f"{prefix}/b"))
    for seconds in (0, 7 * 24 * 3600 + 1):
        with pytest.raises(UsageError, match=f"{seconds} s"):
            store.presign(f"{prefix}/a", seconds)


def test_a_probe_leaves_nothing(store: ObjectStore) -> None:
    took = store.probe()
    assert min(took.put, took.head, took.get, took.remove) > 0
    assert list(store.list("probe/")) == []


def test_threads_share_a_store(store: ObjectStore, prefix: str) -> None:
    def trip(number: int) -> bool:
        data = f"{number}".encode() * 10_000
        return store.get(store.put(f"{prefix}/{number}", data, "text/plain").key) == data

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(trip, range(48)))


def test_a_forked_child_is_refused(store: ObjectStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike any fork beside threads
        child = os.fork()
    if child == 0:
        try:
            store.exists("x")
        except RuntimeError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"s3_endpoint": ""}, "s3_endpoint"),
        ({"s3_endpoint": "http://127.0.0.1:1"}, "s3_endpoint"),
        ({"s3_endpoint": "127.0.0.1:port"}, "s3_endpoint"),
        ({"s3_bucket": "No"}, "s3_bucket"),
        ({"s3_bucket": ""}, "s3_bucket"),
    ],
)
def test_an_unusable_setting_is_named(store_settings: Settings, change: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named) as caught:
        ObjectStore.from_settings(store_settings.with_addresses(**change))
    assert caught.value.hint
