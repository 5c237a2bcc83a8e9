"""Point-to-point messages, matched by source and tag, on links of their own.

Whoever waits makes progress for everybody: it sends what is queued and receives what comes, so two ranks that both send
first don't block each other. Operations that nobody waits for are driven by a background thread, which looks for such
once in a millisecond: most are waited for at once, and handing progress from thread to thread takes longer than a message.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Final

import numpy as np

from .casting import cast
from .control import Control, Waiting, again
from .counters import Counters
from .dtypes import CODES, DTYPES, NAMES, Array, kind_code
from .errors import CollectiveMismatch, HostringError, PeerLostError, ProtocolError
from .link import Link
from .wire import HEADER_BYTES, KIND_MESSAGE, Header, decode, message_header
from .work import TICK, Driver, Work

_SPINS: Final = 200
_QUIET_TICKS: Final = 200  # the background thread ends after so many with nothing to do


class MessageWork(Work):
    """A send or a receive under way. `src` is the rank that a receive was served by, once it is done."""

    __slots__ = ("deadline", "into", "owner", "put_back", "result", "seconds", "src", "tag", "wanted")

    def __init__(self, what: str, seconds: float, driver: Driver | None = None) -> None:
        super().__init__(what, driver)
        self.seconds = seconds
        self.deadline = perf_counter() + seconds
        self.into: Array | None = None
        self.wanted: int | None = None  # the rank asked for, or None for any
        self.src: int | None = None
        self.tag = 0
        self.result: Any = None
        self.owner: Any = None  # of the memory that is being sent, which a view of a tensor doesn't keep alive
        self.put_back: Callable[[], Any] | None = None

    def deliver(self, src: int, body: Array | None) -> None:
        """End a receive: `body` is what came when it did not come straight into place."""
        assert self.into is not None
        if body is not None:
            cast(self.into, body)
        self.src = src
        self.finish(self.put_back() if self.put_back is not None else self.result)


class _Peer:
    """What is on its way to and from one rank."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.outgoing: deque[tuple[list[memoryview], MessageWork]] = deque()
        self.sent = 0
        self.head = memoryview(bytearray(HEADER_BYTES))
        self.got = 0
        self.header: Header | None = None
        self.body: memoryview | None = None  # where the payload goes
        self.side: Array | None = None  # the payload, when it doesn't go straight into place
        self.work: MessageWork | None = None  # the receive that the payload belongs to, when it is known
        self.unexpected: deque[tuple[Header, Array]] = deque()
        self.lost: PeerLostError | None = None


class Messenger:
    """All point-to-point traffic of one rank."""

    def __init__(self, rank: int, links: Mapping[int, Link], control: Control, counters: Counters, epoch: int) -> None:
        self._rank, self._control, self._counters, self._epoch = rank, control, counters, epoch
        self._peers = {peer: _Peer(link) for peer, link in links.items()}
        self._posted: list[MessageWork] = []
        self._mutex = threading.RLock()
        self._driver = threading.Lock()
        self._changed = threading.Condition()
        self._wake: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._cause: HostringError | None = None
        self._sleeping = False
        self._takers = 0  # threads that wait for the background thread to let them drive

    def send(self, data: Array, dst: int, tag: int, seconds: float, background: bool = False, owner: Any = None) -> MessageWork:
        """Queue a flat array for `dst`. As much as the link takes is sent at once."""
        peer = self._peer(dst)
        work = MessageWork(f"send to rank {dst}, tag {tag}", seconds, self)
        work.wanted, work.tag, work.owner = dst, tag, data if owner is None else owner
        with self._mutex:
            header = message_header(tag, peer.sent, data.size, CODES[data.dtype], data.nbytes, self._epoch)
            peer.sent += 1
            peer.outgoing.append(([memoryview(header), _bytes(data)], work))
            self._count(dst, sent=data.nbytes)
            self._guard(dst, lambda: self._push(dst, peer))
        self._nudge(background and not work.is_completed())
        return work

    def recv(
        self,
        into: Array,
        src: int | None,
        tag: int,
        seconds: float,
        result: Any,
        put_back: Callable[[], Any] | None,
        background: bool = False,
    ) -> MessageWork:
        """Post a receive into a flat array. It is served at once when its message is already here."""
        if src is not None:
            self._peer(src)
        work = MessageWork(f"recv from {'any rank' if src is None else f'rank {src}'}, tag {tag}", seconds, self)
        work.into, work.wanted, work.tag, work.result, work.put_back = into, src, tag, result, put_back
        with self._mutex:
            if not self._serve_from_unexpected(work):
                self._posted.append(work)
        self._nudge(background and not work.is_completed())
        return work

    def wait(self, work: MessageWork) -> Any:
        """Make progress until `work` has ended. Returns its result, or raises what it raised."""
        self.help(work)
        return Work.wait(work)

    def hurry(self) -> None:
        """See `Driver.hurry`: the background thread looks soon enough."""

    def help(self, work: Work) -> None:
        """See `Driver.help`."""
        waiting = False
        while not work.is_completed():
            if self._driver.acquire(blocking=False):
                try:
                    self._drive(work.is_completed, work.deadline if isinstance(work, MessageWork) else None)
                finally:
                    self._driver.release()
                    self._notify(work)
            elif not waiting:
                waiting = True
                work.add_done_callback(self._notify)
            else:
                self._take_over(work)

    def _take_over(self, work: Work) -> None:
        """Wait until `work` has ended or its driver leaves; the background thread leaves when asked, others at their own end."""
        with self._changed:
            self._takers += 1
        self._nudge(False)
        with self._changed:
            self._changed.wait_for(lambda: work.is_completed() or not self._driver.locked(), timeout=0.1)
            self._takers -= 1

    def _notify(self, work: Work) -> None:
        """Wake those that wait while another thread makes progress: `work` has ended, or they may drive themselves."""
        with self._changed:
            self._changed.notify_all()

    def abort(self, cause: HostringError) -> None:
        """End everything that is under way with `cause`."""
        with self._mutex:
            self._cause = cause
            left = [*self._waiting(), *(p.work for p in self._peers.values() if p.work)]
            self._posted.clear()
            for peer in self._peers.values():
                peer.outgoing.clear()
        for work in left:
            if not work.is_completed():
                work.finish(error=again(cause))
        self._nudge(False)

    def forsake(self, cause: HostringError) -> None:
        """In a forked child: refuse every call."""
        self._cause = cause
        self._mutex = threading.RLock()
        self._posted.clear()

    def close(self, seconds: float = 5.0) -> None:
        """Send what was accepted, then end the background thread. The links are closed by whoever made them."""
        deadline = perf_counter() + seconds
        while self._cause is None and any(p.outgoing for p in self._peers.values()) and perf_counter() < deadline:
            with self._mutex:
                for rank, peer in self._peers.items():
                    self._guard(rank, lambda rank=rank, peer=peer: self._push(rank, peer))  # type: ignore[misc]
            select.select([], [], [], 0.001)
        self.abort(HostringError(f"rank {self._rank} closed the group", self._rank))
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        if self._wake is not None:
            os.close(self._wake[0])
            os.close(self._wake[1])
            self._wake = None

    def _peer(self, rank: int) -> _Peer:
        if self._cause is not None:
            raise again(self._cause)
        if rank not in self._peers:
            raise ValueError(f"rank {self._rank} has no link to rank {rank}: this group only knows the addresses of its neighbours")
        return self._peers[rank]

    # ------------------------------------------------------------------ progress

    def _nudge(self, background: bool) -> None:
        """Wake whoever sleeps on the links; make sure that somebody drives when nobody waits."""
        with self._mutex:
            if background and (self._thread is None or not self._thread.is_alive()):
                if self._wake is None:
                    self._wake = os.pipe()
                self._thread = threading.Thread(target=self._background, name=f"hostring-p2p-{self._rank}", daemon=True)
                self._thread.start()
            if self._sleeping and self._wake is not None:
                os.write(self._wake[1], b"!")

    def _background(self) -> None:
        quiet = 0
        while self._cause is None and (quiet < _QUIET_TICKS or not self._retire()):
            time.sleep(TICK)
            quiet = 0 if self._drive_overdue() else quiet + 1

    def _drive_overdue(self) -> bool:
        """Make progress when something has been left alone for a tick and nobody else does. Returns whether anything is under way."""
        if not self._busy():
            return False
        with self._mutex:
            since = perf_counter() - TICK
            overdue = any(w.deadline - w.seconds < since for w in self._waiting()) or any(p.work for p in self._peers.values())
        if overdue and not self._takers and self._driver.acquire(blocking=False):
            try:
                self._drive(lambda: self._takers > 0 or not self._busy(), None)
            finally:
                self._driver.release()
                with self._changed:
                    self._changed.notify_all()
        return True

    def _retire(self) -> bool:
        with self._mutex:
            if self._busy():
                return False
            self._thread = None
            return True

    def _waiting(self) -> list[MessageWork]:
        """Posted receives without a message, and sends that the links have not taken."""
        return [*self._posted, *(w for p in self._peers.values() for _, w in p.outgoing)]

    def _busy(self) -> bool:
        return bool(self._posted or any(p.outgoing or p.work for p in self._peers.values()))

    def _drive(self, until: Callable[[], bool], deadline: float | None) -> None:
        idle = 0
        while not until():
            with self._mutex:
                progress = self._pass()
            if progress:
                idle = 0
                continue
            idle += 1
            if idle > _SPINS:
                self._expire()
                self._sleep(deadline, until)

    def _pass(self) -> bool:
        """Send and receive what is possible without waiting."""
        progress = False
        for rank, peer in self._peers.items():
            if peer.lost is None:
                progress |= self._guard(rank, lambda rank=rank, peer=peer: self._push(rank, peer) | self._pull(rank, peer))  # type: ignore[misc]
            elif self._needs(rank):
                self._fail(peer.lost)
        return progress

    def _guard(self, rank: int, act: Callable[[], bool]) -> bool:
        try:
            return act()
        except PeerLostError as exc:
            self._peers[rank].lost = exc
            return True
        except HostringError as exc:
            self._fail(exc)
            return True

    def _needs(self, rank: int) -> bool:
        peer = self._peers[rank]
        return bool(peer.outgoing or peer.work) or any(w.wanted == rank for w in self._posted)

    def _fail(self, exc: HostringError) -> None:
        cause = self._control.settle(exc)
        self._control.flood(cause)
        self.abort(cause)

    def _expire(self) -> None:
        now = perf_counter()
        with self._mutex:
            late = [w for w in self._waiting() if now > w.deadline]
        for work in late[:1]:
            self._control.receiving = self._as_waiting(work)
            self._fail(self._control.timed_out(self._as_waiting(work), "did not take part", work.seconds))

    def _sleep(self, deadline: float | None, until: Callable[[], bool]) -> None:
        poller = select.poll()
        with self._mutex:
            waiting = self._waiting()
            deadlines = [w.deadline for w in waiting]
            for peer in self._peers.values():
                if peer.lost is None:
                    poller.register(peer.link.fileno(), peer.link.arm(True, bool(peer.outgoing)))
            self._control.register(poller)
            if self._wake is None:
                self._wake = os.pipe()
            poller.register(self._wake[0], select.POLLIN)
            self._sleeping = True
            if self._pass() or until():  # what came before the doorbells were set would be slept through
                self._sleeping = False
                return
        seconds = min([self._control.patience(), *(d - perf_counter() for d in [*deadlines, *([deadline] if deadline else [])])])
        self._control.receiving = self._as_waiting(waiting[0]) if waiting else None
        events = poller.poll(max(0.0, seconds) * 1000 + 1)
        self._sleeping = False
        if self._wake is not None and any(fd == self._wake[0] for fd, _ in events):
            os.read(self._wake[0], 4096)
        try:
            self._control.hear(events)
        except HostringError as exc:
            self._fail(exc)
        self._control.receiving = None

    def _as_waiting(self, work: MessageWork) -> Waiting:
        return Waiting(min(self._peers) if work.wanted is None else work.wanted, work.what)

    # ------------------------------------------------------------------ one link

    def _push(self, rank: int, peer: _Peer) -> bool:
        progress = False
        while peer.outgoing:
            buffers, work = peer.outgoing[0]
            taken = peer.link.send(buffers)
            if not taken:
                break
            progress = True
            while buffers and taken >= len(buffers[0]):
                taken -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][taken:]
                continue
            peer.outgoing.popleft()
            work.owner = None
            work.finish()
        return progress

    def _pull(self, rank: int, peer: _Peer) -> bool:
        progress = False
        while True:
            view = peer.head if peer.header is None else peer.body
            assert view is not None
            if peer.got < len(view):
                n = peer.link.recv_into(view[peer.got :])
                if not n:
                    return progress
                progress = True
                peer.got += n
            if peer.got == len(view):
                peer.got = 0
                if peer.header is None:
                    self._begin(rank, peer)
                else:
                    self._end(rank, peer)

    def _begin(self, rank: int, peer: _Peer) -> None:
        header = decode(peer.head)
        if header is None or header.kind != KIND_MESSAGE or header.payload_dtype >= len(DTYPES):
            raise ProtocolError(
                f"rank {rank} sent bytes on its message link that are no hostring frame: {bytes(peer.head[:16]).hex()}…", rank
            )
        dtype = DTYPES[header.payload_dtype]
        if header.payload_nbytes != header.n_elements * dtype.itemsize:
            raise ProtocolError(f"rank {rank} sent a message of {header.n_elements} elements in {header.payload_nbytes} bytes", rank)
        peer.header = header
        peer.work = next((w for w in self._posted if w.tag == _tag(header) and w.wanted in (None, rank)), None)
        if peer.work is not None:
            self._posted.remove(peer.work)
            _check(peer.work, header, rank)
        if peer.work is not None and peer.work.into is not None and peer.work.into.dtype == dtype:
            peer.side, peer.body = None, _bytes(peer.work.into)
        else:
            try:
                peer.side = np.empty(header.n_elements, dtype)  # takes memory only as bytes come
            except (MemoryError, ValueError):
                what = f"a message of {header.payload_nbytes} bytes, for which there is no memory"
                raise ProtocolError(f"rank {rank} announced {what}", rank) from None
            peer.body = _bytes(peer.side)

    def _end(self, rank: int, peer: _Peer) -> None:
        header, work, side = peer.header, peer.work, peer.side
        assert header is not None
        peer.header = peer.work = peer.body = peer.side = None
        self._count(rank, received=header.payload_nbytes)
        if work is not None:
            work.deliver(rank, side)
            return
        assert side is not None
        peer.unexpected.append((header, side))
        for posted in self._posted:
            if posted.tag == _tag(header) and posted.wanted in (None, rank):
                self._posted.remove(posted)
                self._serve_from_unexpected(posted)
                return

    def _serve_from_unexpected(self, work: MessageWork) -> bool:
        for rank, peer in self._peers.items():
            if work.wanted not in (None, rank):
                continue
            for k, (header, body) in enumerate(peer.unexpected):
                if _tag(header) == work.tag:
                    del peer.unexpected[k]
                    try:
                        _check(work, header, rank)
                    except HostringError as exc:
                        self._fail(exc)
                        work.finish(error=exc)
                        return True
                    work.deliver(rank, body)
                    return True
        return False

    def _count(self, rank: int, sent: int | None = None, received: int | None = None) -> None:
        self._counters.add(rank, sent is not None, sent or 0, received is not None, received or 0)


def _tag(header: Header) -> int:
    return header.round << 32 | header.detail


def _bytes(array: Array) -> memoryview:
    return array.view(np.uint8).data if array.size else memoryview(b"")


def _check(work: MessageWork, header: Header, rank: int) -> None:
    """Refuse a message that doesn't fit its receive: a longer one, a shorter one, or one of another kind of dtype."""
    into = work.into
    assert into is not None
    if header.n_elements != into.size or kind_code(DTYPES[header.payload_dtype]) != kind_code(into.dtype):
        sent = f"rank {rank} sent {header.n_elements} elements of {header.dtype_name()}"
        raise CollectiveMismatch(f"{work.what}: {sent}, this rank expects {into.size} of {NAMES[CODES[into.dtype]]}", rank)
