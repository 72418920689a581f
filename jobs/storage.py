"""Objects: videos, latents and cache entries in any S3 server, each written once and checked at every hop.

Only PUT, GET, HEAD, DELETE, LIST and presigned URLs are used: S3 servers differ in the rest. An object's sha256 travels
in its user metadata and is kept in the database too; ETags are not checksums on every server, so none is read.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import secrets
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from http.client import IncompleteRead
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar
from xml.etree.ElementTree import ParseError

import certifi
import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError
from minio.helpers import check_bucket_name

from chorus_batch.jobs import keys
from chorus_batch.jobs.errors import ObjectCorrupt, ObjectMissing, SettingsError, StorageError, UsageError
from chorus_batch.jobs.settings import Settings

PAUSES = (0.2, 0.8)  # seconds between tries; one try more than pauses
SLOWEST = 1 << 20  # bytes per second: a body that comes slower counts as stalled
LARGEST = 5 << 30  # bytes: what S3 takes in one PUT; parts of aborted uploads would fill the disk unseen
LONGEST_LINK = 7 * 24 * 3600  # seconds: what S3 allows for a presigned URL

_CHUNK = 1 << 18
_PAGE = 1000  # keys in one listing: what S3 gives at most
_PROBE = b"chorus-batch probe\n"
_SHA256 = "x-amz-meta-sha256"
_DENIED = frozenset({"AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId"})
_PASSING = frozenset(  # answers below 500 that a second try can change: damaged or interrupted on the way, or throttled
    {"RequestTimeout", "SlowDown", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"}
)
_THROTTLED = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})

_T = TypeVar("_T")


@dataclass(frozen=True)
class StoredObject:
    """An object as it was written. `size` in bytes; `sha256` in hex, empty if a stranger wrote it without one."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class ListedObject:
    """An object as a listing shows it: without a checksum. `size` in bytes; `modified` by the server's clock."""

    key: str
    size: int
    modified: datetime


@dataclass(frozen=True)
class Latencies:
    """How long each step of a probe took, in seconds; `put` includes the check after it."""

    put: float
    head: float
    get: float
    remove: float


class ObjectStore:
    """A bucket of one S3 server.

    Threads may share an instance: the SDK's client keeps no state between requests and urllib3's pool locks its own.
    Processes may not: a forked child would share its parent's sockets, so every process builds its own and an instance
    refuses to work in a process other than the one that built it.

    Every request is tried up to three times if the failure may pass (no connection, 5xx, time-out, damage on the way).
    A try lasts at most `settings.s3_timeout` seconds plus the size of its body at `SLOWEST`. What remains is a
    StorageError whose message names the server; its code is `storage_unreachable` if the failure may still pass later,
    `storage_denied`, `bucket_missing`, `object_missing`, `object_corrupt`, or `storage` for what no retry will change.
    """

    def __init__(self, client: Minio, settings: Settings) -> None:
        """Use `from_settings`; this takes a client that was made otherwise."""
        self._client = client
        self._settings = settings
        self._bucket = settings.s3_bucket
        self._process = os.getpid()

    @classmethod
    def from_settings(cls, settings: Settings) -> ObjectStore:
        """Make a client; nothing is sent yet. Raises SettingsError for an address or a name that can't be one."""
        if not settings.s3_endpoint:
            hint = "set CHORUS_S3_ENDPOINT to host:port, or use the local profile"
            raise SettingsError("s3_endpoint is empty", hint=hint)
        try:
            check_bucket_name(settings.s3_bucket, True)
        except ValueError as error:
            raise SettingsError(f"s3_bucket: {error}", hint="3 to 63 lower-case letters, digits and hyphens") from error
        try:
            client = Minio(
                settings.s3_endpoint,
                access_key=settings.s3_access_key,
                secret_key=settings.s3_secret_key,
                secure=settings.s3_secure,
                region=settings.s3_region,
                http_client=_Pool(settings.s3_timeout, settings.s3_secure),
            )
        except ValueError as error:
            hint = "host:port without a scheme; https is set by CHORUS_S3_SECURE"
            raise SettingsError(f"s3_endpoint is {settings.s3_endpoint!r}: {error}", hint=hint) from error
        return cls(client, settings)

    def ensure_bucket(self) -> None:
        """Make the bucket if it isn't there. Several processes may do so at once."""

        def ensure() -> None:
            # Looked at first: in production the keys are often not allowed to make buckets.
            if self._client.bucket_exists(self._bucket):
                return
            try:
                self._client.make_bucket(self._bucket)
            except S3Error as error:
                # Another process was faster; servers disagree on what to call that.
                if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                    raise

        self._tried(f"make bucket {self._bucket}", ensure)

    def put(self, key: str, data: bytes | Path, content_type: str) -> StoredObject:
        """Store an object in one PUT, then ask the server for its size and checksum.

        Sending the same bytes to the same key again is harmless, so a lost answer is simply another try.
        Raises ObjectCorrupt if the server has something else than was sent.
        """
        body = data if isinstance(data, bytes) else data.read_bytes()
        if len(body) > LARGEST:
            message = f"can't store {key}: it has {len(body)} bytes and one PUT takes {LARGEST}"
            raise StorageError(message, code="object_too_large")
        stored = StoredObject(key, len(body), hashlib.sha256(body).hexdigest())

        def put() -> StoredObject:
            self._client.put_object(
                self._bucket,
                key,
                io.BytesIO(body),
                len(body),
                content_type,
                metadata={"sha256": stored.sha256},
                part_size=max(len(body), 5 << 20),  # never below the body: one PUT
            )
            try:
                found = self._head(key)
            except ObjectMissing as error:
                raise ObjectCorrupt(f"{key} was accepted by {self._server} but isn't there") from error
            _compare(found, stored)
            return stored

        return self._tried(f"store {key}", put)

    def get(self, key: str, expected: StoredObject | None = None) -> bytes:
        """An object's bytes, checked against `expected` or, without it, against the checksum stored beside it.

        Raises ObjectMissing; ObjectCorrupt if size or checksum differ or the stream ends early at every try.
        """

        def get() -> bytes:
            buffer = io.BytesIO()
            self._stream(key, expected, buffer.write)
            return buffer.getvalue()

        return self._tried(f"fetch {key}", get)

    def download(self, key: str, path: Path, expected: StoredObject | None = None) -> StoredObject:
        """Like `get`, into a file that appears under its name only when it is complete and checked.

        Raises UsageError (code `output_unwritable`) if the file can't be written.
        """

        def download() -> StoredObject:
            # Beside the target, so that renaming is atomic; named shortly, as the target's may be the longest there is.
            part = path.parent / f".{secrets.token_hex(8)}.part"
            try:
                with part.open("xb") as file:
                    stored = self._stream(key, expected, file.write)
                part.replace(path)
                return stored
            except OSError as error:
                message = f"can't write {path}: {error.strerror}"
                hint = "choose another folder, or make room in this one"
                raise UsageError(message, hint=hint, code="output_unwritable") from error
            finally:
                with suppress(OSError):  # what there was to say about the folder has been said
                    part.unlink(missing_ok=True)

        return self._tried(f"fetch {key}", download)

    def stat(self, key: str) -> StoredObject:
        """An object's size and checksum as the server tells them. Raises ObjectMissing."""
        return self._tried(f"look up {key}", lambda: self._head(key))

    def exists(self, key: str) -> bool:
        """Whether there is an object of that key."""
        try:
            self.stat(key)
        except ObjectMissing:
            return False
        return True

    def remove(self, keys: Iterable[str]) -> None:
        """Remove objects, a thousand by request. A key that isn't there is no error."""
        wanted = list(keys)
        for start in range(0, len(wanted), 1000):
            targets = [DeleteObject(key) for key in wanted[start : start + 1000]]

            def remove(targets: list[DeleteObject] = targets) -> None:
                errors = [e for e in self._client.remove_objects(self._bucket, targets) if e.code != "NoSuchKey"]
                if errors:
                    first, rest = errors[0], len(errors) - 1
                    message = f"can't remove {first.name} and {rest} more from {self._server}"
                    raise StorageError(f"{message}: {first.code} {first.message}")

            self._tried(f"remove {len(targets)} objects", remove)

    def list(self, prefix: str) -> Iterator[ListedObject]:
        """The objects whose key begins with `prefix`, in the server's own order (servers differ in it)."""
        last: str | None = None
        while True:
            page = self._tried(f"list {prefix}", lambda after=last: self._page(prefix, after))  # type: ignore[misc]
            yield from page
            if len(page) < _PAGE:
                return
            last = page[-1].key

    def presign(self, key: str, seconds: int) -> str:
        """A URL that fetches the object without credentials for so many seconds. Nothing is asked of the server."""
        if not 1 <= seconds <= LONGEST_LINK:
            raise UsageError(f"a link can't be valid for {seconds} s", hint="from 1 second to 7 days")
        return self._client.presigned_get_object(self._bucket, key, expires=timedelta(seconds=seconds))

    def probe(self) -> Latencies:
        """Write, look up, read and remove a small object; raises what any of them raises."""
        key = f"{keys.PROBES}{secrets.token_hex(8)}"
        marks = [time.perf_counter()]

        def timed(call: Callable[[], object]) -> None:
            call()
            marks.append(time.perf_counter())

        stored = StoredObject(key, len(_PROBE), hashlib.sha256(_PROBE).hexdigest())
        timed(lambda: self.put(key, _PROBE, "application/octet-stream"))
        timed(lambda: self.stat(key))
        timed(lambda: self.get(key, stored))
        timed(lambda: self.remove([key]))
        if self.exists(key):
            raise StorageError(f"{self._server} still has {key} after removing it")
        return Latencies(*(after - before for before, after in pairwise(marks)))

    @property
    def _server(self) -> str:
        return f"S3 server {self._settings.s3_endpoint}"

    def _head(self, key: str) -> StoredObject:
        try:
            found = self._client.stat_object(self._bucket, key)
        except S3Error as error:
            if error.code != "NoSuchKey":
                raise
            # An answer to HEAD has no body: a missing bucket looks like a missing object but must not be taken for one.
            if not self._client.bucket_exists(self._bucket):
                raise self._without_bucket(f"look up {key}") from error
            raise ObjectMissing(f"{self._server} has no object {key} in bucket {self._bucket}") from error
        return StoredObject(key, found.size or 0, (found.metadata or {}).get(_SHA256) or "")

    def _stream(self, key: str, expected: StoredObject | None, write: Callable[[bytes], object]) -> StoredObject:
        """Feed an object's bytes to `write`; raises ObjectCorrupt at the first thing that isn't as expected."""
        response = self._client.get_object(self._bucket, key)
        try:
            told = StoredObject(key, int(response.headers.get("content-length", -1)), response.headers.get(_SHA256, ""))
            expected = expected or told
            if told.size not in (-1, expected.size):
                _compare(told, expected)
            end = time.monotonic() + self._settings.s3_timeout + max(told.size, 0) / SLOWEST
            digest, size = hashlib.sha256(), 0
            # read1 gives what has arrived, so that a server that sends a byte now and then can't hold this thread.
            while chunk := response.read1(_CHUNK):
                write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if time.monotonic() > end:
                    raise urllib3.exceptions.TimeoutError(f"only {size} of {told.size} bytes in time")
            found = StoredObject(key, size, digest.hexdigest())
            _compare(found, expected)
            return found
        except urllib3.exceptions.ProtocolError as error:
            if isinstance(error.__cause__, IncompleteRead):
                raise ObjectCorrupt(f"{key} from {self._server} ends before its {told.size} bytes") from error
            raise
        finally:
            response.close()
            response.release_conn()

    def _page(self, prefix: str, after: str | None) -> tuple[ListedObject, ...]:
        found = self._client.list_objects(self._bucket, prefix, recursive=True, start_after=after)
        return tuple(
            ListedObject(item.object_name, item.size or 0, item.last_modified)
            for item in islice(found, _PAGE)
            if item.object_name is not None and item.last_modified is not None
        )

    def _tried(self, what: str, call: Callable[[], _T]) -> _T:
        """Make a request, again if its failure may pass; every exception that leaves here is of the project's tree."""
        if os.getpid() != self._process:
            raise RuntimeError("this ObjectStore was made in another process; make one per process")
        for pause in (*PAUSES, None):
            try:
                return call()
            except (MinioException, urllib3.exceptions.HTTPError, ParseError, StorageError) as error:
                failure, passing = self._failure(what, error)
                if not passing or pause is None:
                    if failure is error:
                        raise
                    raise failure from error
                # Workers that failed together shouldn't come back together.
                time.sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311
        raise AssertionError("the last try returns or raises")

    def _failure(self, what: str, error: Exception) -> tuple[StorageError, bool]:
        """What to tell a person about `error`, and whether it may be gone at the next try."""
        if isinstance(error, StorageError):
            return error, isinstance(error, ObjectCorrupt)
        lasting = self._refusal(what, error) if isinstance(error, S3Error) else self._misfit(what, error)
        if lasting is not None:
            return lasting, False
        local = self._settings.profile == "local"
        hint = "`chorus-batch ps` shows the servers" if local else "check that it runs, and CHORUS_S3_ENDPOINT"
        message = f"can't {what}: {self._server} failed {len(PAUSES) + 1} times, at last with: {error}"
        return StorageError(message, hint=hint, code="storage_unreachable"), True

    def _refusal(self, what: str, error: S3Error) -> StorageError | None:
        """An S3 server's coded answer, if it will stay the same."""
        if error.code == "NoSuchKey":
            return ObjectMissing(f"can't {what}: {self._server} has no such object in {self._bucket}")
        if error.code == "NoSuchBucket":
            return self._without_bucket(what)
        if error.code in _DENIED:
            hint = "check CHORUS_S3_ACCESS_KEY and CHORUS_S3_SECRET_KEY, and what they are allowed on the bucket"
            return StorageError(f"can't {what}: {self._server} answered {error.code}", hint=hint, code="storage_denied")
        if _passing(error.response.status) or error.code in _PASSING:
            return None
        return StorageError(f"can't {what}: {self._server} answered {error.code}: {error.message}")

    def _misfit(self, what: str, error: Exception) -> StorageError | None:
        """What stays wrong between this client and whatever is at that address."""
        if isinstance(error, InvalidResponseError) and not _passing(error._code):
            hint = "is there an S3 server at that address?"
            return StorageError(f"can't {what}: {self._server} doesn't speak S3: {error}", hint=hint)
        if isinstance(error, ServerError) and not _passing(error.status_code):
            return StorageError(f"can't {what}: {self._server}: {error}")
        if isinstance(error, urllib3.exceptions.SSLError):
            hint = "check CHORUS_S3_SECURE, and that the server's certificate is signed by an authority known here"
            return StorageError(f"can't {what}: no https with {self._server}: {error}", hint=hint)
        return None

    def _without_bucket(self, what: str) -> StorageError:
        message = f"can't {what}: {self._server} has no bucket {self._bucket}"
        return StorageError(message, hint="make it, or name another in CHORUS_S3_BUCKET", code="bucket_missing")


class _Pool(urllib3.PoolManager):
    """Connections with the project's time limit, never retrying by themselves: `ObjectStore` counts the tries.

    A socket's limit covers sending the whole body, so a request with a large body is given the time to send it.
    """

    def __init__(self, limit: float, secure: bool) -> None:
        super().__init__(maxsize=16, retries=False, ssl_context=_trust() if secure else None)
        self._limit = limit

    def urlopen(  # type: ignore[override]  # PoolManager's own signature
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        seconds = self._limit + len(options.get("body") or b"") / SLOWEST
        return super().urlopen(method, url, redirect, timeout=urllib3.Timeout(seconds, seconds), **options)


def _trust() -> ssl.SSLContext:
    context = ssl.create_default_context()  # the system's authorities, or those of SSL_CERT_FILE
    context.load_verify_locations(certifi.where())  # a bare machine may have none
    return context


def _compare(found: StoredObject, expected: StoredObject) -> None:
    if found.size != expected.size:
        raise ObjectCorrupt(f"{found.key} has {found.size} bytes in the store instead of {expected.size}")
    if expected.sha256 and found.sha256 != expected.sha256:
        raise ObjectCorrupt(f"{found.key} has sha256 {found.sha256 or 'unknown'} instead of {expected.sha256}")


def _passing(status: int) -> bool:
    if status == HTTPStatus.NOT_IMPLEMENTED:
        return False
    return status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _THROTTLED
