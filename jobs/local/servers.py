"""What a server of the local profile is, and two of the three: Postgres with pgvector, and Valkey as the broker.

Both listen on Unix sockets only. The third, the store, is in jobs.seaweed; jobs.local decides when they run.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.local.account import Account
from chorus_batch.jobs.local.binaries import postgres_bundle, valkey_bundle
from chorus_batch.jobs.local.process import Process

NAMES = ("postgres", "broker", "store")
POSTGRES_PORT = 5432  # only names the socket file
POSTGRES_MAJOR = "18"
DATABASE = "chorus_batch"
USER = "chorus"


class NotReady(Exception):
    """The server doesn't answer yet."""


@dataclass(frozen=True)
class Secrets:
    """Generated once for a data folder, kept in `secrets.json` (mode 600)."""

    database_password: str
    s3_access_key: str
    s3_secret_key: str
    store_internal_key: str  # between the parts of the store, so that its inner ports refuse everyone else


@dataclass
class Server(ABC):
    """One server of one data folder. `home` belongs to `account`, mode 700; `sockets` too."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals]
    home: Path
    sockets: Path
    copies: Path  # where programs are copied to that the account can't reach
    account: Account
    secrets: Secrets

    @property
    @abstractmethod
    def address(self) -> str:
        """Where it listens, for people: no secrets."""

    @abstractmethod
    def prepare(self) -> list[str]:
        """Make what it needs before it starts; the command line that starts it."""

    @abstractmethod
    def ask(self) -> str:
        """Its version, by a real request with real credentials; raises NotReady."""

    @abstractmethod
    def listening(self) -> bool:
        """Does something accept connections at its address? Cheap, and True for a server that is only busy."""

    def relocate(self) -> bool:
        """After a failed start: True if its address was taken by a stranger and it has chosen another one."""
        return False


class Postgres(Server):
    """Postgres 18 with pgvector, made with a generated password, on a Unix socket."""

    name = "postgres"
    stop_signal = signal.SIGINT  # "fast": end the sessions, write a checkpoint, stop

    @property
    def data(self) -> Path:
        """The cluster."""
        return self.home / "data"

    @property
    def socket(self) -> Path:
        """The socket file."""
        return self.sockets / f".s.PGSQL.{POSTGRES_PORT}"

    @property
    def address(self) -> str:
        """See Server."""
        return str(self.socket)

    @property
    def url(self) -> str:
        """Where clients connect, with all that they need."""
        password = quote(self.secrets.database_password, safe="")
        return f"postgresql://{USER}:{password}@/{DATABASE}?host={quote(str(self.sockets))}&port={POSTGRES_PORT}"

    def prepare(self) -> list[str]:
        """See Server."""
        program = postgres_bundle().reachable_copy(self.account, self.copies).path()
        if not self.data.exists():
            self._initialize(program.with_name("initdb"))
        major = (self.data / "PG_VERSION").read_text().strip()
        if major != POSTGRES_MAJOR:
            raise DependencyDown(
                f"{self.data} was written by Postgres {major}; this is Postgres {POSTGRES_MAJOR}",
                hint="export it with the version of chorus-batch that made it, or choose another --data-dir",
            )
        self._forget_strangers()
        parameters = {
            "listen_addresses": "",
            "unix_socket_directories": _quoted(self.sockets),
            "unix_socket_permissions": "0700",
            "shared_buffers": "128MB",
            "max_connections": "100",
            "timezone": "UTC",
            "log_timezone": "UTC",
            # Not POSIX shared memory: /dev/shm is 64 MB in containers, and systemd empties it when the user logs out.
            "dynamic_shared_memory_type": "mmap",
            "max_parallel_maintenance_workers": "0",
        }
        settings = [word for key, value in parameters.items() for word in ("-c", f"{key}={value}")]
        return [str(program), "-D", str(self.data), "-p", str(POSTGRES_PORT), *settings]

    def _forget_strangers(self) -> None:
        """Remove lock files of a dead Postgres whose process id looks alive.

        Postgres would refuse to start: it takes for itself a zombie that nobody waits for, or another program that got
        the id. Both are usual in containers. Called only with the server's lock held, which no process of a Postgres in
        this folder can outlive.
        """
        for path in (self.data / "postmaster.pid", self.socket.with_name(self.socket.name + ".lock")):
            try:
                pid = abs(int(path.read_text().split("\n")[0]))
                zombie = Process.find(pid) is None and Path(f"/proc/{pid}").exists()
                if zombie or Path(f"/proc/{pid}/cwd").readlink() != self.data.resolve():
                    path.unlink()
            except (OSError, ValueError):  # no such file, no such process, or not ours: Postgres decides
                continue

    def _initialize(self, initdb: Path) -> None:
        """Make the cluster beside its place and move it there whole: a half-made one is never started."""
        unfinished = self.home / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        password = self.home / "password"
        write_for(self.account, password, self.secrets.database_password)
        options = ["--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8", "--data-checksums"]
        locale = ["--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"]  # sorts alike everywhere
        try:
            made = subprocess.run(
                [str(initdb), "-D", str(unfinished), "-U", USER, *options, *locale],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                cwd=self.home,
                env=self.account.environment(self.home),
                umask=0o077,
                **self.account.spawn_options(),
            )
        finally:
            password.unlink()
        if made.returncode != 0:
            said = (made.stderr or made.stdout).strip()
            raise DependencyDown(
                f"Postgres could not make its data folder {self.data} (initdb ended with {made.returncode}):\n{said}",
                hint="is the disk full, or the file system one without Unix permissions? Try another --data-dir",
            )
        unfinished.rename(self.data)

    def ask(self) -> str:
        """See Server."""
        import psycopg
        from psycopg import sql

        try:
            with psycopg.connect(
                host=str(self.sockets),
                port=POSTGRES_PORT,
                user=USER,
                password=self.secrets.database_password,
                dbname="postgres",
                connect_timeout=5,
                autocommit=True,
            ) as connection:
                if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone():
                    connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))
                row = connection.execute("SHOW server_version").fetchone()
        except psycopg.OperationalError as error:
            if "password authentication failed" in str(error):
                raise DependencyDown(
                    f"Postgres in {self.data} refuses the password in secrets.json",
                    hint="put the secrets.json back that belongs to this data folder",
                ) from error
            raise NotReady(str(error)) from error
        return str(row[0]).split()[0] if row else ""

    def listening(self) -> bool:
        """See Server."""
        return accepts(socket.AF_UNIX, str(self.socket))


class Broker(Server):
    """Valkey, on a Unix socket; who may open the socket is who may use it."""

    name = "broker"
    stop_signal = signal.SIGTERM

    @property
    def socket(self) -> Path:
        """The socket file."""
        return self.sockets / "broker.sock"

    @property
    def address(self) -> str:
        """See Server."""
        return str(self.socket)

    @property
    def url(self) -> str:
        """Where clients connect, with all that they need."""
        return f"redis+socket://{quote(str(self.socket))}"

    def prepare(self) -> list[str]:
        """See Server."""
        program = valkey_bundle().reachable_copy(self.account, self.copies).path()
        self.socket.unlink(missing_ok=True)
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.home),
            "appendonly": "yes",
            # Without its own syncing every write reaches the kernel before it is answered, and so outlives a kill -9
            # ("everysec" holds writes back for up to 2 s on a busy disk). After a power cut Postgres knows all jobs.
            "appendfsync": "no",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        return [str(program), *(word for key, value in options.items() for word in (f"--{key}", value))]

    def ask(self) -> str:
        """See Server."""
        import redis

        try:
            with redis.Redis(unix_socket_path=str(self.socket), socket_timeout=5) as client:
                client.ping()
                information = client.info("server")
        except redis.RedisError as error:
            raise NotReady(str(error)) from error
        return str(information.get("valkey_version", information["redis_version"]))

    def listening(self) -> bool:
        """See Server."""
        return accepts(socket.AF_UNIX, str(self.socket))


def accepts(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    """Does something accept connections there? True as well if it is too busy to."""
    with socket.socket(family) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:  # its queue is full: busy, not dead
            return True
    return True


def write_for(account: Account, path: Path, text: str) -> None:
    """Write a file that only `account` (and root) can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    account.own(path)


def _quoted(path: Path) -> str:
    """A folder as one item of a Postgres list of folders."""
    return '"' + str(path).replace('"', '""') + '"'
