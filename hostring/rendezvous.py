"""How ranks find each other: every rank publishes a few bytes in a store and collects what the others published."""

from __future__ import annotations

import contextlib
import datetime
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hostring.addresses import is_loopback, resolve
from hostring.config import Config
from hostring.errors import RendezvousError
from hostring.store import MemoryStore, Store, StoreRefusedError, TcpStore

__all__ = ["MemoryStore", "Progress", "Store", "StoreRefusedError", "TcpStore", "TorchStore", "exchange", "names"]

log = logging.getLogger("hostring")

FIRST_NEWS, MORE_NEWS = 2.0, 10.0
"""Seconds of waiting before the first and between further lines of progress."""


class Progress:
    """Says who is waited for, at WARNING level so that a person sees it without having set up logging."""

    def __init__(self, rank: int, deadline: float) -> None:
        self.speaks = True
        self._who = f"rank {rank}"
        self._start = time.monotonic()
        self._deadline = deadline
        self._due = self._start + FIRST_NEWS

    def waits(self, what: str, state: str = "") -> None:
        """To be called often: prints a line when one is due.

        Args:
            what: "for rank 1, 3".
            state: "2 of 4 here".
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + MORE_NEWS
        if self.speaks:
            times = f"{now - self._start:.0f} s of {self._deadline - self._start:.0f} s"
            log.warning("hostring: %s waits %s (%s)", self._who, what, f"{state}, {times}" if state else times)

    def until_due(self) -> float:
        """Seconds until the next line is due."""
        return max(0.0, self._due - time.monotonic())


def names(ranks: Iterable[int]) -> str:
    """"rank 1, 3", with a long list shortened."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16]))
    return f"rank {shown}" + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")


def exchange(
    store: Store,
    prefix: str,
    rank: int,
    world_size: int,
    payload: bytes,
    deadline: float,
    progress: Progress | None = None,
) -> list[bytes]:
    """Publish `payload` and collect that of every rank.

    Each call of a rank under one `prefix` in one store starts a new generation, so that the second group that the same
    processes form never reads what the first one published. A store that comes back empty (rank 0 closed it and opened
    a new one on the same port) is filled again.

    Args:
        store: shared by all ranks.
        prefix: what to put before keys; the same on all ranks and of no other use.
        rank: this rank.
        world_size: number of ranks.
        payload: at most about 1 MB.
        deadline: monotonic time.
        progress: told who is missing.

    Returns:
        The payloads by rank.

    Raises:
        RendezvousError: the deadline passed; names the ranks that did not come.
    """
    progress = progress or Progress(rank, deadline)
    found: dict[int, bytes] = {}
    while True:
        try:
            return _exchange_once(store, prefix, rank, world_size, payload, deadline, progress, found)
        except ConnectionError as exc:
            if isinstance(exc, RendezvousError):
                raise
            if time.monotonic() + 0.05 >= deadline:
                raise RendezvousError(f"rank {rank} could not reach the store in time, is rank 0 up? {exc}") from exc
            time.sleep(0.05)


def _exchange_once(
    store: Store,
    prefix: str,
    rank: int,
    world_size: int,
    payload: bytes,
    deadline: float,
    progress: Progress,
    found: dict[int, bytes],
) -> list[bytes]:
    generation = store.add(f"{prefix}/{rank}/joins", 1)
    keys = {r: f"{prefix}/{r}/{generation}" for r in range(world_size)}
    store.set(keys[rank], payload)
    found.clear()
    found[rank] = payload
    while missing := [r for r in range(world_size) if r not in found]:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"rank {rank} waited in vain for {names(missing)} ({len(found)} of {world_size} came); "
                f"start them with the same rendezvous and world size, or raise timeout= if they are only late"
            )
        try:
            found[missing[0]] = store.get(keys[missing[0]], min(left, progress.until_due(), 1.0))
        except TimeoutError:
            for r in missing[1:]:
                if store.check([keys[r]]):
                    found[r] = store.get(keys[r], 1.0)
            missing = [r for r in missing if r not in found]
            progress.waits(f"for {names(missing)}", f"{len(found)} of {world_size} here")
    return [found[r] for r in range(world_size)]


class TorchStore:
    """Any `torch.distributed.Store` as a store of ours. Torch's own keys are left alone by a prefix."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def agent(cls, host: str, port: int, world_size: int, timeout: float) -> TorchStore:
        """A client of the store that torchrun's agent runs.

        Raises:
            RendezvousError: nobody answers there.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

        try:
            return cls(TCPStore(host, port, world_size, False, datetime.timedelta(seconds=timeout), wait_for_workers=False))
        except RuntimeError as exc:
            raise RendezvousError(f"torchrun's store at {host} port {port} does not answer: {exc}") from exc

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        with _torch_errors():
            self._store.set(f"hostring/{key}", bytes(value))

    def get(self, key: str, timeout: float) -> bytes:
        """See `Store.get`."""
        with _torch_errors():
            self._store.wait([f"hostring/{key}"], datetime.timedelta(seconds=max(timeout, 0.001)))
            return bytes(self._store.get(f"hostring/{key}"))

    def check(self, keys: Iterable[str]) -> bool:
        """See `Store.check`."""
        with _torch_errors():
            return bool(self._store.check([f"hostring/{key}" for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """See `Store.add`."""
        with _torch_errors():
            return int(self._store.add(f"hostring/{key}", amount))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with _torch_errors():
            self._store.delete_key(f"hostring/{key}")

    def close(self) -> None:
        """See `Store.close`. The store belongs to torch."""


@contextlib.contextmanager
def _torch_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as exc:  # torch has one kind for all: only the text tells
        text = str(exc)
        if "timeout" in text.lower() or "timed out" in text.lower():
            raise TimeoutError(text) from exc
        raise ConnectionError(f"torch's store: {text}") from exc


def open_store(config: Config, deadline: float, progress: Progress) -> tuple[Store, Callable[[], None]]:
    """The store that `config` describes, started here when this rank is the one to host it, and what gives it up again."""
    if config.store is not None:
        given = config.store if isinstance(config.store, Store) else TorchStore(config.store)
        return given, lambda: None
    if config.store_host is None:
        raise ValueError(f"world_size is {config.world_size}, but nothing says where the ranks meet: set MASTER_ADDR and MASTER_PORT")
    if config.torch_store:
        return TorchStore.agent(config.store_host, config.store_port, config.world_size, deadline - time.monotonic()), lambda: None
    leave: Callable[[], None] = lambda: None  # noqa: E731
    if config.hosts_store and config.rank == 0:
        leave = host_store(config.store_host, config.store_port, config.secret)
    hosts = resolve(config.store_host) if is_loopback(config.store_host) else [config.store_host]
    store = TcpStore([(host, config.store_port) for host in hosts], secret=config.secret, deadline=deadline, waiting=progress.waits)

    def close() -> None:
        store.close()
        leave()

    return store, close


_hosted: dict[tuple[str, int], tuple[Any, int]] = {}
_hosted_lock = threading.Lock()


def host_store(host: str, port: int, secret: bytes) -> Callable[[], None]:
    """Run the store at `host` in this process, or share the one that runs there already. Returns what gives it up."""
    from hostring.store_server import StoreServer

    with _hosted_lock:
        server, users = _hosted.get((host, port), (None, 0))
        if server is None:
            server = StoreServer(_listening(host, port), secret)
        _hosted[host, port] = server, users + 1

    def leave() -> None:
        with _hosted_lock:
            server, users = _hosted[host, port]
            if users > 1:
                _hosted[host, port] = server, users - 1
                return
            del _hosted[host, port]
        server.close()

    return leave


def _listening(host: str, port: int) -> list[socket.socket]:
    """Sockets for the store: on loopback when `host` is, on `host` when that is an address of ours, else on all."""
    hosts = resolve(host)
    if not is_loopback(host) and any(is_loopback(h) for h in hosts):
        hosts = []  # this machine's own name, which often means loopback here and something else elsewhere
    sockets: list[socket.socket] = []
    for each in [*hosts, ""]:
        if each == "" and sockets:
            break
        wildcard = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        try:
            sockets.append(_bound(each or wildcard, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                for sock in sockets:
                    sock.close()
                raise RendezvousError(f"rank 0 can't run the store: port {port} of {host} is in use; choose another MASTER_PORT") from exc
            if each == "":
                raise RendezvousError(f"rank 0 can't run the store at {host} port {port}: {exc}") from exc
    return sockets


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        sock.bind((host, port))
        sock.listen(256)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock
