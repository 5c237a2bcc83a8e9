"""Messages on the link to one rank: sent piece by piece, and put together from the pieces that come."""

from __future__ import annotations

import select
from collections import deque

import numpy as np

from hostring.arrays.dtypes import CODES, DTYPES, Array
from hostring.engine.binding import flat
from hostring.engine.counters import Counters
from hostring.engine.frames import HEADER_BYTES, KIND_MESSAGE, Header, decode, message_header
from hostring.engine.matching import Matching, MessageWork
from hostring.engine.unsent import Unsent
from hostring.errors import PeerLostError, ProtocolError
from hostring.transports.link import Link


class MessageLink:
    """What is on its way to and from one rank. Never waits; one thread at a time may be in here.

    Attributes:
        outgoing: what the link has not taken yet, and the send to which it belongs.
        incoming: the receive that gets the message under way, if one was posted before it began.
        lost: why nothing moves any more.
    """

    def __init__(self, rank: int, link: Link, matching: Matching, counters: Counters, epoch: int) -> None:
        self.rank = rank
        self.outgoing: deque[tuple[Unsent, MessageWork]] = deque()
        self.incoming: MessageWork | None = None
        self.lost: PeerLostError | None = None
        self._link, self._matching, self._counters, self._epoch = link, matching, counters, epoch
        self._sent = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._got = 0
        self._header: Header | None = None
        self._body: memoryview | None = None  # where the payload goes
        self._side: Array | None = None  # the payload, when it doesn't go straight into place

    def register(self, poller: select.poll) -> None:
        """Let `poller` wake up for what comes here, and for room when something is to be sent."""
        poller.register(self._link.fileno(), self._link.arm(True, bool(self.outgoing)))

    def queue(self, data: Array, work: MessageWork) -> None:
        """Put a flat array behind what is to be sent."""
        header = message_header(work.tag, self._sent, data.size, CODES[data.dtype], data.nbytes, self._epoch)
        self._sent += 1
        self.outgoing.append((Unsent((header, data)), work))
        self._counters.add(self.rank, 1, data.nbytes, 0, 0)

    def move(self) -> bool:
        """Send and receive what is possible without waiting. Returns whether a byte moved."""
        return self.push() | self.pull()

    def push(self) -> bool:
        """The half of `move` that sends."""
        progress = False
        while self.outgoing:
            left, work = self.outgoing[0]
            taken = self._link.send(left.buffers)
            if not taken:
                break
            progress = True
            left.drop(taken)
            if left.buffers:
                continue
            self.outgoing.popleft()
            work.owner = None
            work.finish()
        return progress

    def pull(self) -> bool:
        """The half of `move` that receives."""
        progress = False
        while True:
            view = self._head if self._header is None else self._body
            assert view is not None
            if self._got < len(view):
                n = self._link.recv_into(view[self._got :])
                if not n:
                    return progress
                progress = True
                self._got += n
            if self._got == len(view):
                self._got = 0
                if self._header is None:
                    self._begin()
                else:
                    self._end(self._header)

    def _begin(self) -> None:
        """A header is here: find the receive, and where the payload goes."""
        rank, header = self.rank, decode(self._head)
        if header is None or header.kind != KIND_MESSAGE or header.payload_dtype >= len(DTYPES):
            raise ProtocolError(
                f"rank {rank} sent bytes on its message link that are no hostring frame: "
                f"{bytes(self._head[:16]).hex()}…",
                rank,
            )
        dtype = DTYPES[header.payload_dtype]
        if header.payload_nbytes != header.n_elements * dtype.itemsize:
            raise ProtocolError(
                f"rank {rank} sent a message of {header.n_elements} elements in {header.payload_nbytes} bytes", rank
            )
        self.incoming = work = self._matching.claim(rank, header)
        if work is not None and work.into is not None and work.into.dtype == dtype:
            self._side, self._body = None, _bytes(work.into)
        else:
            try:
                self._side = np.empty(header.n_elements, dtype)  # the system gives memory only as bytes come
            except (MemoryError, ValueError):
                what = f"a message of {header.payload_nbytes} bytes, for which there is no memory"
                raise ProtocolError(f"rank {rank} announced {what}", rank) from None
            self._body = _bytes(self._side)
        self._header = header

    def _end(self, header: Header) -> None:
        work, side = self.incoming, self._side
        self._header = self.incoming = self._body = self._side = None
        self._counters.add(self.rank, 0, 0, 1, header.payload_nbytes)
        if work is not None:
            work.deliver(self.rank, side)
        else:
            assert side is not None
            self._matching.keep(self.rank, header, side)


def _bytes(array: Array) -> memoryview:
    return flat(array).view(np.uint8).data if array.size else memoryview(b"")
