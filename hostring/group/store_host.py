"""Which store the ranks use, and who runs it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

from hostring.errors import RendezvousError
from hostring.group.config import Config
from hostring.group.rendezvous import unreachable
from hostring.group.waiting import Waiting
from hostring.store.client import Locate, TcpStore
from hostring.store.stores import Store, TorchStore
from hostring.transports.addresses import Address, any_host, is_loopback, resolve
from hostring.transports.tcp import listen_at

if TYPE_CHECKING:
    from hostring.store.server import StoreServer

log = logging.getLogger("hostring")


def open_store(config: Config, deadline: float, waiting: Waiting) -> tuple[Store, Callable[[], None]]:
    """The store that `config` describes, and what gives it up again. Rank 0 runs it, unless somebody else does.

    Raises:
        RendezvousError: it can't be had.
    """
    if config.store is not None:
        given = config.store if isinstance(config.store, Store) else TorchStore(config.store)
        return given, lambda: None
    if config.torch_store and config.store_host is not None:
        return TorchStore.agent(
            config.store_host, config.store_port, config.world_size, deadline - time.monotonic()
        ), lambda: None
    leave = contextlib.ExitStack()
    if config.job is not None:
        job = config.job
        if config.rank == 0:
            leave.callback(_serve_by_file(job, config.secret))
        return _client(lambda: _found(job), deadline, waiting, leave)
    if config.store_host is None:
        raise ValueError(
            f"world_size is {config.world_size}, but nothing says where the ranks meet: set MASTER_ADDR and MASTER_PORT"
        )
    host, port, secret = config.store_host, config.store_port, config.secret
    if config.hosts_store and config.rank == 0:
        leave.callback(_serve_at((host, port), secret))
    hosts = resolve(host) if is_loopback(host) else [host]
    return _client(lambda: ([(each, port) for each in hosts], secret), deadline, waiting, leave)


def _client(
    locate: Locate, deadline: float, waiting: Waiting, leave: contextlib.ExitStack
) -> tuple[Store, Callable[[], None]]:
    store = TcpStore(locate, deadline=deadline, waiting=waiting.tell)
    leave.callback(store.close)
    try:
        store.reach()  # now, since the way that leads there decides where this rank listens
    except BaseException as exc:
        leave.close()
        if isinstance(exc, ConnectionError) and not isinstance(exc, RendezvousError):
            raise unreachable(waiting.rank, exc) from exc
        raise
    return store, leave.close


def _found(job: str) -> tuple[list[Address], bytes]:
    from hostring.store import job_file

    address, secret = job_file.find(job)
    return [address], secret


class _Shared:
    """What several groups of this process use together: opened for the first of them, closed after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Hashable, tuple[contextlib.ExitStack, int]] = {}

    def use(self, key: Hashable, open_it: Callable[[contextlib.ExitStack], object]) -> Callable[[], None]:
        """Have it open under `key`. `open_it` registers what closes it. Returns what gives up this use."""
        with self._lock:
            stack, users = self._open.get(key, (None, 0))
            if stack is None:
                with contextlib.ExitStack() as undo:
                    open_it(undo)
                    stack = undo.pop_all()
            self._open[key] = stack, users + 1
        return partial(self._leave, key)

    def _leave(self, key: Hashable) -> None:
        with self._lock:
            stack, users = self._open.pop(key)
            if users > 1:
                self._open[key] = stack, users - 1
            else:
                stack.close()


_servers = _Shared()


def _serve_by_file(job: str, secret: bytes) -> Callable[[], None]:
    """Run the store of `job` in this process and publish where it is in the job's file. Returns what gives it up."""
    from hostring.store import job_file

    def open_it(stack: contextlib.ExitStack) -> None:
        key = secret or os.urandom(32)
        server = _server([listen_at("127.0.0.1", 0)], key, stack)
        stack.callback(_unlink, job_file.publish(job, ("127.0.0.1", server.port), key))

    return _servers.use(job, open_it)


def _serve_at(address: Address, secret: bytes) -> Callable[[], None]:
    """Run the store at `address` in this process. Returns what gives it up."""
    return _servers.use(address, lambda stack: _server(_listening(*address), secret, stack))


def _server(sockets: list[socket.socket], secret: bytes, stack: contextlib.ExitStack) -> StoreServer:
    from hostring.store.server import StoreServer  # asyncio, which only the rank that runs the store needs

    server = StoreServer(sockets, secret)
    stack.callback(server.close)
    return server


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _listening(host: str, port: int) -> list[socket.socket]:
    """Sockets for the store: on loopback if `host` means that, on `host` if that is an address of ours, else on all."""
    hosts = resolve(host)
    if not is_loopback(host) and any(is_loopback(each) for each in hosts):
        hosts = []  # this machine's own name, which often means loopback here and something else elsewhere
    sockets: list[socket.socket] = []
    for each in [*hosts, any_host()]:
        if sockets and each == any_host():
            break
        try:
            sockets.append(listen_at(each, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                for sock in sockets:
                    sock.close()
                raise RendezvousError(
                    f"rank 0 can't run the store: port {port} of {host} is in use; choose another MASTER_PORT"
                ) from exc
            log.debug("hostring: the store can't listen on %s port %d: %s", each, port, exc)
    if not sockets:
        raise RendezvousError(
            f"rank 0 can't run the store at {host} port {port}: it has no such address and can't listen on all"
        )
    return sockets
