"""Makes the links of a group: accepts, dials and greets until every expected link is there, whoever else may knock."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostring.errors import HandshakeError, HostringError, RendezvousError
from hostring.group.handshake import (
    HELLO_LIMIT,
    HELLO_SECONDS,
    Hello,
    Protocol,
    RefusedError,
    Wire,
    accept,
    compare_contracts,
    dial,
    refusal,
)
from hostring.group.rendezvous import Progress, names
from hostring.store.protocol import framed
from hostring.store.streams import accept_all, end, receive, send
from hostring.transports.addresses import Address, join_address, scope_id

log = logging.getLogger("hostring")

STRANGERS_LIMIT = 64
STAGGER = 0.25
"""Seconds that one address of a peer is tried before the next one is tried beside it (RFC 8305 does the same)."""

REFUSALS_LIMIT = 3
"""Refusals that no later attempt will change, after which dialling a peer ends."""


@dataclass
class Wiring:
    """The work of one rank. `run` does it all, in a thread of its own so that a caller's event loop doesn't matter."""

    hello: Hello
    secret: bytes
    dials: Sequence[Wire]
    accepts: Sequence[Wire]
    addresses: Mapping[int, Sequence[Address]]
    listeners: Sequence[socket.socket]
    deadline: float
    progress: Progress

    def __post_init__(self) -> None:
        self.sockets: dict[Wire, socket.socket] = {}
        self.hellos: dict[int, Hello] = {}
        self._failure: BaseException | None = None
        self._reasons: dict[int, str] = {}
        self._greetings: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._dialling: set[asyncio.Task[Address]] = set()
        self._dropped = 0
        self._missing: set[Wire] = {*self.dials, *self.accepts}
        self._sessions: dict[int, bytes] = {}

    def run(self) -> dict[Wire, socket.socket]:
        """Returns the connected sockets.

        Raises:
            HandshakeError: a contract differs, or a peer refuses us for good.
            ValueError: the contract is too large for a hello.
            RendezvousError: the deadline passed; names the ranks without a link.
        """
        self.hello.to_bytes(
            bytes(16)
        )  # a contract that doesn't fit is an error now, and not the reason of many failed attempts
        loop = asyncio.SelectorEventLoop()
        stop = asyncio.Event()

        def work() -> None:
            try:
                loop.run_until_complete(self._main(stop))
            except BaseException as exc:
                self._failure = exc
            finally:
                loop.close()

        thread = threading.Thread(target=work, name="hostring-wiring", daemon=True)
        thread.start()
        try:
            thread.join()
        except BaseException as exc:  # Ctrl-C
            self._failure = exc
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
            thread.join()
        if self._failure is not None:
            for sock in self.sockets.values():
                sock.close()
            raise self._failure
        return self.sockets

    async def _main(self, stop: asyncio.Event) -> None:
        self._changed = asyncio.Event()
        endings = [accept_all(listener, self._accepted) for listener in self.listeners]
        by_peer: dict[int, list[str]] = {}
        for peer, kind in self.dials:
            by_peer.setdefault(peer, []).append(kind)
        tasks = [asyncio.ensure_future(self._guard(self._dial_all(peer, kinds))) for peer, kinds in by_peer.items()]
        tasks.append(asyncio.ensure_future(self._stopped(stop)))
        try:
            while self._missing and self._failure is None and not stop.is_set():
                left = self.deadline - time.monotonic()
                if left <= 0:
                    raise RendezvousError(self._in_vain(), min(peer for peer, _ in self._missing))
                self._changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 0.5, max(0.05, self.progress.until_due())))
                if self._missing:
                    self.progress.waits(*self._state())
        finally:
            for end_accepting in endings:
                end_accepting()
            await end([*tasks, *self._greetings])
            await end(self._dialling)  # a race that is cancelled a second time leaves its own behind
        if self._failure is not None:
            raise self._failure

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as exc:
            self._fail(exc)

    async def _stopped(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()

    def _fail(self, exc: BaseException) -> None:
        self._failure = self._failure or exc
        self._changed.set()

    def _state(self) -> tuple[str, str]:
        peers = {peer for peer, _ in self._missing}
        return f"for links with {names(peers)}", "; ".join(self._tried(peers)[:3])

    def _tried(self, peers: set[int]) -> list[str]:
        return [f"rank {peer}: {self._reasons[peer]}" for peer in sorted(peers) if peer in self._reasons]

    def _in_vain(self) -> str:
        peers = {peer for peer, _ in self._missing}
        tried = self._tried(peers)
        text = f"rank {self.hello.rank} has no link with {names(peers)} at the deadline"
        return (
            f"{text} ({'; '.join(tried)})"
            if tried
            else f"{text}; nobody dialled from there: is a firewall between the hosts?"
        )

    def _accepted(self, sock: socket.socket, who: str) -> None:
        if len(self._greetings) >= STRANGERS_LIMIT + len(
            self.accepts
        ):  # the one that has kept silent longest makes room
            self._greetings.popitem(last=False)[0].cancel()
        task = asyncio.ensure_future(self._greet(sock, who))
        self._greetings[task] = None
        task.add_done_callback(functools.partial(self._greeted, sock))

    def _greeted(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        """Here and not in `_greet`, which never runs when it is cancelled at once."""
        self._greetings.pop(task, None)
        if sock not in self.sockets.values():
            sock.close()

    async def _greet(self, sock: socket.socket, who: str) -> None:
        try:
            protocol = accept(self._own, self._admit, self.secret)
            theirs, verdict = await asyncio.wait_for(_converse(protocol, sock), HELLO_SECONDS)
            if why := self._admit(theirs):  # asked and kept in one go: the peer may have dialled two of our addresses
                raise refusal("duplicate", why)
            if old := self.sockets.get((theirs.rank, theirs.kind)):
                old.close()
            self._keep(sock, theirs)
            await asyncio.wait_for(send(sock, verdict), HELLO_SECONDS)
            compare_contracts(self.hello.rank, self.hello.contract, theirs.rank, theirs.contract)
        except RefusedError as exc:
            self._drop(who, str(exc))
            if exc.reply:
                with contextlib.suppress(OSError):
                    sock.send(framed(exc.reply))
        except HandshakeError as exc:
            self._fail(exc)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError) as exc:
            self._drop(who, str(exc) or f"silent for {HELLO_SECONDS:.0f} s")

    def _drop(self, who: str, why: str) -> None:
        self._dropped += 1
        level = logging.WARNING if self._dropped <= 5 else logging.INFO  # a scanner must not flood the terminal
        log.log(level, "hostring: rank %d dropped a caller at %s: %s", self.hello.rank, who, why)

    def _own(self, kind: str) -> Hello:
        return replace(self.hello, kind=kind)

    def _admit(self, theirs: Hello) -> str | None:
        wire = theirs.rank, theirs.kind
        if wire not in self.accepts:
            return f"rank {self.hello.rank} expects no {theirs.kind} link from rank {theirs.rank}"
        other_start = self._sessions.get(theirs.rank, theirs.session) != theirs.session
        if other_start or (wire in self.sockets and not _is_dead(self.sockets[wire])):
            return f"rank {theirs.rank} is there already"
        return None

    def _keep(self, sock: socket.socket, theirs: Hello) -> None:
        self.sockets[theirs.rank, theirs.kind] = sock
        self.hellos[theirs.rank] = theirs
        self._sessions[theirs.rank] = theirs.session
        self._missing.discard((theirs.rank, theirs.kind))
        self._changed.set()

    async def _dial_all(self, peer: int, kinds: Sequence[str]) -> None:
        address = await self._until_linked(peer, kinds[0], self.addresses[peer])
        log.info("hostring: rank %d reaches rank %d at %s", self.hello.rank, peer, show(address))
        await asyncio.gather(*(self._until_linked(peer, kind, [address]) for kind in kinds[1:]))

    async def _until_linked(self, peer: int, kind: str, addresses: Sequence[Address]) -> Address:
        pause, refusals = 0.02, 0
        while True:
            outcome = await self._race(peer, kind, addresses)
            if not isinstance(outcome, BaseException):
                return outcome
            self._reasons[peer] = str(outcome)
            if isinstance(outcome, RefusedError) and outcome.reason in ("version", "secret", "world_size"):
                refusals += 1
                if refusals >= REFUSALS_LIMIT:
                    raise HandshakeError(f"rank {self.hello.rank} gets no link to rank {peer}: {outcome}", peer)
            elif isinstance(outcome, HandshakeError) and not isinstance(outcome, RefusedError):
                raise outcome
            await asyncio.sleep(pause)
            pause = min(0.5, pause * 1.6)

    async def _race(self, peer: int, kind: str, addresses: Sequence[Address]) -> Address | BaseException:
        """Try the addresses, each a little after the one before; the first that leads to the peer wins."""
        running: set[asyncio.Task[Address]] = set()
        worst: BaseException = RendezvousError(
            f"rank {peer} has published no address that rank {self.hello.rank} can use"
        )
        queue = list(addresses)
        try:
            while queue or running:
                stagger = STAGGER
                if queue:
                    address = queue.pop(0)
                    running.add(task := asyncio.ensure_future(self._dial(peer, kind, address)))
                    self._dialling.add(task)
                    task.add_done_callback(self._dialling.discard)
                    if address[0].startswith("@"):  # on this host: it answers, or is not there at all
                        stagger = HELLO_SECONDS
                done, running = await asyncio.wait(
                    running, timeout=stagger if queue else None, return_when=asyncio.FIRST_COMPLETED
                )
                for exc in [
                    task.exception() for task in done
                ]:  # of each, or asyncio complains of those that nobody asked
                    if exc is not None and (isinstance(exc, HandshakeError) or not isinstance(worst, HandshakeError)):
                        worst = exc
                for task in done:
                    if task.exception() is None:
                        return task.result()
        finally:
            await end(running)
        return worst

    async def _dial(self, peer: int, kind: str, address: Address) -> Address:
        family, target = _target(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        kept = False
        try:
            await asyncio.wait_for(_connect(sock, target), HELLO_SECONDS)
            protocol = dial(self._own(kind), peer, self.secret)
            theirs, _ = await asyncio.wait_for(_converse(protocol, sock), HELLO_SECONDS)
            compare_contracts(self.hello.rank, self.hello.contract, peer, theirs.contract)
            self._keep(sock, theirs)
            kept = True
            return address
        except asyncio.TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"{show(address)}: no answer in {HELLO_SECONDS:.0f} s") from None
        except (OSError, EOFError, ValueError) as exc:
            if isinstance(exc, HostringError):
                raise
            raise OSError(f"{show(address)}: {exc}") from exc
        finally:
            if not kept:
                sock.close()


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
    await asyncio.get_running_loop().sock_connect(sock, target)
    if (
        sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername()
    ):  # Linux may connect a free local port to itself
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")


def _is_dead(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


async def _converse(protocol: Protocol, sock: socket.socket) -> tuple[Hello, bytes]:
    try:
        out = next(protocol)
        while True:
            if out:
                await send(sock, out)
            out = protocol.send(await receive(sock, HELLO_LIMIT))
    except StopIteration as stop:  # can't leave a coroutine by itself
        result: tuple[Hello, bytes] = stop.value
        return result
