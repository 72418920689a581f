"""The object store when the way to a real S3 server, or the server itself, misbehaves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from uuid import uuid4

import pytest

from chorus_batch.jobs import storage
from chorus_batch.jobs.errors import DependencyDown, ObjectCorrupt, ObjectMissing, StorageError
from chorus_batch.jobs.settings import Settings
from chorus_batch.jobs.storage import ObjectStore
from tests.faults.proxy import FaultProxy, Spoil, refusing_address

DATA = b"not all of it " * 100


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.02))


@pytest.fixture
def proxy(store_settings: Settings) -> Iterator[FaultProxy]:
    warm = ObjectStore.from_settings(store_settings)
    warm.ensure_bucket()
    warm.probe()  # the first object of a bucket takes its server longer than the time limits below
    with FaultProxy(store_settings.s3_endpoint) as proxy:
        yield proxy


@pytest.fixture
def store(store_settings: Settings, proxy: FaultProxy) -> ObjectStore:
    """A store whose way to the server leads through the proxy."""
    return ObjectStore.from_settings(replace(store_settings, s3_endpoint=proxy.address, s3_timeout=10.0))


@pytest.fixture
def hasty(store_settings: Settings, proxy: FaultProxy) -> ObjectStore:
    """The same, waiting a third of a second at most."""
    return ObjectStore.from_settings(replace(store_settings, s3_endpoint=proxy.address, s3_timeout=0.3))


@pytest.fixture
def direct(store_settings: Settings) -> ObjectStore:
    return ObjectStore.from_settings(store_settings)


@pytest.fixture
def key() -> str:
    return f"test/{uuid4().hex}"


def test_a_refusing_server_is_named_with_a_next_step(
    store_settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()  # the pauses as they really are
    with refusing_address() as address:
        store = ObjectStore.from_settings(replace(store_settings, s3_endpoint=address))
        begin = time.monotonic()
        with pytest.raises(DependencyDown, match=address) as caught:
            store.put("a", DATA, "video/mp4")
    assert 0.8 < time.monotonic() - begin < 10
    assert (caught.value.code, caught.value.exit_code) == ("storage_unreachable", 6)
    assert "refused" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("how", [Spoil.slow, Spoil.lose, Spoil.reset, Spoil.overload, Spoil.broken])
def test_every_request_survives_one_failure(
    how: Spoil, store: ObjectStore, hasty: ObjectStore, direct: ObjectStore, proxy: FaultProxy, key: str, tmp_path: Path
) -> None:
    store = hasty if how is Spoil.slow else store
    proxy.spoil(how, method="PUT")
    stored = store.put(key, DATA, "video/mp4")
    proxy.spoil(how, method="HEAD")
    assert store.stat(key) == stored
    proxy.spoil(how, method="GET")
    assert store.get(key, stored) == DATA
    proxy.spoil(how, method="GET")
    assert store.download(key, tmp_path / "a") == stored
    proxy.spoil(how, method="GET")
    assert [found.key for found in store.list(key)] == [key]
    proxy.spoil(how, method="POST")
    store.remove([key])
    assert not direct.exists(key)
    assert sum(request.spoiled is how for request in proxy.requests) == 6


@pytest.mark.parametrize("how", [Spoil.slow, Spoil.lose, Spoil.reset, Spoil.overload, Spoil.broken])
def test_a_failure_that_stays_is_named_after_three_tries(
    how: Spoil, store: ObjectStore, hasty: ObjectStore, proxy: FaultProxy, key: str, tmp_path: Path
) -> None:
    store = hasty if how is Spoil.slow else store
    calls: dict[str, Callable[[], object]] = {
        "PUT": lambda: store.put(key, DATA, "video/mp4"),
        "GET": lambda: store.download(key, tmp_path / "a"),
    }
    for method, call in calls.items():
        proxy.spoil(how, times=3, method=method)
        begin = time.monotonic()
        with pytest.raises(StorageError, match=proxy.address) as caught:
            call()
        assert time.monotonic() - begin < 5
        assert caught.value.code == "storage_unreachable"
        assert caught.value.__cause__ is not None
        assert proxy.count(method) == 3  # the SDK and urllib3 added none
    assert list(tmp_path.iterdir()) == []


def test_an_object_whose_receipt_was_lost_is_stored_once(
    store: ObjectStore, direct: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    proxy.spoil(Spoil.lose, method="PUT")
    stored = store.put(key, DATA, "video/mp4")
    assert [(r.method, r.spoiled) for r in proxy.requests] == [("PUT", Spoil.lose), ("PUT", None), ("HEAD", None)]
    assert proxy.requests[0].path == proxy.requests[1].path
    assert direct.get(key, stored) == DATA
    assert [found.key for found in direct.list(key)] == [key]


def test_a_server_that_only_says_it_stored_is_not_believed(store: ObjectStore, proxy: FaultProxy, key: str) -> None:
    proxy.spoil(Spoil.dishonest, times=3, method="PUT")
    with pytest.raises(ObjectCorrupt, match=key):
        store.put(key, DATA, "video/mp4")
    assert proxy.count("PUT") == 3


def test_a_put_over_an_older_object_is_checked_against_the_new_bytes(
    store: ObjectStore, direct: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    direct.put(key, DATA, "video/mp4")
    proxy.spoil(Spoil.dishonest, times=3, method="PUT")
    with pytest.raises(ObjectCorrupt, match="sha256"):
        store.put(key, DATA[::-1], "video/mp4")


@pytest.mark.parametrize("how", [Spoil.truncate, Spoil.corrupt])
def test_a_damaged_answer_is_fetched_again(
    how: Spoil, store: ObjectStore, direct: ObjectStore, proxy: FaultProxy, key: str, tmp_path: Path
) -> None:
    stored = direct.put(key, DATA, "video/mp4")
    proxy.spoil(how, times=2, method="GET")
    assert store.get(key) == DATA
    proxy.spoil(how, times=2, method="GET")
    store.download(key, tmp_path / "a", stored)
    assert (tmp_path / "a").read_bytes() == DATA
    assert proxy.count("GET") == 6


@pytest.mark.parametrize("how", [Spoil.truncate, Spoil.corrupt])
def test_answers_damaged_every_time_are_never_handed_out(
    how: Spoil, store: ObjectStore, direct: ObjectStore, proxy: FaultProxy, key: str, tmp_path: Path
) -> None:
    stored = direct.put(key, DATA, "video/mp4")
    proxy.spoil(how, times=6, method="GET")
    with pytest.raises(ObjectCorrupt, match=key):
        store.get(key, stored)
    with pytest.raises(ObjectCorrupt, match=key):
        store.download(key, tmp_path / "a", stored)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_trickles_cannot_hold_a_thread(
    hasty: ObjectStore, direct: ObjectStore, proxy: FaultProxy, key: str
) -> None:
    direct.put(key, DATA, "video/mp4")
    proxy.spoil(Spoil.trickle, times=3, method="GET")
    begin = time.monotonic()
    with pytest.raises(StorageError, match="bytes in time") as caught:
        hasty.get(key)
    assert time.monotonic() - begin < 10  # at its pace the whole answer takes 70 s
    assert caught.value.code == "storage_unreachable"


def test_a_large_object_goes_in_one_request(store: ObjectStore, proxy: FaultProxy, key: str) -> None:
    store.put(key, bytes(12 << 20), "video/mp4")
    assert [request.method for request in proxy.requests] == ["PUT", "HEAD"]
    store.remove([key])


def test_a_wrong_secret_is_refused_at_once(store_settings: Settings, proxy: FaultProxy, key: str) -> None:
    store = ObjectStore.from_settings(replace(store_settings, s3_endpoint=proxy.address, s3_secret_key="wrong"))
    for call in (
        store.ensure_bucket,
        lambda: store.put(key, DATA, "video/mp4"),
        lambda: store.get(key),
        lambda: store.exists(key),
        lambda: list(store.list(key)),
        lambda: store.remove([key]),
    ):
        before = len(proxy.requests)
        with pytest.raises(StorageError, match=proxy.address) as caught:
            call()
        assert caught.value.code == "storage_denied"
        assert "CHORUS_S3_SECRET_KEY" in caught.value.hint
        assert "wrong" not in str(caught.value)
        assert len(proxy.requests) == before + 1


def test_a_missing_bucket_is_not_taken_for_missing_objects(store_settings: Settings, key: str) -> None:
    bucket = f"none-{uuid4().hex}"
    store = ObjectStore.from_settings(replace(store_settings, s3_bucket=bucket))
    for call in (
        lambda: store.get(key),
        lambda: store.stat(key),
        lambda: store.exists(key),
        lambda: list(store.list(key)),
        lambda: store.remove([key]),
    ):
        with pytest.raises(StorageError, match=bucket) as caught:
            call()
        assert caught.value.code == "bucket_missing"
        assert not isinstance(caught.value, ObjectMissing)


def test_https_with_a_server_that_has_none_is_explained(store_settings: Settings, key: str) -> None:
    store = ObjectStore.from_settings(replace(store_settings, s3_secure=True))
    with pytest.raises(StorageError, match="https") as caught:
        store.get(key)
    assert "CHORUS_S3_SECURE" in caught.value.hint


def test_a_server_of_another_kind_is_explained(store_settings: Settings, key: str) -> None:
    class Website(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Website) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        with pytest.raises(StorageError, match=f"{address} doesn't speak S3"):
            ObjectStore.from_settings(replace(store_settings, s3_endpoint=address)).get(key)
        server.shutdown()
