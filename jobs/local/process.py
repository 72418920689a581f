"""A server process that outlives the command that started it, and how to recognize it again.

A process id alone proves nothing: ids are reused, and a dead child of a parent that doesn't wait stays as a zombie.
A process is therefore known by its id, its start time and the boot it was started in.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chorus_batch.jobs.local.account import Account

# The shell starts the server in the background, tells its id and ends. So the server is nobody's child: it leaves no
# zombie in a long-lived caller. The shell's stderr is the log; `$@` are the server's words, never parsed again.
_DETACH = '"$@" </dev/null >&2 & echo $!'


@dataclass(frozen=True)
class Process:
    """One process of this machine; `started` is in clock ticks after the boot named by `boot`."""

    pid: int
    started: int
    boot: str

    @classmethod
    def find(cls, pid: int) -> Process | None:
        """The live process of that id, or None (a zombie is not alive)."""
        started = _start_ticks(pid)
        return None if started is None else cls(pid, started, _boot())

    def alive(self) -> bool:
        """Is this very process still running?"""
        return _start_ticks(self.pid) == self.started and _boot() == self.boot

    def uptime(self) -> float:
        """Seconds since it started."""
        since_boot = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, since_boot - self.started / os.sysconf("SC_CLK_TCK"))

    def send(self, number: signal.Signals) -> None:
        """Signal it if it still lives."""
        if self.alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                return

    def wait(self, seconds: float) -> bool:
        """True as soon as it is dead, False if it still lives after `seconds`."""
        return wait_until(lambda: not self.alive(), seconds)

    def stop(self, number: signal.Signals, seconds: float) -> None:
        """Ask it to end by `number`; kill it if it hasn't after `seconds`."""
        self.send(number)
        if not self.wait(seconds):
            self.send(signal.SIGKILL)
            self.wait(10)


def launch(command: Sequence[str | Path], account: Account, *, folder: Path, log: Path, held: int) -> Process | None:
    """Start a server in its own session with `log` as stdout and stderr; None if it died at once.

    `held` is a file descriptor that the server and its children keep open: as long as any of them lives, so does the
    lock on that file. Raises OSError or subprocess.SubprocessError if not even the shell could be started.
    """
    with log.open("ab") as output:
        shell = subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            cwd=folder,
            env=account.environment(folder),
            start_new_session=True,
            pass_fds=(held,),
            umask=0o077,
            check=True,
            **account.spawn_options(),
        )
    return Process.find(int(shell.stdout))


def holding(path: Path) -> Iterator[Process]:
    """Every other process of this machine that has `path` open (those that this user may look into)."""
    wanted = path.stat()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            for descriptor in (entry / "fd").iterdir():
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    process = Process.find(int(entry.name))
                    if process is not None:
                        yield process
                    break
        except OSError:  # it ended meanwhile, or belongs to someone else
            continue


def wait_until(condition: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Poll `condition`; True as soon as it holds, False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _start_ticks(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The program's name, in parentheses, may hold spaces and parentheses: read after the last one.
    words = text.rpartition(")")[2].split()
    state, started = words[0], int(words[19])
    return None if state in "ZX" else started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
