"""The third server of the local profile: SeaweedFS (`weed mini`), an S3 store on 127.0.0.1."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
from dataclasses import asdict, astuple, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import ClassVar

from chorus_batch.jobs.errors import DependencyDown
from chorus_batch.jobs.local.account import Account
from chorus_batch.jobs.local.binaries import seaweed_bundle
from chorus_batch.jobs.local.servers import USER, NotReady, Server, accepts, write_for

LOOPBACK = "127.0.0.1"
GRPC_OFFSET = 10_000  # weed opens P + 10000 for every port P
# Both P and P + 10000 stay below Linux's range for outgoing connections, which starts at 32768.
PORT_RANGE = range(20_000, 22_700)
_WEED_FOLDER = Path("/tmp")  # noqa: S108 (fixed in weed)


@dataclass(frozen=True)
class Ports:
    """The store's ports on 127.0.0.1; each P also takes P + 10000."""

    master: int
    volume: int
    filer: int
    s3: int
    admin: int

    @classmethod
    def chosen(cls, account: Account) -> Ports:
        """Free ports, drawn at random so that two data folders starting at once seldom meet."""
        drawn = random.SystemRandom().sample(PORT_RANGE, len(PORT_RANGE))
        wanted = len(fields(cls))
        free = list(islice((port for port in drawn if _usable(port, account)), wanted))
        if len(free) < wanted:
            raise DependencyDown(f"no free ports on {LOOPBACK} from {PORT_RANGE.start} to {PORT_RANGE.stop}")
        return cls(*free)

    def usable(self, account: Account) -> bool:
        """Are all of them free now?"""
        return all(_usable(port, account) for port in astuple(self))

    def sweep(self) -> None:
        """Remove the socket files in /tmp that a dead weed with these ports has left."""
        for port in astuple(self):
            if not _free(port):  # another folder's weed has it now
                continue
            for path in _weed_sockets(port):
                try:
                    path.unlink()
                except OSError:  # someone else's
                    continue


@dataclass
class Store(Server):
    """SeaweedFS with generated keys, on 127.0.0.1; its inner ports ask for keys as well."""

    name: ClassVar[str] = "store"
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    ports: Ports

    @property
    def endpoint(self) -> str:
        """Where the S3 side listens, as `host:port`."""
        return f"{LOOPBACK}:{self.ports.s3}"

    @property
    def address(self) -> str:
        """See Server."""
        return self.endpoint

    def prepare(self) -> list[str]:
        """See Server."""
        program = seaweed_bundle().reachable_copy(self.account, self.copies).path()
        if not self.ports.usable(self.account):
            self.ports = Ports.chosen(self.account)
        data = self.home / "data"
        if not data.exists():
            data.mkdir(mode=0o700)
            self.account.own(data)
        credentials = [{"accessKey": self.secrets.s3_access_key, "secretKey": self.secrets.s3_secret_key}]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identities = [{"name": USER, "credentials": credentials, "actions": actions}]
        write_for(self.account, self.home / "s3.json", json.dumps({"identities": identities}))
        # Without it, the inner HTTP ports would hand every object to every user of this machine.
        sections = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
        security = "".join(f'[{name}]\nkey = "{self.secrets.store_internal_key}"\n' for name in sections)
        write_for(self.account, self.home / "security.toml", security)  # read from the working folder
        options = {
            "ip": LOOPBACK,
            "ip.bind": LOOPBACK,
            "dir": str(data),
            **{f"{part}.port": str(port) for part, port in asdict(self.ports).items()},
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "s3.config": str(self.home / "s3.json"),
            "s3.localSocket": str(self.sockets / "s3.sock"),
            "filer.localSocket": str(self.sockets / "filer.sock"),
            "s3.autoCreateBucket": "false",  # a wrong bucket name is an error, as in any other S3
            # A bucket takes a volume at least, and the free disk over this size is how many there can be.
            "master.volumeSizeLimitMB": "128",
            "volume.max": "0",
            "master.electionTimeout": "1s",
            "volume.preStopSeconds": "0",
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
        }
        return [str(program), "-logtostderr=true", "mini", *(f"-{key}={value}" for key, value in options.items())]

    def ask(self) -> str:
        """Its version, when the S3 side accepts the keys and the inner side has a place to write to."""
        import urllib3
        from minio import Minio
        from minio.error import MinioException

        pool = urllib3.PoolManager(timeout=urllib3.Timeout(5), retries=False)
        inner = http.client.HTTPConnection(LOOPBACK, self.ports.master, timeout=5)
        try:
            Minio(
                self.endpoint, self.secrets.s3_access_key, self.secrets.s3_secret_key, secure=False, http_client=pool
            ).list_buckets()
            inner.request("GET", "/dir/status")
            status = json.loads(inner.getresponse().read())
            if not status["Topology"]["Max"]:
                raise NotReady("no volume server has reported yet")
            return str(status["Version"]).split()[1]
        except (MinioException, urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as error:
            raise NotReady(str(error)) from error
        except (ValueError, KeyError, IndexError) as error:
            raise NotReady(f"unexpected answer from port {self.ports.master}: {error!r}") from error
        finally:
            inner.close()
            pool.clear()

    def listening(self) -> bool:
        """See Server."""
        return accepts(socket.AF_INET, (LOOPBACK, self.ports.s3))

    def relocate(self) -> bool:
        """See Server."""
        if self.ports.usable(self.account):
            return False
        self.ports = Ports.chosen(self.account)
        return True


def _usable(port: int, account: Account) -> bool:
    # weed also makes a socket file for every gRPC port; another user's left-over can't be replaced.
    return _free(port) and all(path.lstat().st_uid == account.uid for path in _weed_sockets(port))


def _free(port: int) -> bool:
    for number in (port, port + GRPC_OFFSET):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT don't matter
            try:
                probe.bind((LOOPBACK, number))
            except OSError:
                return False
    return True


def _weed_sockets(port: int) -> list[Path]:
    numbers = (port, port + GRPC_OFFSET)
    return [path for number in numbers for path in _WEED_FOLDER.glob(f"seaweedfs-*-{number}.sock")]
