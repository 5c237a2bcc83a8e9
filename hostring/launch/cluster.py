"""The opening side of a cluster: runs its store, shows a token, and waits until all others have joined with it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from hostring.errors import RendezvousError
from hostring.group.pulse import Pulse
from hostring.launch import claims
from hostring.launch.discovery import announced
from hostring.launch.joining import JOB_KEY, PAUSE_S, Place
from hostring.launch.token import SECRET_NBYTES, Token
from hostring.store.client import TcpStore
from hostring.store.server import StoreServer
from hostring.transports.addresses import hosts_to_bind
from hostring.transports.tcp import listen_at

_log = logging.getLogger(__name__)
LAST_WORDS_S = 1.0  # how long the store stays up after the token has expired, so that those who wait hear of it

Show = Callable[[dict[int, str], float], None]
"""Told who is here, by rank, and the seconds until the token expires."""


class Cluster:
    """Runs the store, is rank 0, and lets `world_size - 1` others join until the token expires.

    Args:
        hosts: addresses of this machine to offer; without, those that other machines can reach.
        port: where to listen; 0 takes a free one.
        lifetime: seconds until the token expires.
        job: what machines run that join without a program of their own.
        secret: of an earlier cluster, whose machines come back to this one; a new one when not given.
    """

    def __init__(
        self,
        world_size: int,
        *,
        name: str,
        hosts: Sequence[str] = (),
        port: int = 0,
        lifetime: float = 600.0,
        job: bytes | None = None,
        secret: bytes | None = None,
    ) -> None:
        if world_size < 2:
            raise ValueError(f"world_size={world_size}: a cluster has at least 2 ranks")
        secret = secret or secrets.token_bytes(SECRET_NBYTES)
        found = hosts_to_bind(loopback=False, spec=os.environ.get("HOSTRING_INTERFACE"))
        listening = _listening(hosts, port) if hosts else _listening(found, port, all_of_them=False)
        offered = list(listening)
        port = listening[offered[0]].getsockname()[1]
        self._server = StoreServer(list(listening.values()), secret.hex().encode())
        # the name of an interface means nothing on another machine
        addresses = dict.fromkeys((host.partition("%")[0], port) for host in offered)
        self.token = Token(tuple(addresses), world_size, int(time.time() + lifetime), secret)
        self._address = offered[0], port
        self._store = TcpStore.at(offered[0], port, secret=secret.hex().encode())
        if job is not None:
            self._store.set(JOB_KEY, job)
        self._claim = claims.take(self._store, name, world_size)
        self._announcing = contextlib.ExitStack()
        self._announcing.enter_context(announced(secret, self.token.addresses))
        self._pulses: dict[claims.Claim, Pulse] = {}

    @property
    def place(self) -> Place:
        """This machine's."""
        return Place(self.token, self._address, 0)

    def wait(self, progress: Show = lambda here, left: None) -> dict[int, str]:
        """Wait until all have joined. A machine that leaves, or falls silent, is not counted. Returns names by rank.

        Raises:
            RendezvousError: the token expired first. Names the ranks that are missing; nobody can join any more.
        """
        world_size = self.token.world_size
        while True:
            here = self._here()
            left = self.token.expires - time.time()
            progress(here, left)
            if len(here) == world_size:
                self._store.set("cluster/complete", b"")
                return here
            if left <= 0:
                missing = ", ".join(str(r) for r in range(world_size) if r not in here)
                self._store.set("cluster/closed", f"the token has expired; ranks {missing} never joined".encode())
                time.sleep(LAST_WORDS_S)
                raise RendezvousError(f"the token expired before all had joined: missing are ranks {missing}")
            time.sleep(PAUSE_S)

    def _here(self) -> dict[int, str]:
        here = {self._claim.rank: self._claim.name}
        for rank in range(1, self.token.world_size):
            claim = claims.holder(self._store, rank)
            if claim is None:
                continue
            if claim not in self._pulses:
                self._pulses[claim] = claims.pulse(self._store, claim)
            if self._pulses[claim].silent():
                claims.release(self._store, claim)
            else:
                here[rank] = claim.name
        return here

    def close(self) -> None:
        """End the store. Ranks that have found each other don't need it, but for rebuilding the group.

        A program here may end before the other machines have read that all are here: close() waits for them, at most
        `claims.SILENT_S`.
        """
        with contextlib.suppress(OSError):
            if self._store.check(["cluster/complete"]):
                self._wait_until_all_started(time.monotonic() + claims.SILENT_S)
            elif not self._store.check(["cluster/closed"]):
                self._store.set("cluster/closed", b"the machine that opened the cluster has closed it")
                time.sleep(LAST_WORDS_S if len(self._here()) > 1 else 0.0)
        self._announcing.close()
        self._store.close()
        self._server.close()

    def _wait_until_all_started(self, deadline: float) -> None:
        others = self.token.world_size - 1
        while self._store.add("cluster/started", 0) < others and time.monotonic() < deadline:
            time.sleep(PAUSE_S / 10)


def _listening(hosts: Sequence[str], port: int, all_of_them: bool = True) -> dict[str, socket.socket]:
    """Sockets that listen at these addresses, at one port.

    Args:
        port: 0 takes a free one. all_of_them: otherwise those that can't be used now are left out, such as one that an
            interface has only just got.

    Raises:
        OSError: an address can't be used; or, not `all_of_them`, none can.
    """
    found: dict[str, socket.socket] = {}
    for n, host in enumerate(hosts):
        try:
            found[host] = listen_at(host, port)
            port = found[host].getsockname()[1]
        except OSError as exc:
            if all_of_them or (n == len(hosts) - 1 and not found):
                for opened in found.values():
                    opened.close()
                raise
            _log.warning("hostring: the cluster is not offered at %s: %s", host, exc)
    return found
