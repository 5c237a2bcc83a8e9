"""Checks of this host and of the way to another one, each with what was found and what to change."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hostring.group.host_info import cpu_quota, usable_cores
from hostring.launch.cluster import Token
from hostring.transports.addresses import interfaces, is_loopback, join_address, resolve, route_to
from hostring.transports.tcp import listen_at

Verdict = Literal["ok", "look", "bad"]

_MAGIC: Final = b"hDr1"
_ROUND_TRIPS: Final = 100
_BULK_NBYTES: Final = 32 << 20
_PATIENCE: Final = 5.0
_IP_MTU: Final = 14  # of the IP level on Linux; the socket module does not name it
_CLOCK_SECONDS: Final = 30.0


@dataclass(frozen=True)
class Finding:
    """One check. "look" is something to think about, "bad" something that will not work; `advice` says what to change."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""


def check_host(world_size: int | None = None) -> Iterator[Finding]:
    """Names, interfaces, cores and kernel settings of this host.

    Args:
        world_size: how many ranks are to run here; without, cores are only counted.
    """
    yield _own_name()
    for interface in interfaces():
        mtu = _read(f"/sys/class/net/{interface.name}/mtu")
        small = mtu.isdigit() and int(mtu) < 1500 and not is_loopback(interface.host)
        advice = (
            "below Ethernet's 1500: is this a tunnel? Exclude it by HOSTRING_INTERFACE=^" + interface.name
            if small
            else ""
        )
        yield Finding(
            "look" if small else "ok",
            f"interface {interface.name}",
            f"{interface.host}, MTU {mtu or 'unknown'}",
            advice,
        )
    yield _cores(world_size)
    control = _read("/proc/sys/net/ipv4/tcp_congestion_control")
    if control:
        slow = control not in ("cubic", "bbr", "dctcp", "reno")
        yield Finding(
            "look" if slow else "ok", "congestion control", control, "cubic or bbr suit a switched LAN" if slow else ""
        )
    for name in ("rmem", "wmem"):
        most = _read(f"/proc/sys/net/ipv4/tcp_{name}").split()
        if most:
            small = int(most[-1]) < 4 << 20
            advice = (
                f"sysctl net.ipv4.tcp_{name}='4096 131072 6291456' lets large messages fill a fast or long link"
                if small
                else ""
            )
            yield Finding("look" if small else "ok", f"largest TCP {name}", f"{int(most[-1]) >> 10} KiB", advice)


def check_token(token: Token) -> Finding:
    """Whether a join token is still valid by this host's clock."""
    left = token.expires - time.time()
    where = ", ".join(join_address(*a) for a in token.addresses)
    if left <= 0:
        return Finding(
            "bad",
            "join token",
            f"expired {-left:.0f} s ago by this clock; cluster at {where}",
            "set the clock, or ask for a new token",
        )
    return Finding("ok", "join token", f"{token.world_size} ranks, {left:.0f} s left; cluster at {where}")


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
            sock = socket.create_connection((address.partition("%")[0], port), timeout=_PATIENCE)
        except TimeoutError:
            yield Finding(
                "bad",
                f"{name}: port {port}",
                f"{address} does not answer in {_PATIENCE:.0f} s",
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
    sock.settimeout(_PATIENCE)
    try:
        sock.sendall(_MAGIC)
        greeting = _receive(sock, len(_MAGIC) + 8)
        if not greeting.startswith(_MAGIC):
            yield Finding("bad", f"{name}: service", "something else listens there", "choose another port")
            return
        off = int.from_bytes(greeting[4:], "little") / 1e6 - time.time()
        wrong = abs(off) > _CLOCK_SECONDS
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
    """The other end of `check_peer`: answers on `host` and `port` until closed. Sends nothing unasked, keeps nothing."""

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
                sock.settimeout(_PATIENCE)
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
        self._thread.join(_PATIENCE)


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        piece = sock.recv(nbytes - len(received))
        if not piece:
            raise ConnectionResetError("the other side closed")
        received += piece
    return bytes(received)


def _own_name() -> Finding:
    name = socket.gethostname()
    addresses = resolve(name)
    if not addresses:
        return Finding(
            "look",
            "own name",
            f"{name} can't be resolved",
            "give MASTER_ADDR as an address, or add the name to /etc/hosts",
        )
    if all(is_loopback(a) for a in addresses):
        advice = "other hosts must not get this name as MASTER_ADDR; use an address of the interface that they reach"
        return Finding("look", "own name", f"{name} is {', '.join(addresses)}: loopback", advice)
    return Finding("ok", "own name", f"{name} is {', '.join(addresses)}")


def _cores(world_size: int | None) -> Finding:
    cores, quota = usable_cores(), cpu_quota()
    limit = min(len(cores), quota) if quota is not None else len(cores)
    found = f"{len(cores)} usable" + (f", limited to {quota:g} by a control group" if quota is not None else "")
    if world_size is not None and world_size > limit:
        return Finding(
            "look",
            "cores",
            f"{found} for {world_size} ranks",
            "ranks share cores: waiting sleeps instead of spinning, and takes longer",
        )
    return Finding("ok", "cores", found + ("" if world_size is None else f" for {world_size} ranks"))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
