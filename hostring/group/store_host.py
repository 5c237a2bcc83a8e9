"""Which store the ranks use, and who runs it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from hostring.errors import RendezvousError
from hostring.group.config import Config
from hostring.group.rendezvous import Progress, unreachable
from hostring.store import job_file
from hostring.store.client import Locate, TcpStore
from hostring.store.stores import Store, TorchStore
from hostring.transports.addresses import Address, any_host, is_loopback, listen, resolve

log = logging.getLogger("hostring")


def open_store(config: Config, deadline: float, progress: Progress) -> tuple[Store, Callable[[], None]]:
    """The store that `config` describes, started here when this rank is the one to host it, and what gives it up again.

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
    hosting = contextlib.ExitStack()
    if config.job is not None:
        job = config.job
        if config.rank == 0:
            _host_by_file(job, config, hosting)
        return _client(lambda: _found(job), deadline, progress, hosting)
    if config.store_host is None:
        raise ValueError(
            f"world_size is {config.world_size}, but nothing says where the ranks meet: set MASTER_ADDR and MASTER_PORT"
        )
    host, port, secret = config.store_host, config.store_port, config.secret
    if config.hosts_store and config.rank == 0:
        hosting.callback(_share_server(host, port, secret))
    hosts = resolve(host) if is_loopback(host) else [host]
    return _client(lambda: ([(each, port) for each in hosts], secret), deadline, progress, hosting)


def _client(
    locate: Locate, deadline: float, progress: Progress, hosting: contextlib.ExitStack
) -> tuple[Store, Callable[[], None]]:
    store = TcpStore(locate, deadline=deadline, waiting=progress.waits)
    hosting.callback(store.close)
    try:
        store.reach()  # now, since the way that leads there decides where this rank listens
    except BaseException as exc:
        hosting.close()
        if isinstance(exc, ConnectionError) and not isinstance(exc, RendezvousError):
            raise unreachable(progress.rank, exc) from exc
        raise
    return store, hosting.close


def _found(job: str) -> tuple[list[Address], bytes]:
    address, secret = job_file.find(job)
    return [address], secret


_files: dict[str, tuple[contextlib.ExitStack, int]] = {}


def _host_by_file(job: str, config: Config, hosting: contextlib.ExitStack) -> None:
    """Run the store of `job` in this process and say so in its file, or share the one that runs already."""
    from hostring.store.server import StoreServer

    with _servers_lock:
        running, users = _files.get(job, (None, 0))
        if running is None:
            secret = config.secret or os.urandom(32)
            with contextlib.ExitStack() as undo:
                server = StoreServer([listen("127.0.0.1", 0)], secret)
                undo.callback(server.close)
                undo.callback(_unlink, job_file.publish(job, ("127.0.0.1", server.port), secret))
                running = undo.pop_all()
        _files[job] = running, users + 1
    hosting.callback(_leave_file, job)


def _leave_file(job: str) -> None:
    with _servers_lock:
        running, users = _files[job]
        if users > 1:
            _files[job] = running, users - 1
            return
        del _files[job]
        running.close()


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


_servers: dict[Address, tuple[Any, int]] = {}
_servers_lock = threading.Lock()


def _share_server(host: str, port: int, secret: bytes) -> Callable[[], None]:
    """Run the store at `host` in this process, or share the one that runs there already. Returns what gives it up."""
    from hostring.store.server import StoreServer

    with _servers_lock:
        server, users = _servers.get((host, port), (None, 0))
        if server is None:
            server = StoreServer(_listening(host, port), secret)
        _servers[host, port] = server, users + 1

    def leave() -> None:
        with _servers_lock:
            server, users = _servers[host, port]
            if users > 1:
                _servers[host, port] = server, users - 1
                return
            del _servers[host, port]
            server.close()

    return leave


def _listening(host: str, port: int) -> list[socket.socket]:
    """Sockets for the store: on loopback when `host` means that, on `host` when that is an address of ours, else on all."""
    hosts = resolve(host)
    if not is_loopback(host) and any(is_loopback(each) for each in hosts):
        hosts = []  # this machine's own name, which often means loopback here and something else elsewhere
    sockets: list[socket.socket] = []
    for each in [*hosts, any_host()]:
        if sockets and each == any_host():
            break
        try:
            sockets.append(listen(each, port))
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
