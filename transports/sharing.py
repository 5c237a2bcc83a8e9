"""How two ranks come to share memory: a mapping is passed over their UNIX socket, and both prove that they see it.

Three messages on the fresh socket, D being the rank that dialled:

    D -> A  offer: capacity, a nonce, and the descriptor; D has written the nonce into the memory as well
    A -> D  answer: yes, and a nonce that A has written into the memory; or no
    D -> A  verdict: yes, when it has read A's nonce there; or no

After a no the socket itself carries the payload.
"""

from __future__ import annotations

import array
import contextlib
import logging
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from hostring.errors import RendezvousError
from hostring.transports import unix
from hostring.transports.link import Link, LinkKey
from hostring.transports.mapping import CAPACITY, NONCE, NONCES, PAGE, create
from hostring.transports.memory_order import unsupported
from hostring.transports.registry import Met
from hostring.transports.shm import ShmLink
from hostring.transports.unix import listen, usable

__all__ = ["listen", "make_links", "share", "unsupported", "usable", "worth_sharing"]

log = logging.getLogger("hostring")

_OFFER: Final = struct.Struct("<4sI24s")  # magic, capacity of a ring or 0 for "can't", nonce
_ANSWER: Final = struct.Struct("<4s4s24s")  # magic, yes or no, nonce
_VERDICT: Final = struct.Struct("<4s4s")
_MAGIC: Final = b"hShm"
_YES, _NO = b"yes.", b"no.."
_MAX_CAPACITY: Final = 1 << 30
_CLOEXEC: Final[int] = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


@dataclass
class _Pair:
    """One link in the making."""

    peer: int
    sock: socket.socket
    dialled: bool
    capacity: int = 0
    memory: mmap.mmap | None = None
    nonce: bytes = field(default_factory=lambda: os.urandom(NONCE))
    why: str = ""  # there can be no shared memory; empty as long as there can


def make_links(met: Met) -> dict[LinkKey, Link]:
    """See `TransportModule`."""
    near = worth_sharing(met.sockets)
    links: dict[LinkKey, Link] = dict(share(near, met.dialled, met.deadline))
    if without := sorted({peer for peer, _ in near.keys() - links.keys()}):
        names = ", ".join(map(str, without))
        raise RendezvousError(
            f"rank {met.rank} can't share memory with rank {names}; use transport='auto' or 'unix'", without[0]
        )
    return {**links, **{key: unix.wrap(sock, key[0]) for key, sock in met.sockets.items() if key not in near}}


def worth_sharing(sockets: Mapping[LinkKey, socket.socket]) -> dict[LinkKey, socket.socket]:
    """Those over which memory can be passed. Control frames are few and must interrupt sleeps: they stay on sockets."""
    return {key: sock for key, sock in sockets.items() if key[1] != "control" and sock.family == socket.AF_UNIX}


def share(
    sockets: Mapping[LinkKey, socket.socket], dialled: Collection[LinkKey], deadline: float, capacity: int = CAPACITY
) -> dict[LinkKey, ShmLink]:
    """Make links through shared memory of all `sockets` whose both ends can.

    Both ends of each must call this, in any order: whatever is sent here is sent before anything is waited for.

    Args:
        sockets: connected UNIX sockets, non-blocking, on which nothing has been sent but hellos.
        dialled: those that this rank dialled.
        deadline: monotonic seconds.
        capacity: bytes in flight per direction, a power of two.

    Returns:
        the links. They own their sockets. The others remain as they were, for another kind of link.

    Raises:
        RendezvousError: a peer did not keep to this by the deadline, or is gone.
    """
    pairs = {key: _Pair(key[0], sock, key in dialled) for key, sock in sockets.items()}
    ours = [pair for pair in pairs.values() if pair.dialled]
    theirs = [pair for pair in pairs.values() if not pair.dialled]
    try:
        for pair in ours:
            _offer(pair, capacity)
        for pair in theirs:
            _answer(pair, deadline)
        for pair in ours:
            _judge(pair, deadline)
        for pair in theirs:
            _take_verdict(pair, deadline)
    except BaseException:
        for pair in pairs.values():
            _drop(pair)
        raise
    links = {}
    for key, pair in pairs.items():
        if pair.memory is None:
            log.info(
                "hostring: the %s link with rank %d stays on its socket, without shared memory: %s",
                key[1],
                pair.peer,
                pair.why,
            )
        else:
            links[key] = ShmLink(pair.sock, pair.peer, pair.memory, pair.capacity, 0 if pair.dialled else 1)
    return links


def _offer(pair: _Pair, capacity: int) -> None:
    fd = -1
    try:
        fd = create(PAGE + 2 * capacity)
        _map(pair, fd, capacity)
        _write_nonce(pair, 0, pair.nonce)
        _send(pair, _OFFER.pack(_MAGIC, capacity, pair.nonce), fd)
    except RendezvousError:
        raise
    except OSError as exc:
        _drop(pair, f"can't make or pass shared memory: {exc}")
        _send(pair, _OFFER.pack(_MAGIC, 0, pair.nonce))
    finally:
        if fd >= 0:
            os.close(fd)


def _answer(pair: _Pair, deadline: float) -> None:
    data, fds = _receive(pair, _OFFER.size, deadline)
    magic, capacity, nonce = _OFFER.unpack(data)
    try:
        if magic != _MAGIC:
            raise _confused(pair)
        if not capacity or not fds:
            pair.why = "the peer offers none" if not capacity else "its descriptor did not come through"
        else:
            _accept(pair, fds[0], capacity, nonce)
    finally:
        for fd in fds:
            os.close(fd)
    _send(pair, _ANSWER.pack(_MAGIC, _NO if pair.why else _YES, pair.nonce))


def _accept(pair: _Pair, fd: int, capacity: int, nonce: bytes) -> None:
    nbytes = PAGE + 2 * capacity
    try:
        if capacity & (capacity - 1) or not PAGE <= capacity <= _MAX_CAPACITY or os.fstat(fd).st_size < nbytes:
            raise OSError(f"{os.fstat(fd).st_size} bytes can't hold rings of {capacity}")
        _map(pair, fd, capacity)
        if _read_nonce(pair, 0) != nonce:
            raise OSError("its memory does not show what the peer wrote there")
        _write_nonce(pair, 1, pair.nonce)
    except OSError as exc:
        _drop(pair, f"can't take the peer's memory: {exc}")


def _judge(pair: _Pair, deadline: float) -> None:
    magic, answer, nonce = _ANSWER.unpack(_receive(pair, _ANSWER.size, deadline)[0])
    if magic != _MAGIC:
        raise _confused(pair)
    if answer != _YES:
        _drop(pair, pair.why or "the peer can't take it")
    elif pair.memory is None or _read_nonce(pair, 1) != nonce:
        _drop(pair, "its memory does not show what the peer wrote there")
    _send(pair, _VERDICT.pack(_MAGIC, _NO if pair.why else _YES))


def _take_verdict(pair: _Pair, deadline: float) -> None:
    magic, verdict = _VERDICT.unpack(_receive(pair, _VERDICT.size, deadline)[0])
    if magic != _MAGIC:
        raise _confused(pair)
    if verdict != _YES:
        _drop(pair, pair.why or "the peer could not see what this rank wrote there")


def _map(pair: _Pair, fd: int, capacity: int) -> None:
    pair.memory, pair.capacity = mmap.mmap(fd, PAGE + 2 * capacity), capacity


def _drop(pair: _Pair, why: str = "start-up failed") -> None:
    pair.why = why
    if pair.memory is not None:
        pair.memory.close()
        pair.memory = None


def _write_nonce(pair: _Pair, side: int, nonce: bytes) -> None:
    assert pair.memory is not None
    pair.memory[NONCES[side] : NONCES[side] + NONCE] = nonce


def _read_nonce(pair: _Pair, side: int) -> bytes:
    assert pair.memory is not None
    return pair.memory[NONCES[side] : NONCES[side] + NONCE]


def _confused(pair: _Pair) -> RendezvousError:
    return RendezvousError(
        f"rank {pair.peer} does not speak of shared memory on its link; give all ranks the same transport=", pair.peer
    )


def _send(pair: _Pair, data: bytes, fd: int | None = None) -> None:
    """Some tens of bytes, for which a fresh socket has room."""
    passed = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        n = pair.sock.sendmsg([data], passed)
    except BlockingIOError:
        n = 0
    except ConnectionError as exc:
        raise RendezvousError(f"rank {pair.peer} left while links were made: {exc}", pair.peer) from exc
    if n != len(data):
        raise RendezvousError(f"the socket to rank {pair.peer} took {n} of {len(data)} bytes", pair.peer)


def _receive(pair: _Pair, nbytes: int, deadline: float) -> tuple[bytes, list[int]]:
    """Exactly `nbytes`, and the descriptors that came with them."""
    data, fds = b"", array.array("i")
    poll = select.poll()
    poll.register(pair.sock, select.POLLIN)
    try:
        while len(data) < nbytes:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                raise RendezvousError(f"rank {pair.peer} said nothing on shared memory by the deadline", pair.peer)
            with contextlib.suppress(BlockingIOError):
                more, control, _, _ = pair.sock.recvmsg(
                    nbytes - len(data), socket.CMSG_SPACE(4 * fds.itemsize), _CLOEXEC
                )
                for level, kind, payload in control:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                if not more:
                    raise RendezvousError(f"rank {pair.peer} left while links were made", pair.peer)
                data += more
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return data, list(fds)
