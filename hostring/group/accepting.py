"""Accepts the links that other ranks dial, whoever else may knock."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import replace

from hostring.errors import HandshakeError
from hostring.group.greeting import HELLO_S, Greeted, converse, say_at_once
from hostring.group.handshake import Hello, RefusedError, accept, compare_contracts, refusal
from hostring.group.tasks import Task, Tasks, readable, sleep
from hostring.store.protocol import framed
from hostring.transports.link import LinkKey

log = logging.getLogger("hostring")

MAX_STRANGERS = 64  # callers beyond those that are expected, whose hello may last at the same time
MAX_AT_ONCE = 64  # callers that are let in before the other tasks go on
RETRY_S = 0.1  # before a listener is asked again that could give no socket
MAX_WARNINGS = 5  # about dropped callers: a scanner must not flood the terminal


class Acceptor:
    """One rank's accepting of links.

    Args:
        greeted: where the links are collected.
        expected: the links that others dial.
        tasks: run the hellos.
    """

    def __init__(self, greeted: Greeted, expected: Collection[LinkKey], tasks: Tasks) -> None:
        self._greeted, self._expected, self._tasks = greeted, expected, tasks
        self._callers: OrderedDict[socket.socket, Task] = OrderedDict()
        self._dropped = 0

    async def accept_all(self, listener: socket.socket) -> None:
        """Greet every caller at `listener`, until this task is cancelled."""
        while True:
            await readable(listener)
            try:
                for _ in range(MAX_AT_ONCE):
                    sock, who = listener.accept()
                    sock.setblocking(False)
                    self._let_in(sock, str(who or "this host"))
            except BlockingIOError:
                pass
            except OSError:  # out of descriptors, or the caller hung up already: neither lasts
                await sleep(RETRY_S)

    def _let_in(self, sock: socket.socket, who: str) -> None:
        """If there are too many callers, the one that has kept silent longest is dropped."""
        if len(self._callers) >= MAX_STRANGERS + len(self._expected):
            self._tasks.cancel(next(iter(self._callers.values())))
        task = self._tasks.start(self._greet_and_close(sock, who))
        if not task.done:
            self._callers[sock] = task

    async def _greet_and_close(self, sock: socket.socket, who: str) -> None:
        try:
            await self.greet(sock, who)
        finally:
            self._callers.pop(sock, None)
            if sock not in self._greeted.sockets.values():
                sock.close()

    async def greet(self, sock: socket.socket, who: str) -> None:
        """One caller's hello. Keeps its socket, or drops it and logs why."""
        greeted = self._greeted
        try:
            theirs, verdict = await converse(accept(self._own, self._admit, greeted.secret), sock)
            # admitted, told and kept in one go: the peer may have dialled two of our addresses, and once all links are
            # there nobody waits for a message that is still to be sent
            if why := self._admit(theirs):
                raise refusal("duplicate", why)
            say_at_once(sock, verdict)
            if old := greeted.sockets.get((theirs.rank, theirs.kind)):
                old.close()
            greeted.keep(sock, theirs)
            compare_contracts(greeted.hello.rank, greeted.hello.contract, theirs.rank, theirs.contract)
        except RefusedError as exc:
            self._drop(who, str(exc), logging.DEBUG if exc.reason == "again" else logging.WARNING)
            if exc.reply:
                with contextlib.suppress(OSError):
                    sock.send(framed(exc.reply))
        except HandshakeError as exc:
            greeted.fail(exc)
        except (EOFError, ConnectionError) as exc:  # a peer that tries several of our addresses gives up the others
            self._drop(who, str(exc), logging.INFO)
        except (OSError, ValueError) as exc:
            self._drop(who, str(exc) or f"silent for {HELLO_S:.0f} s")

    def _own(self, kind: str) -> Hello:
        return replace(self._greeted.hello, kind=kind)

    def _admit(self, theirs: Hello) -> str | None:
        greeted, key = self._greeted, (theirs.rank, theirs.kind)
        if key not in self._expected:
            return f"rank {greeted.hello.rank} expects no {theirs.kind} link from rank {theirs.rank}"
        other_start = greeted.sessions.get(theirs.rank, theirs.session) != theirs.session
        if not other_start and (key not in greeted.sockets or _is_dead(greeted.sockets[key])):
            return None
        if not other_start:
            raise refusal("again", f"rank {theirs.rank} has this link already")
        return f"rank {theirs.rank} is there already"

    def _drop(self, who: str, why: str, level: int = logging.WARNING) -> None:
        if level == logging.WARNING:
            self._dropped += 1
            level = logging.WARNING if self._dropped <= MAX_WARNINGS else logging.INFO
        log.log(level, "hostring: rank %d dropped a caller at %s: %s", self._greeted.hello.rank, who, why)


def _is_dead(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
