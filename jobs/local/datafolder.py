"""The data folder of the local profile: what is where, whose it is, and what is remembered about the servers.

secrets.json         passwords and keys, mode 600
log/                 one file for each server
binaries/            copies of programs that the servers' user can't reach where they are installed
servers/state.json   processes, ports and socket folder; changed only under servers/lock
servers/<name>/      a server's own folder, mode 700      servers/<name>.lock   held by the server as long as it lives
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets as random_secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from chorus_batch.jobs.errors import DependencyDown, SettingsError
from chorus_batch.jobs.local.account import server_account
from chorus_batch.jobs.local.process import Process, wait_until
from chorus_batch.jobs.local.seaweed import Ports
from chorus_batch.jobs.local.servers import NAMES, Secrets

LOCK_TIMEOUT = 120.0  # seconds; a first start on a slow disk takes about 20
LONGEST_SOCKET = 107  # bytes, of sockaddr_un
_SHORT = Path("/tmp")  # noqa: S108 (not TMPDIR: it may be long, or closed to the servers' user)
CHOOSE = "choose another folder with --data-dir or CHORUS_DATA_DIR"


@dataclass(frozen=True)
class Record:
    """What is remembered of a started server."""

    process: Process
    ready: bool = False
    version: str = ""


@dataclass
class State:
    """What `state.json` holds."""

    sockets: Path | None = None
    ports: Ports | None = None
    records: dict[str, Record] = field(default_factory=dict)


class DataFolder:
    """One data folder. Raises SettingsError, naming the folder or file, for everything in it that can't be used."""

    def __init__(self, path: Path) -> None:
        """Name what is where; touches nothing."""
        self.path = path.absolute()
        self.servers = self.path / "servers"
        self.binaries = self.path / "binaries"
        self.state_path = self.servers / "state.json"
        self.secrets_path = self.path / "secrets.json"
        self.account = server_account()

    def log(self, name: str) -> Path:
        """The log of that server."""
        return self.path / "log" / f"{name}.log"

    def server_lock(self, name: str) -> Path:
        """The file that the server's processes keep open and locked."""
        return self.servers / f"{name}.lock"

    @contextmanager
    def locked(self, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
        """Hold the lock under which servers are started and stopped; makes the data folder if it isn't there.

        Raises DependencyDown, naming the process that has it, if the lock isn't free within `timeout` seconds.
        """
        shared = 0o711 if self.account.switched else 0o700  # as root: the servers' user must be able to pass through
        try:
            for folder in reversed([self.servers, *self.servers.parents]):
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    folder.chmod(shared)
            owner = self.servers.stat().st_uid
            if owner != os.geteuid():
                raise SettingsError(
                    f"{self.servers} belongs to user {owner}, not to you", hint=f"run as that user, or {CHOOSE}"
                )
            descriptor = os.open(self.servers / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SettingsError(f"can't use the data folder {self.path}: {error}", hint=CHOOSE) from error
        try:
            if not wait_until(lambda: flock(descriptor), timeout, pause=0.05):
                holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
                raise DependencyDown(
                    f"another command (process {holder}) has been starting or stopping the servers in {self.path} "
                    f"for {timeout:.0f} s",
                    hint="wait for it, or end that process",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def furnish(self) -> None:
        """Make what the servers need before they can be started: their folders and the secrets."""
        blocking = self.account.blocked_at(self.servers)
        if blocking is not None:
            raise SettingsError(
                f"the data folder {self.path} can't be reached by user {self.account.name}, which the servers run as "
                f"because this is root: {blocking} doesn't let others pass through",
                hint=f"{CHOOSE} (one that others may traverse), or run chorus-batch as an ordinary user",
            )
        self.log("any").parent.mkdir(mode=0o700, exist_ok=True)
        for name in NAMES:
            self._make_own(self.servers / name)
        if self.secrets_path.exists():
            return
        if (self.servers / "postgres" / "data").exists():
            raise SettingsError(
                f"{self.secrets_path} is missing, and the database in {self.servers} can't be opened without it",
                hint=f"put the file back, or {CHOOSE}",
            )
        token = random_secrets.token_hex
        _write(self.secrets_path, json.dumps(asdict(Secrets(token(24), token(10), token(24), token(24))), indent=1))

    def socket_folder(self, remembered: Path | None) -> Path:
        """Inside the data folder if the sockets' paths stay short enough there, else a private folder in /tmp."""
        inside = self.servers / "sockets"
        if len(os.fsencode(inside / ".s.PGSQL.5432")) <= LONGEST_SOCKET:
            self._make_own(inside)
            return inside
        digest = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:12]
        for candidate in filter(None, (remembered, _SHORT / f"chorus-{digest}")):
            try:
                candidate.mkdir(mode=0o700)
                self.account.own(candidate)
            except FileExistsError:
                found = candidate.lstat()  # in /tmp anyone could have made it
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.account.uid or found.st_mode & 0o077:
                    continue
            return candidate
        made = Path(tempfile.mkdtemp(prefix="chorus-", dir=_SHORT))
        self.account.own(made)
        return made

    def read_secrets(self) -> Secrets:
        """The generated passwords and keys."""
        try:
            return Secrets(**json.loads(self.secrets_path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise SettingsError(
                f"can't read {self.secrets_path}: {error}", hint=f"put the file back, or {CHOOSE}"
            ) from error

    def read_state(self) -> State:
        """What is remembered; an empty state if there is nothing, or nothing legible."""
        try:
            saved = json.loads(self.state_path.read_text())
            records = {
                name: Record(Process(**found["process"]), found["ready"], found["version"])
                for name, found in saved["records"].items()
            }
            return State(Path(saved["sockets"]), Ports(**saved["ports"]), records)
        except (FileNotFoundError, NotADirectoryError):
            return State()
        except OSError as error:
            raise SettingsError(
                f"can't read {self.state_path}: {error.strerror}",
                hint=f"run as the user who made this data folder, or {CHOOSE}",
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError):
            return State()  # damaged: running servers are still found by their locks

    def write_state(self, state: State) -> None:
        """Remember `state`; only with the lock held."""
        records = {name: asdict(record) for name, record in state.records.items()}
        ports = asdict(state.ports) if state.ports else None
        _write(
            self.state_path, json.dumps({"sockets": str(state.sockets), "ports": ports, "records": records}, indent=1)
        )

    def _make_own(self, folder: Path) -> None:
        """A folder of the servers' user, mode 700."""
        if not folder.exists():
            folder.mkdir(mode=0o700)
            self.account.own(folder)
        elif folder.stat().st_uid != self.account.uid:
            raise SettingsError(
                f"{folder} belongs to user {folder.stat().st_uid}, but the servers would run as {self.account.name}",
                hint=f"run chorus-batch as the user who made this data folder, or {CHOOSE}",
            )


def flock(descriptor: int) -> bool:
    """Take the exclusive lock on an open file if nobody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read, whole or not at all."""
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink()
        raise
