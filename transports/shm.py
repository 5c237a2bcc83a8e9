"""Links through memory that two processes of one host share: a ring of bytes per direction, with a socket as doorbell.

The two ends do all copying; the kernel is asked only if one of them sleeps. `mapping` has the layout, `memory_order`
the reasons for the barriers.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hostring.errors import PeerLostError
from hostring.transports.link import Buffer
from hostring.transports.mapping import DIRECTION, PAGE, READ, READER_SLEEPS, WRITER_SLEEPS
from hostring.transports.memory_order import is_weak

PIECE: Final = 1 << 17
"""Bytes of a large message after which the other end may have them, so that it copies out while we copy in."""

_GLANCES: Final = range(10)
_MAX_VAIN_CALLS: Final = 64  # before the socket is asked whether the peer is still there
_WEAK: Final = is_weak()
_PLAIN: Final[tuple[type, ...]] = (bytes, bytearray)
_NO_WORDS: Final = memoryview(bytearray(PAGE)).cast("Q")
_bells: Final = bytearray(4096)


class ShmLink:
    """One end of a mapping. One thread may send while another receives.

    Args:
        sock: connected to the peer, which holds its other end for as long as it lives. The link owns it from now on.
        peer: the rank there.
        mapped: `PAGE` zeros and two rings. The link owns it.
        capacity: of each ring, a power of two.
        side: 0 at one end, 1 at the other.
    """

    __slots__ = (
        "_acquire_in", "_acquire_out", "_base_in", "_base_out", "_bell", "_bytes", "_capacity", "_end_in", "_end_out",
        "_got", "_in", "_limit", "_mapped", "_mask", "_max_unshown", "_out", "_over", "_release_in", "_release_out",
        "_sent", "_shown", "_sleeps_in", "_sleeps_out", "_vain_calls_left", "_words", "peer",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, peer: int, mapped: mmap.mmap, capacity: int, side: int) -> None:
        sock.setblocking(False)
        self.peer = peer
        self._bell, self._mapped = sock, mapped
        self._bytes = memoryview(mapped)
        self._words = self._bytes[:PAGE].cast("Q")
        self._capacity, self._mask = capacity, capacity - 1
        self._out, self._in = side * DIRECTION, (1 - side) * DIRECTION  # of the first words, which are WRITTEN
        self._base_out, self._base_in = PAGE + side * capacity, PAGE + (1 - side) * capacity
        self._end_out, self._end_in = self._base_out + capacity, self._base_in + capacity
        self._sent = self._got = 0
        self._limit = capacity  # how far we may write, as far as we have looked
        self._shown = 0  # how much of `_got` the peer may know
        self._max_unshown = capacity >> 2  # how much it need not know
        self._sleeps_in = self._sleeps_out = False  # whether the last `arm` asked for a bell
        self._over = ""  # why nothing more will come or go
        self._vain_calls_left = _MAX_VAIN_CALLS
        incoming, outgoing = threading.Lock(), threading.Lock()  # held by nobody else, never waited for: barriers
        self._acquire_in, self._release_in = incoming.acquire, incoming.release
        self._acquire_out, self._release_out = outgoing.acquire, outgoing.release
        self._acquire_in()
        self._acquire_out()

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See `Link.send`."""
        if self._over:
            raise PeerLostError(self.peer, self._over)
        before = at = self._sent
        base, mask, end = self._base_out, self._mask, self._end_out
        for buffer in buffers:
            n = len(buffer) if type(buffer) in _PLAIN else buffer.nbytes
            start = base + (at & mask)
            if n <= PIECE and start + n <= end and at + n <= self._limit:
                self._mapped[start : start + n] = buffer
                at += n
            else:
                whole = at + n
                at = self._put(_flat(buffer), at, before + self._capacity)
                if at != whole:
                    break
        if at != self._sent:
            self._tell_written(at)
        elif at == before:
            self._vain_calls_left -= 1
            if self._vain_calls_left <= 0:
                self._look()
                if self._over:
                    raise PeerLostError(self.peer, self._over)
        return at - before

    def recv_into(self, view: Buffer) -> int:
        """See `Link.recv_into`."""
        got = self._got
        ready = self._words[self._in] - got
        if not ready and not (ready := self._glance(got)):
            return self._nothing((view,)) if self._vain_calls_left <= 0 else 0
        if _WEAK:
            self._barrier_in()
        if type(view) is not memoryview or view.format != "B":
            view = _flat(view)
        n = len(view)
        if n > ready:
            n = ready
        start = self._base_in + (got & self._mask)
        if n <= PIECE and start + n <= self._end_in:
            view[:n] = self._bytes[start : start + n]
            self._got = got = got + n
            if got - self._shown > self._max_unshown:
                self._tell_read(got)
        else:
            self._take(view, got, n)
        return n

    def recv_into_all(self, views: Sequence[Buffer]) -> int:
        """See `Link.recv_into_all`."""
        before = got = self._got
        ready = self._words[self._in] - got
        if not ready and not (ready := self._glance(got)):
            return self._nothing(views) if self._vain_calls_left <= 0 else 0
        if _WEAK:
            self._barrier_in()
        for view in views:
            if type(view) is not memoryview or view.format != "B":
                view = _flat(view)
            wanted = n = len(view)
            if n > ready:
                n = ready
            start = self._base_in + (got & self._mask)
            if n <= PIECE and start + n <= self._end_in:
                view[:n] = self._bytes[start : start + n]
                got += n
            else:
                got = self._take(view, got, n)
            ready -= n
            if n < wanted:
                break
        self._got = got
        if got - self._shown > self._max_unshown:
            self._tell_read(got)
        return got - before

    def fileno(self) -> int:
        """See `Link.fileno`; -1 once closed."""
        return self._bell.fileno()

    def arm(self, recv: bool, send: bool) -> int:
        """See `Link.arm`."""
        words, reads, writes = self._words, self._in + READER_SLEEPS, self._out + WRITER_SLEEPS
        if (self._sleeps_in and not words[reads]) or (self._sleeps_out and not words[writes]):
            self._look()  # takes the bells of the last sleep away; one that is late is taken away in `_nothing`
        self._sleeps_in, self._sleeps_out = recv, send
        words[reads], words[writes] = int(recv), int(send)
        self._tell_read(self._got)  # with a barrier, so that whoever writes or reads from here on sees all three words
        return select.POLLIN

    def close(self) -> None:
        """See `Link.close`. What was sent is the peer's already: its memory stays for as long as it is mapped there."""
        if self._bell.fileno() < 0:
            return
        self._over, self._vain_calls_left = self._over or "connection closed", 0
        self._bell.close()
        words, self._words, self._got = self._words, _NO_WORDS, 0
        words.release()
        self._bytes.release()
        with contextlib.suppress(BufferError):  # a thread is in the middle of a copy: the last one out closes it
            self._mapped.close()

    def abort(self) -> None:
        """See `Link.abort`. Keeps the descriptor until `close`, as `SocketLink` does."""
        self._over, self._vain_calls_left = self._over or "connection aborted", 0
        with contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if hasattr(self, "_release_out"):
            try:
                self.close()
            except Exception:  # names of this module are gone when the interpreter ends
                self._bell.close()

    def _put(self, view: memoryview, at: int, most: int) -> int:
        """Copy what fits, piece by piece, at most until `most` bytes were ever written. Returns how many were."""
        done, nbytes = 0, view.nbytes
        while done < nbytes:
            self._limit = self._words[self._out + READ] + self._capacity
            start = at & self._mask
            n = min(nbytes - done, self._limit - at, most - at, self._capacity - start, PIECE)
            if not n:
                break
            start += self._base_out
            self._mapped[start : start + n] = view[done : done + n]
            done, at = done + n, at + n
            if done < nbytes:
                self._tell_written(at)
        return at

    def _tell_written(self, at: int) -> None:
        if _WEAK:
            self._barrier_out()
        words, out = self._words, self._out
        words[out] = self._sent = at
        self._release_out()  # `_barrier_out` in line: every message comes through here
        self._acquire_out()
        if words[out + READER_SLEEPS]:
            words[out + READER_SLEEPS] = 0
            self._ring()

    def _take(self, view: memoryview, got: int, nbytes: int) -> int:
        """Copy `nbytes` that are there into `view`, piece by piece. Returns how many bytes were ever read."""
        done = 0
        while done < nbytes:
            start = got & self._mask
            n = min(nbytes - done, self._capacity - start, PIECE)
            start += self._base_in
            view[done : done + n] = self._bytes[start : start + n]
            done, got = done + n, got + n
            self._got = got
            if got - self._shown > self._max_unshown:
                self._tell_read(got)
        return got

    def _tell_read(self, got: int) -> None:
        """Tell the writer what was read. Not for every few bytes: it may be a quarter of the ring behind."""
        if _WEAK:
            self._barrier_in()
        words, start = self._words, self._in
        words[start + READ] = self._shown = got
        self._barrier_in()
        if words[start + WRITER_SLEEPS]:
            words[start + WRITER_SLEEPS] = 0
            self._ring()

    def _barrier_in(self) -> None:
        self._release_in()
        self._acquire_in()

    def _barrier_out(self) -> None:
        self._release_out()
        self._acquire_out()

    def _glance(self, got: int) -> int:
        """Look for as long as a system call takes, so that callers who count their turns wait alike for all transports.

        Returns:
            bytes that are there beyond `got`.
        """
        words, at = self._words, self._in
        for _ in _GLANCES:
            if ready := words[at] - got:
                return ready
        self._vain_calls_left -= 1
        return 0

    def _nothing(self, views: Sequence[Buffer]) -> int:
        self._look()
        gone = self._over and self._words[self._in] == self._got  # looked at again: it may have written, then gone
        if gone and any(_flat(view).nbytes for view in views):
            raise PeerLostError(self.peer, self._over)
        return 0

    def _look(self) -> None:
        """Read the socket, on which nothing comes but bells and the end."""
        self._vain_calls_left = 0 if self._over else _MAX_VAIN_CALLS
        try:
            if self._bell.recv_into(_bells):
                return
            self._end("connection closed")
        except BlockingIOError:
            pass
        except OSError as exc:
            self._end(f"recv: {exc}")

    def _ring(self) -> None:
        try:
            self._bell.send(b"\0")
        except BlockingIOError:  # the peer has bells enough
            pass
        except OSError as exc:
            self._end(f"send: {exc}")

    def _end(self, why: str) -> None:
        self._over, self._vain_calls_left = self._over or why, 0


def _flat(buffer: Any) -> memoryview:
    try:
        return memoryview(buffer).cast("B")
    except (ValueError, TypeError):  # nothing in it, or numbers of a kind that only numpy knows
        return memoryview(np.asarray(buffer).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
