"""The client of our own store, `hostring.store.server`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hostring.errors import RendezvousError
from hostring.store.protocol import PREFIX, checked_nbytes, framed, pack, prove, proves, typed, unpack
from hostring.transports.addresses import Address, join_address, own_host

MAX_MESSAGE_BYTES = 1 << 20  # of one store message, and so of one value

GET_WAIT_S = 10.0
"""How long the server may hold one `get`. The client then asks again, so that neither end waits long for a dead one."""

ANSWER_S = 15.0  # after which a server that owes an answer counts as gone, while there is time until the deadline
LATE_ANSWER_S = 2.0  # the same once the deadline has passed

Locate = Callable[[], tuple[Sequence[Address], bytes]]
"""Where a store is and the secret that it wants, as far as known by now. Raises LookupError while that isn't known."""


class StoreRefusedError(RendezvousError):
    """The store is there and doesn't want us: trying again doesn't help."""


class _Connection:
    """One authenticated connection to a `StoreServer`."""

    def __init__(self, sock: socket.socket, client: bytes, secret: bytes, limit: float) -> None:
        self.sock = sock
        self.sock.settimeout(limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting_bytes = self._recv()
        greeting = unpack(greeting_bytes)
        if not isinstance(greeting, dict) or greeting.get("hostring") != "store 1":
            raise ValueError(f"something else answers there: {greeting_bytes[:40]!r}")
        nonce = os.urandom(16)
        self.server = typed(greeting, "server", bytes)
        self._send([client, nonce, prove(secret, "store client", greeting_bytes, client, nonce)])
        verdict = unpack(self._recv())
        if not isinstance(verdict, list) or len(verdict) != 2 or not verdict[0]:
            raise StoreRefusedError(
                f"the store refused this rank: {verdict[1] if isinstance(verdict, list) else verdict}"
            )
        if not proves(verdict[1], secret, "store server", greeting_bytes, client, nonce):
            raise StoreRefusedError("the store does not know the group's secret (HOSTRING_SECRET)")

    def call(self, number: int, request: bytes, limit: float) -> list[Any]:
        self.sock.settimeout(limit)
        self.sock.sendall(request)
        answer = unpack(self._recv())
        if not isinstance(answer, list) or len(answer) != 3 or answer[0] != number:
            raise ValueError("the store gave an answer that fits no question")
        return answer

    def _send(self, value: Any) -> None:
        self.sock.sendall(framed(pack(value, MAX_MESSAGE_BYTES)))

    def _recv(self) -> bytes:
        return self._read(checked_nbytes(self._read(PREFIX.size), MAX_MESSAGE_BYTES))

    def _read(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            more = self.sock.recv(nbytes - len(data))
            if not more:
                raise ConnectionResetError("the store closed the connection")
            data += more
        return bytes(data)


class TcpStore:
    """Client of a `StoreServer`. Connects when first used, and again when a connection breaks.

    A request that a broken connection left unanswered is repeated under the same number, and the server does not carry
    it out twice. If another server answers by then, what was stored is lost, and the request raises ConnectionError.
    """

    def __init__(self, locate: Locate, *, deadline: float = 0.0, waiting: Callable[[str], None] | None = None) -> None:
        """Connects to nothing yet.

        Args:
            locate: asked before each attempt to connect. Both ends must prove that they know the secret.
            deadline: monotonic time up to which a server that isn't there is waited for. May be changed at any time.
            waiting: called now and then while waiting, with the reason.
        """
        self.deadline = deadline
        self.local_host: str | None = None
        self._locate = locate
        self._waiting = waiting
        self._where = "its place"
        self._server: bytes | None = None
        self._client = os.urandom(16)
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._numbers = iter(range(1, 1 << 62))
        self._closed = False

    @classmethod
    def at(cls, host: str, port: int, *, secret: bytes = b"", deadline: float = 0.0) -> TcpStore:
        """A client of the server at one address."""
        return cls(lambda: ([(host, port)], secret), deadline=deadline)

    def reach(self) -> None:
        """Connect, so that `local_host` is known.

        Raises:
            ConnectionError: the deadline passed.
        """
        self._put_back(self._connection())

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        self._request("set", key, bytes(value))

    def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            found, value = self._request("get", key, max(0.0, min(left, GET_WAIT_S)))
            if found:
                return bytes(value)
            if time.monotonic() >= until:
                raise TimeoutError(f"{key!r} is not in the store after {timeout:.1f} s")

    def get_all(self, keys: Sequence[str], timeout: float) -> list[bytes]:
        """See `Store.get_all`."""
        until = time.monotonic() + timeout
        return [self.get(key, until - time.monotonic()) for key in keys]

    def check(self, keys: Sequence[str]) -> bool:
        """See `Store.check`."""
        return bool(self._request("check", list(keys)))

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        return int(self._request("add", key, amount))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._request("delete", key)

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.sock.close()

    def _request(self, op: str, *args: Any) -> Any:
        with self._lock:
            number = next(self._numbers)
        request = framed(pack([number, op, *args], MAX_MESSAGE_BYTES))
        wait = float(args[-1]) if op == "get" else 0.0
        while True:
            connection = self._connection()
            try:
                _, fine, value = connection.call(number, request, wait + self._patience())
            except (OSError, ValueError) as exc:
                connection.sock.close()
                if time.monotonic() >= self.deadline:
                    raise ConnectionError(f"the store at {self._where} is gone: {exc}") from exc
                continue
            except BaseException:  # an answer may be on its way: nobody may read it as the answer to the next request
                connection.sock.close()
                raise
            self._put_back(connection)
            if not fine:
                raise StoreRefusedError(f"the store refused {op}: {value}")
            return value

    def _put_back(self, connection: _Connection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.sock.close()

    def _connection(self) -> _Connection:
        with self._lock:
            if self._closed:
                raise ConnectionError("the store was closed by this rank")
            if self._idle:
                return self._idle.pop()
        connection = self._dial()
        with self._lock:
            known, self._server = self._server, connection.server
        if known is not None and known != connection.server:
            connection.sock.close()
            raise ConnectionError(f"the store at {self._where} was started anew")
        return connection

    def _dial(self) -> _Connection:
        pause = 0.02
        while True:
            try:
                return self._dial_any()
            except StoreRefusedError:
                raise
            except (OSError, LookupError) as exc:
                why = exc
            if self._closed or time.monotonic() + pause >= self.deadline:
                raise ConnectionError(f"no store answers: {why}") from why
            if self._waiting is not None:
                self._waiting(f"for the store at {self._where}")
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _dial_any(self) -> _Connection:
        addresses, secret = self._locate()
        self._where = " or ".join(join_address(*address) for address in addresses)
        reasons = []
        for host, port in addresses:
            try:
                return self._dial_one(host, port, secret)
            except (OSError, ValueError, LookupError, TypeError) as exc:
                if isinstance(exc, StoreRefusedError):
                    raise
                reasons.append(f"{join_address(host, port)}: {exc}")
        raise ConnectionError("; ".join(reasons))

    def _dial_one(self, host: str, port: int, secret: bytes) -> _Connection:
        limit = min(5.0, self._patience())
        sock = socket.create_connection((host, port), timeout=limit)  # tries each address that a name has
        try:
            if sock.getsockname() == sock.getpeername():  # Linux may connect a free local port to itself
                raise ConnectionRefusedError("nobody listens")
            connection = _Connection(sock, self._client, secret, limit)
        except BaseException:
            sock.close()
            raise
        with contextlib.suppress(OSError):
            self.local_host = own_host(sock)
        return connection

    def _patience(self) -> float:
        """Seconds that one answer may take."""
        left = self.deadline - time.monotonic()
        return min(ANSWER_S, max(0.2, left)) if left > 0 else LATE_ANSWER_S
