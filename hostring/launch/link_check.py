"""Checks the way to another host: `hostring doctor --listen` answers there, `hostring doctor --peer` measures here."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Final

from hostring.launch.doctor import Finding
from hostring.transports.addresses import resolve, route_to
from hostring.transports.tcp import listen_at

_MAGIC: Final = b"hDr1"
_ROUND_TRIPS: Final = 100
_BULK_NBYTES: Final = 32 << 20
_TIMEOUT_S: Final = 5.0  # for a connection, and for each answer
_IP_MTU: Final = 14  # of the IP level on Linux; the socket module does not name it
MAX_CLOCK_OFFSET_S: Final = 30.0


def check_peer(host: str, port: int, name: str = "") -> Iterator[Finding]:
    """Whether `hostring doctor --listen` on `host` can be reached, over which interface, and how fast the link is."""
    name = name or host
    addresses = resolve(host)
    if not addresses:
        yield Finding(
            "bad", f"{name}: name", f"{host} can't be resolved", "use an address, or add the name to /etc/hosts"
        )
        return
    yield Finding("ok", f"{name}: name", ", ".join(addresses))
    yield Finding("ok", f"{name}: route", f"leaves from {route_to(host) or 'nowhere'}")
    for address in addresses:
        try:
            sock = socket.create_connection((address.partition("%")[0], port), timeout=_TIMEOUT_S)
        except TimeoutError:
            yield Finding(
                "bad",
                f"{name}: port {port}",
                f"{address} does not answer in {_TIMEOUT_S:.0f} s",
                f"a firewall drops it? Open TCP port {port}",
            )
            continue
        except OSError as exc:
            advice = (
                f"run `hostring doctor --listen {port}` there"
                if isinstance(exc, ConnectionRefusedError)
                else "check cable, subnet and routes"
            )
            yield Finding("bad", f"{name}: port {port}", f"{address}: {exc.strerror or exc}", advice)
            continue
        with sock:
            yield from _measure(sock, name)
        return


def _measure(sock: socket.socket, name: str) -> Iterator[Finding]:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(_TIMEOUT_S)
    try:
        sock.sendall(_MAGIC)
        greeting = _receive(sock, len(_MAGIC) + 8)
        if not greeting.startswith(_MAGIC):
            yield Finding("bad", f"{name}: service", "something else listens there", "choose another port")
            return
        off = int.from_bytes(greeting[4:], "little") / 1e6 - time.time()
        wrong = abs(off) > MAX_CLOCK_OFFSET_S
        yield Finding(
            "look" if wrong else "ok",
            f"{name}: clock",
            f"{off:+.1f} s from ours",
            "join tokens expire by the clock: use NTP" if wrong else "",
        )
        times = []
        for _ in range(_ROUND_TRIPS):
            start = time.perf_counter()
            sock.sendall(b"p")
            _receive(sock, 1)
            times.append(time.perf_counter() - start)
        median, worst = statistics.median(times) * 1e6, max(times) * 1e6
        yield Finding("ok", f"{name}: round trip", f"{median:.0f} us median, {worst:.0f} us worst of {_ROUND_TRIPS}")
        yield _bulk(sock, name)
        with contextlib.suppress(OSError):
            yield Finding("ok", f"{name}: path MTU", str(sock.getsockopt(socket.IPPROTO_IP, _IP_MTU)))
        with contextlib.suppress(OSError, AttributeError):
            control = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
            yield Finding("ok", f"{name}: congestion control", control)
    except OSError as exc:
        yield Finding("bad", f"{name}: link", f"broke off: {exc}", "is the other doctor still listening?")


def _bulk(sock: socket.socket, name: str) -> Finding:
    rates = []
    block = bytes(1 << 20)
    for direction in (b"u", b"d"):
        start = time.perf_counter()
        sock.sendall(direction)
        for _ in range(_BULK_NBYTES // len(block)):
            if direction == b"u":
                sock.sendall(block)
            else:
                _receive(sock, len(block))
        _receive(sock, 1)
        rates.append(_BULK_NBYTES * 8 / (time.perf_counter() - start) / 1e9)
    up, down = rates
    uneven = max(rates) > 2 * min(rates)
    advice = "one direction is much slower: look for a duplex or cable fault" if uneven else ""
    return Finding(
        "look" if uneven else "ok", f"{name}: bandwidth", f"{up:.2f} Gbit/s there, {down:.2f} Gbit/s back", advice
    )


class Listener:
    """The other end of `check_peer`: answers on `host` and `port` until closed. It only sends what was asked for."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = listen_at(host, port)
        self._socket.setblocking(True)
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name="hostring-doctor", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            with sock, contextlib.suppress(OSError):
                sock.settimeout(_TIMEOUT_S)
                self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _receive(sock, len(_MAGIC)) != _MAGIC:
            return
        sock.sendall(_MAGIC + int(time.time() * 1e6).to_bytes(8, "little"))
        block = bytes(1 << 20)
        while True:
            what = _receive(sock, 1)
            for _ in range(_BULK_NBYTES // len(block) if what in (b"u", b"d") else 0):
                if what == b"u":
                    _receive(sock, len(block))
                else:
                    sock.sendall(block)
            sock.sendall(what)

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(_TIMEOUT_S)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        piece = sock.recv(nbytes - len(received))
        if not piece:
            raise ConnectionResetError("the other side closed")
        received += piece
    return bytes(received)
