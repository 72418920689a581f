"""Who the local servers run as: this user, or an unprivileged one when this user is root.

Postgres refuses to run as root. All three servers then run as `nobody`, which needs folders that it may traverse. No
existing folder is ever made more open for it: a folder that blocks is named, and the person decides.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorus_batch.jobs.errors import DependencyDown

UNPRIVILEGED = "nobody"


@dataclass(frozen=True)
class Account:
    """The user that the servers run as. `switched`: it isn't the user of this process, which is root."""

    name: str
    uid: int
    gid: int
    switched: bool

    def environment(self, home: Path) -> dict[str, str]:
        """What a server gets to see: nothing of the person's environment (PG*, AWS_*, WEED_*, proxies, keys)."""
        return {
            "HOME": str(home),
            "TMPDIR": str(home),
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "USER": self.name,
        }

    def spawn_options(self) -> dict[str, Any]:
        """Keyword arguments of `subprocess.Popen` that start a program as this user."""
        return {"user": self.uid, "group": self.gid, "extra_groups": []} if self.switched else {}

    def own(self, path: Path) -> None:
        """Give `path`, a file or folder that this program made, to this user."""
        if self.switched:
            os.chown(path, self.uid, self.gid)

    def blocked_at(self, path: Path) -> Path | None:
        """The first folder on the way to `path` (or `path` itself) that this user may not traverse or execute.

        The kernel is asked as that user, so access lists and mounts count too.
        """
        if not self.switched:
            return None
        steps = [*reversed(path.parents), path]
        script = 'for step; do [ -x "$step" ] || { printf %s "$step"; exit 0; }; done'
        try:
            answer = subprocess.run(
                ["/bin/sh", "-c", script, "sh", *map(str, steps)],
                capture_output=True,
                check=True,
                cwd="/",
                env=self.environment(Path("/")),
                **self.spawn_options(),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise DependencyDown(
                f"can't run a program as user {self.name} (uid {self.uid}): {error}",
                hint="Postgres refuses to run as root; run as an ordinary user, or use the production profile",
            ) from error
        return Path(os.fsdecode(answer.stdout)) if answer.stdout else None


def server_account() -> Account:
    """The account for this process's servers.

    Raises DependencyDown if this process is root and the unprivileged user doesn't exist.
    """
    uid = os.geteuid()
    if uid != 0:
        try:
            name = pwd.getpwuid(uid).pw_name
        except KeyError:  # usual in containers: a number without a name
            name = str(uid)
        return Account(name, uid, os.getegid(), switched=False)
    try:
        entry = pwd.getpwnam(UNPRIVILEGED)
    except KeyError as error:
        raise DependencyDown(
            f"there is no user {UNPRIVILEGED!r} to run Postgres as (it refuses to run as root)",
            hint="run chorus-batch as an ordinary user, or use the production profile",
        ) from error
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, switched=True)
