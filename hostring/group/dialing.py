"""Dials the links that this rank makes: every address of a peer, again and again, until one leads to it."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from hostring.errors import HandshakeError, HostringError, RendezvousError
from hostring.group.greeting import HELLO_S, Greeted, converse
from hostring.group.handshake import RefusedError, compare_contracts, dial
from hostring.group.tasks import Task, Tasks, all_done, first_done, sleep, writable
from hostring.transports.addresses import Address, join_address, scope_id

log = logging.getLogger("hostring")

STAGGER_S = 0.25
"""How long one address of a peer is tried before the next one is tried beside it (RFC 8305 does the same)."""

FIRST_PAUSE_S, MAX_PAUSE_S, PAUSE_GROWTH = 0.02, 0.5, 1.6
"""Between two attempts to reach a peer."""

MAX_REFUSALS = 3
"""Refusals that no later attempt will change, after which dialling a peer ends."""


class Dialer:
    """One rank's dialling.

    Args:
        greeted: where the links are collected.
        addresses: of each peer, best first.
        tasks: run the attempts.
    """

    def __init__(self, greeted: Greeted, addresses: Mapping[int, Sequence[Address]], tasks: Tasks) -> None:
        self._greeted, self._addresses, self._tasks = greeted, addresses, tasks
        self._rank = greeted.hello.rank
        self._reached: set[int] = set()  # peers whose address was logged

    async def dial_all(self, peer: int, kinds: Sequence[str]) -> None:
        """Make all links with one peer. What can't be mended by another attempt ends the start."""
        try:
            addresses = self._addresses[peer]
            if _is_certain(addresses):  # then all links are made at once
                await self._link_all(peer, kinds, addresses)
            else:
                address = await self._until_linked(peer, kinds[0], addresses)
                await self._link_all(peer, kinds[1:], [address])
        except Exception as exc:
            self._greeted.fail(exc)

    async def _link_all(self, peer: int, kinds: Sequence[str], addresses: Sequence[Address]) -> None:
        await all_done([self._tasks.start(self._until_linked(peer, kind, addresses)) for kind in kinds])

    async def _until_linked(self, peer: int, kind: str, addresses: Sequence[Address]) -> Address:
        pause, refusals = FIRST_PAUSE_S, 0
        while True:
            outcome = await self._race(peer, kind, addresses)
            if not isinstance(outcome, BaseException):
                return outcome
            self._greeted.reasons[peer] = str(outcome)
            if isinstance(outcome, RefusedError) and outcome.reason in ("version", "secret", "world_size"):
                refusals += 1
                if refusals >= MAX_REFUSALS:
                    raise HandshakeError(f"rank {self._rank} gets no link to rank {peer}: {outcome}", peer)
            elif isinstance(outcome, HandshakeError) and not isinstance(outcome, RefusedError):
                raise outcome
            await sleep(pause)
            pause = min(MAX_PAUSE_S, pause * PAUSE_GROWTH)

    async def _race(self, peer: int, kind: str, addresses: Sequence[Address]) -> Address | BaseException:
        """Try the addresses, each a little after the one before; the first that leads to the peer wins."""
        running: list[Task] = []
        worst: BaseException = RendezvousError(f"rank {peer} has published no address that rank {self._rank} can use")
        queue = list(addresses)
        try:
            while queue or running:
                stagger = STAGGER_S
                if queue:
                    address = queue.pop(0)
                    running.append(self._tasks.start(self._dial(peer, kind, address)))
                    if address[0].startswith("@"):  # on this host: it answers, or is not there at all
                        stagger = HELLO_S
                await first_done(running, stagger if queue else inf)
                for task in [task for task in running if task.done]:
                    running.remove(task)
                    if task.error is None:
                        won: Address = task.result
                        return won
                    if isinstance(task.error, HandshakeError) or not isinstance(worst, HandshakeError):
                        worst = task.error
        finally:
            for task in running:
                self._tasks.cancel(task)
        return worst

    async def _dial(self, peer: int, kind: str, address: Address) -> Address:
        greeted, mine = self._greeted, self._greeted.hello
        family, target = _target(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        kept = False
        try:
            await _connect(sock, target)
            theirs, _ = await converse(dial(replace(mine, kind=kind), peer, greeted.secret), sock)
            compare_contracts(mine.rank, mine.contract, peer, theirs.contract)
            if peer not in self._reached:  # said first: the last link that is kept ends the start
                self._reached.add(peer)
                log.info("hostring: rank %d reaches rank %d at %s", self._rank, peer, show(address))
            greeted.keep(sock, theirs)
            kept = True
            return address
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"{show(address)}: no answer in {HELLO_S:.0f} s") from None
        except (OSError, EOFError, ValueError) as exc:
            if isinstance(exc, HostringError):
                raise
            raise OSError(f"{show(address)}: {exc}") from exc
        finally:
            if not kept:
                sock.close()


def _is_certain(addresses: Sequence[Address]) -> bool:
    """Whether one address is tried alone: the only one, or one on this host, which answers or is not there at all."""
    return len(addresses) == 1 or any(host.startswith("@") for host, _ in addresses[:1])


def show(address: Address) -> str:
    """For messages."""
    return address[0] if address[0].startswith(("/", "@")) else join_address(*address)


def _target(address: Address) -> tuple[socket.AddressFamily, Any]:
    host, port = address
    if host.startswith("/"):
        return socket.AF_UNIX, host
    if host.startswith("@"):
        return socket.AF_UNIX, f"\0{host[1:]}"
    if ":" in host:
        bare, _, scope = host.partition("%")
        return socket.AF_INET6, (bare, port, 0, scope_id(scope))
    return socket.AF_INET, (host, port)


async def _connect(sock: socket.socket, target: Any) -> None:
    sock.setblocking(False)
    if (failed := sock.connect_ex(target)) == errno.EINPROGRESS:
        await writable(sock, time.monotonic() + HELLO_S)
        failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")  # Linux may connect a free port to itself
