"""A TCP proxy in front of a real HTTP server that spoils chosen answers: faults happen on a socket, not in a mock."""

from __future__ import annotations

import enum
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


class Spoil(enum.Enum):
    """What goes wrong with one request."""

    slow = "slow"  # forwarded; the answer is held back until the proxy closes
    trickle = "trickle"  # forwarded; the answer's body comes a byte at a time, so no single wait is long
    truncate = "truncate"  # forwarded; the connection is closed in the middle of the answer's body
    corrupt = "corrupt"  # forwarded; the last byte of the answer's body is changed
    lose = "lose"  # forwarded; the connection is closed when the answer has come
    reset = "reset"  # not forwarded; the connection is reset
    overload = "overload"  # not forwarded; answered by 503 as a load balancer does
    broken = "broken"  # not forwarded; answered by 500 as an S3 server does
    dishonest = "dishonest"  # not forwarded; answered by 200


@dataclass(frozen=True)
class Request:
    """One request as the proxy saw it."""

    method: str
    path: str
    spoiled: Spoil | None


class FaultProxy:
    """Listens on loopback, forwards every request on a connection of its own, and spoils those it was told to."""

    def __init__(self, upstream: str) -> None:
        host, port = upstream.rsplit(":", 1)
        self.upstream = (host, int(port))
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._planned: list[tuple[Spoil, str | None]] = []
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def address(self) -> str:
        """host:port that a client connects to."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def spoil(self, how: Spoil, *, times: int = 1, method: str | None = None) -> None:
        """Spoil the next `times` requests (of that method)."""
        with self._lock:
            self._planned += [(how, method)] * times

    def count(self, method: str) -> int:
        """How many requests of that method came."""
        return sum(request.method == method for request in self.requests)

    def next(self, method: str, path: str) -> Spoil | None:
        """What to do with a request that has just come."""
        with self._lock:
            how = next((p for p in self._planned if p[1] in (None, method)), None)
            if how is not None:
                self._planned.remove(how)
            self.requests.append(Request(method, path, how[0] if how else None))
            return how[0] if how else None

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def refusing_address() -> Iterator[str]:
    """An address of loopback that is taken and refuses connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    proxy: FaultProxy


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):
            self._exchange(self.server.proxy)

    def _exchange(self, proxy: FaultProxy) -> None:
        head = self._head()
        if not head:
            return
        method, path = head.split(b" ", 2)[:2]
        length = _header(head, b"content-length")
        request = head + self.rfile.read(int(length) if length else 0)
        how = proxy.next(method.decode(), path.decode())
        if how is Spoil.reset:
            # A linger time of zero makes close() send RST instead of FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        if how is Spoil.overload:
            self._answer(b"503 Service Unavailable", b"busy", b"text/plain")
            return
        if how is Spoil.broken:
            body = b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"
            self._answer(b"500 Internal Server Error", b"" if method == b"HEAD" else body)
            return
        if how is Spoil.dishonest:
            self._answer(b"200 OK", b"")
            return
        answer = _forward(proxy.upstream, request)
        headers, separator, body = answer.partition(b"\r\n\r\n")
        if how is Spoil.slow:
            proxy.closing.wait()
        elif how is Spoil.trickle:
            self.wfile.write(headers + separator)
            for byte in body:
                self.wfile.write(bytes([byte]))
                if proxy.closing.wait(0.05):
                    return
        elif how is Spoil.truncate:
            self.wfile.write(headers + separator + body[: len(body) // 2])
        elif how is Spoil.corrupt:
            self.wfile.write(headers + separator + body[:-1] + bytes([body[-1] ^ 1]))
        elif how is not Spoil.lose:
            self.wfile.write(answer)

    def _head(self) -> bytes:
        lines = []
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            lines.append(line)
        return b"".join(lines) + b"\r\n" if lines else b""

    def _answer(self, status: bytes, body: bytes, kind: bytes = b"application/xml") -> None:
        head = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n"
        self.wfile.write(head % (status, kind, len(body)) + body)


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.lower() == name:
            return value.strip()
    return None


def _forward(upstream: tuple[str, int], request: bytes) -> bytes:
    """Send a request and read its answer to the end; closing the connection afterwards marks that end."""
    head, separator, body = request.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
    with socket.create_connection(upstream, timeout=10) as server:
        server.sendall(b"\r\n".join([*lines, b"Connection: close"]) + separator + body)
        chunks = []
        while chunk := server.recv(1 << 16):
            chunks.append(chunk)
    return b"".join(chunks)
