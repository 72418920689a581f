"""The local profile: real servers, started for the person and left running.

`ensure` starts what isn't running, `down` stops it, `ps` tells. The servers outlive the command that started them and
are found again through the data folder (jobs.datafolder).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chorus_batch.jobs.errors import DependencyDown, SettingsError
from chorus_batch.jobs.local.datafolder import CHOOSE, DataFolder, Record, State, flock
from chorus_batch.jobs.local.process import holding, launch, wait_until
from chorus_batch.jobs.local.seaweed import Ports, Store
from chorus_batch.jobs.local.servers import NAMES, Broker, NotReady, Postgres, Server
from chorus_batch.jobs.settings import Settings

KINDS: dict[str, type[Server]] = {kind.name: kind for kind in (Postgres, Broker, Store)}
NEEDED = ("database_url", "broker_url", "s3_endpoint", "s3_access_key", "s3_secret_key")
START_TIMEOUT = 90.0  # seconds; crash recovery is included
STOP_TIMEOUT = 30.0
ATTEMPTS = 3  # to start a server whose address was taken meanwhile
LOG_LIMIT = 10 * 2**20  # bytes; a larger log is set aside at the next start


@dataclass(frozen=True)
class ServerStatus:
    """One server as `ps` shows it; `pid` is None and `uptime_seconds` 0 while it isn't running."""

    name: str
    running: bool
    pid: int | None
    address: str
    version: str
    uptime_seconds: float
    log_path: Path


def ensure(settings: Settings) -> Settings:
    """These settings with the addresses of running servers; starts those that aren't running.

    In the local profile the addresses are always the own servers'. In the production profile nothing is started: the
    settings are checked and returned. Raises SettingsError for a missing address or a data folder that can't be used,
    DependencyDown if a server can't be started.
    """
    if settings.profile == "production":
        return _checked(settings)
    servers = _LocalServers(settings.data_dir)
    if not servers.all_up():
        servers.bring_up()
    return servers.addressed(settings)


def down(settings: Settings) -> None:
    """Stop the local profile's servers; nothing to do is no error."""
    if settings.profile == "local":
        _LocalServers(settings.data_dir).bring_down()


def ps(settings: Settings) -> list[ServerStatus]:
    """The local profile's servers; empty in the production profile, where nothing is ours."""
    return _LocalServers(settings.data_dir).statuses() if settings.profile == "local" else []


class _LocalServers:
    """The three servers of one data folder."""

    def __init__(self, data_dir: Path) -> None:
        if not sys.platform.startswith("linux"):
            raise SettingsError(
                f"the local profile's servers run on Linux only, and this is {sys.platform}",
                hint="set CHORUS_PROFILE=production and the addresses of your own Postgres, broker and S3 store",
            )
        self.folder = DataFolder(data_dir)
        self.state: State = self.folder.read_state()

    def all_up(self) -> bool:
        """Is everything running, by its processes and its addresses? Takes a few milliseconds, changes nothing."""
        records = self.state.records
        if not self._known() or not all(name in records and records[name].ready for name in NAMES):
            return False
        return all(records[server.name].process.alive() and server.listening() for server in self._servers())

    def addressed(self, settings: Settings) -> Settings:
        postgres, broker, store = self._servers()
        return settings.with_addresses(
            database_url=postgres.url,
            broker_url=broker.url,
            s3_endpoint=store.endpoint,
            s3_access_key=store.secrets.s3_access_key,
            s3_secret_key=store.secrets.s3_secret_key,
        )

    def statuses(self) -> list[ServerStatus]:
        addresses = {server.name: server.address for server in self._servers()} if self._known() else {}
        found = []
        for name in NAMES:
            record = self.state.records.get(name)
            process = record.process if record is not None and record.process.alive() else None
            found.append(
                ServerStatus(
                    name=name,
                    running=process is not None,
                    pid=process.pid if process else None,
                    address=addresses.get(name, ""),
                    version=record.version if record else "",
                    uptime_seconds=process.uptime() if process else 0.0,
                    log_path=self.folder.log(name),
                )
            )
        return found

    def bring_up(self) -> None:
        try:
            with self.folder.locked():
                self.state = self.folder.read_state()  # another command may have been faster
                self.folder.furnish()
                self.state.sockets = self.folder.socket_folder(self.state.sockets)
                self.state.ports = self.state.ports or Ports.chosen(self.folder.account)
                # Backwards: the store starts by itself while Postgres is being prepared.
                starting = [server for server in reversed(self._servers()) if not self._runs(server)]
                for server in starting:
                    if server.name not in self.state.records:
                        self._launch(server)
                for server in starting:
                    self._wait(server)
        except (OSError, subprocess.SubprocessError) as error:
            raise DependencyDown(
                f"can't start the local servers in {self.folder.path}: {error}",
                hint=f"is the disk full, or mounted read-only or noexec? If so, {CHOOSE}",
            ) from error

    def bring_down(self) -> None:
        if not self.folder.servers.exists():
            return
        with self.folder.locked():
            self.state = self.folder.read_state()
            for name, record in self.state.records.items():  # all at once, then wait for each
                record.process.send(KINDS[name].stop_signal)
            for name in NAMES:
                record_or_none = self.state.records.pop(name, None)
                if record_or_none is not None:
                    record_or_none.process.stop(KINDS[name].stop_signal, STOP_TIMEOUT)
                os.close(self._claim(name))  # also ends what no record knows
            if self.state.ports is not None:
                self.state.ports.sweep()
                self.folder.write_state(self.state)

    def _known(self) -> bool:
        return self.state.ports is not None and self.folder.secrets_path.exists()

    def _servers(self) -> tuple[Postgres, Broker, Store]:
        folder, sockets, ports, secrets = self.folder, self.state.sockets, self.state.ports, self.folder.read_secrets()
        if sockets is None or ports is None:
            raise RuntimeError("the servers have no addresses yet")
        shared = (sockets, folder.binaries, folder.account, secrets)
        return (
            Postgres(folder.servers / Postgres.name, *shared),
            Broker(folder.servers / Broker.name, *shared),
            Store(folder.servers / Store.name, *shared, ports),
        )

    def _runs(self, server: Server) -> bool:
        """Is it running and ready? A dead or deaf one is forgotten, one that is still starting stays remembered."""
        record = self.state.records.get(server.name)
        if record is None:
            return False
        if record.process.alive():
            if not record.ready or wait_until(server.listening, 2):
                return record.ready
            # Alive, but nothing is at its address: someone swept its socket from /tmp, perhaps.
            record.process.stop(server.stop_signal, STOP_TIMEOUT)
        del self.state.records[server.name]
        return False

    def _launch(self, server: Server) -> None:
        held = self._claim(server.name)
        try:
            if isinstance(server, Store):
                server.ports.sweep()
            command = server.prepare()
            if isinstance(server, Store):
                self.state.ports = server.ports
            log = self.folder.log(server.name)
            if log.exists() and log.stat().st_size > LOG_LIMIT:
                log.replace(log.with_suffix(".log.1"))
            with log.open("a") as file:
                file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%S%z')} starting {' '.join(command)}\n")
            process = launch(command, self.folder.account, folder=server.home, log=log, held=held)
        finally:
            os.close(held)
        if process is not None:
            self.state.records[server.name] = Record(process)
        self.folder.write_state(self.state)

    def _wait(self, server: Server) -> None:
        """Until it answers. Raises DependencyDown with the end of its log if it dies or stays silent."""
        wrong = self._first_answer(server)
        for _ in range(ATTEMPTS - 1):
            if not wrong or not server.relocate():
                break
            self._launch(server)
            wrong = self._first_answer(server)
        if wrong:
            log = self.folder.log(server.name)
            raise DependencyDown(
                f"{server.name} {wrong}; its log ends with:\n{_tail(log)}", hint=f"the whole log: {log}"
            )

    def _first_answer(self, server: Server) -> str:
        """Wait until it answers; what went wrong instead, or nothing."""
        record = self.state.records.get(server.name)
        deadline = time.monotonic() + START_TIMEOUT
        silence = ""
        while record is not None and record.process.alive():
            try:
                version = server.ask()
            except NotReady as error:
                silence = str(error).strip()
            else:
                self.state.records[server.name] = Record(record.process, ready=True, version=version)
                self.folder.write_state(self.state)
                return ""
            if time.monotonic() > deadline:
                record.process.stop(server.stop_signal, STOP_TIMEOUT)
                wrong = f"did not answer within {START_TIMEOUT:.0f} s ({silence})"
                break
            time.sleep(0.05)
        else:
            wrong = "stopped while starting"
        self.state.records.pop(server.name, None)
        self.folder.write_state(self.state)
        return wrong

    def _claim(self, name: str) -> int:
        """The descriptor of a server's lock, which its process will keep open as long as it lives.

        Whatever still holds it is what a killed command or a killed server left: it gets a moment, then it is stopped.
        """
        path = self.folder.server_lock(name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if wait_until(lambda: flock(descriptor), 1):
            return descriptor
        for process in list(holding(path)):
            process.stop(KINDS[name].stop_signal, STOP_TIMEOUT)
        if wait_until(lambda: flock(descriptor), 5):
            return descriptor
        os.close(descriptor)
        raise DependencyDown(
            f"{name} of {self.folder.path} is running already, started by another user or in another container",
            hint=f"stop it there, or {CHOOSE}",
        )


def _checked(settings: Settings) -> Settings:
    missing = [f"CHORUS_{name.upper()}" for name in NEEDED if not getattr(settings, name)]
    if missing:
        raise SettingsError(
            f"the production profile needs {', '.join(missing)}",
            hint="set them in the environment or in config.toml, or use CHORUS_PROFILE=local",
        )
    return settings


def _tail(log: Path, lines: int = 12) -> str:
    """The end of a log, from its last start on."""
    text = log.read_text(errors="replace").rpartition("\n--- ")[2]
    return "\n".join(text.splitlines()[-lines:])
