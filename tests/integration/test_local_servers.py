"""The local profile's servers while all is well: they answer, keep their secrets, and listen to nobody else."""

from __future__ import annotations

import http.client
import io
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from kombu.connection import Connection
from minio import Minio
from minio.error import S3Error

from chorus_batch.jobs.errors import SettingsError
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.local.account import server_account
from chorus_batch.jobs.local.datafolder import DataFolder
from chorus_batch.jobs.local.process import Process, holding, launch, wait_until
from chorus_batch.jobs.settings import Settings


def store(settings: Settings, secret_key: str | None = None) -> Minio:
    secret = settings.s3_secret_key if secret_key is None else secret_key
    return Minio(settings.s3_endpoint, settings.s3_access_key, secret, secure=False, region=settings.s3_region)


def processes(settings: Settings, name: str) -> list[Process]:
    """A server's process and its children."""
    return list(holding(DataFolder(settings.data_dir).server_lock(name)))


def listening(processes: list[Process]) -> Iterator[str]:
    """The addresses, as the kernel's tables give them in hex, at which these processes accept TCP connections."""
    sockets = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor))
            except FileNotFoundError:
                continue
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                yield words[1].split(":")[0]


def test_the_database_is_postgres_18_with_pgvector_and_asks_for_the_password(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        row = connection.execute("SELECT '[3,4]'::halfvec <-> '[0,0]'::halfvec, version()").fetchone()
        assert row is not None
        assert row[0] == 5.0
        assert row[1].startswith("PostgreSQL 18.")
        for setting, value in {"data_checksums": "on", "listen_addresses": "", "fsync": "on"}.items():
            assert connection.execute(f"SHOW {setting}").fetchone() == (value,)
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(database_url, password="wrong")


def test_a_fresh_database_is_empty_and_the_servers_own_exists(servers: Settings, database_url: str) -> None:
    assert database_url != servers.database_url
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM pg_stat_user_tables").fetchone() == (0,)
    with psycopg.connect(servers.database_url) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("chorus_batch",)


def test_the_broker_carries_a_message(servers: Settings) -> None:
    with Connection(servers.broker_url) as connection, connection.SimpleQueue("test_local_servers") as queue:  # type: ignore[no-untyped-call]
        queue.put({"nudge": 1})
        message = queue.get(timeout=5)
        assert message.payload == {"nudge": 1}
        message.ack()


def test_the_store_takes_an_object_and_refuses_wrong_keys(store_settings: Settings) -> None:
    bucket, client = store_settings.s3_bucket, store(store_settings)
    client.make_bucket(bucket)
    client.put_object(bucket, "a/b", io.BytesIO(b"hello"), 5)
    with client.get_object(bucket, "a/b") as answer:
        assert answer.data == b"hello"
    with pytest.raises(S3Error, match="SignatureDoesNotMatch"):
        store(store_settings, secret_key="wrong").get_object(bucket, "a/b")
    with pytest.raises(S3Error, match="AccessDenied"):
        Minio(store_settings.s3_endpoint, secure=False, region="us-east-1").get_object(bucket, "a/b")
    # The store's inner HTTP ports would give the same object to anyone on this machine.
    ports = json.loads(DataFolder(store_settings.data_dir).state_path.read_text())["ports"]
    for method in ("GET", "DELETE"):
        inner = http.client.HTTPConnection("127.0.0.1", ports["filer"], timeout=5)
        inner.request(method, f"/buckets/{bucket}/a/b")
        assert inner.getresponse().status == 401
        inner.close()


def test_an_unknown_bucket_is_not_made_by_writing_to_it(store_settings: Settings) -> None:
    with pytest.raises(S3Error, match="NoSuchBucket"):
        store(store_settings).put_object(store_settings.s3_bucket, "a", io.BytesIO(b"x"), 1)


def test_nothing_listens_beyond_loopback(servers: Settings) -> None:
    loopback = {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1
    for name in ("postgres", "broker"):
        found = processes(servers, name)
        assert found
        assert list(listening(found)) == []
    addresses = list(listening(processes(servers, "store")))
    assert len(addresses) >= 8
    assert set(addresses) <= loopback


def test_secrets_stay_in_files_that_only_their_owner_reads(servers: Settings) -> None:
    folder = DataFolder(servers.data_dir)
    secrets = json.loads(folder.secrets_path.read_text())
    for path in (folder.secrets_path, folder.state_path, *folder.servers.glob("store/*.*")):
        assert path.stat().st_mode & 0o777 == 0o600, path
    for path in (
        folder.log("any").parent,
        *(folder.servers / name for name in ("postgres", "broker", "store", "sockets")),
    ):
        assert path.stat().st_mode & 0o777 == 0o700, path
    assert not (folder.servers / "postgres" / "password").exists()
    shown = repr(local.ps(servers))
    for name in ("postgres", "broker", "store"):
        shown += folder.log(name).read_text(errors="replace")
        for process in processes(servers, name):
            shown += Path(f"/proc/{process.pid}/cmdline").read_text()
    for secret in secrets.values():
        assert secret not in shown


def test_the_servers_never_run_as_root(servers: Settings) -> None:
    for status in local.ps(servers):
        uid = Path(f"/proc/{status.pid}").stat().st_uid
        assert uid != 0
        assert uid == server_account().uid


def test_ps_tells_what_runs(servers: Settings) -> None:
    found = local.ps(servers)
    assert [status.name for status in found] == ["postgres", "broker", "store"]
    for status in found:
        assert status.running
        assert 0 < status.uptime_seconds < 3600
        assert status.log_path.stat().st_size > 0
    versions = [status.version for status in found]
    assert [version.split(".")[0] for version in versions] == ["18", "9", "4"]
    assert found[2].address == servers.s3_endpoint


def test_a_second_ensure_starts_nothing_and_is_quick(servers: Settings) -> None:
    before = local.ps(servers)
    asked = Settings(data_dir=servers.data_dir, model=servers.model)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        assert local.ensure(asked) == servers
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
    assert [status.pid for status in local.ps(servers)] == [status.pid for status in before]


def test_a_second_ensure_needs_no_lock(servers: Settings) -> None:
    with DataFolder(servers.data_dir).locked():
        assert local.ensure(Settings(data_dir=servers.data_dir, model=servers.model)) == servers


def test_a_server_sees_nothing_of_the_persons_environment(
    servers: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    log = tmp_path / "log"
    with (tmp_path / "lock").open("w") as held:
        launch(["/usr/bin/env"], server_account(), folder=Path("/"), log=log, held=held.fileno())
    assert wait_until(lambda: "TZ=UTC" in log.read_text(), 5)
    shells_own = {"PWD", "OLDPWD", "SHLVL", "_"}
    names = {line.partition("=")[0] for line in log.read_text().splitlines()}
    assert names - shells_own == {"HOME", "TMPDIR", "PATH", "LC_ALL", "TZ", "USER"}


def test_production_starts_nothing_and_names_what_is_missing(tmp_path: Path) -> None:
    given = Settings(
        profile="production",
        data_dir=tmp_path / "data",
        database_url="postgresql://db/x",
        broker_url="redis://broker",
        s3_endpoint="s3:9000",
        s3_access_key="key",
        s3_secret_key="secret",
    )
    assert local.ensure(given) == given
    assert local.ps(given) == []
    local.down(given)
    assert not given.data_dir.exists()
    with pytest.raises(SettingsError, match="needs CHORUS_DATABASE_URL, CHORUS_S3_SECRET_KEY"):
        local.ensure(replace(given, database_url="", s3_secret_key=""))
