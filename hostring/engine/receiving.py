"""What a program receives: where each message lands, which header it must have, and what happens to other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hostring.arrays.casting import bound_cast, cast
from hostring.arrays.dtypes import (
    CODES,
    FLOAT32,
    IN_BLOCKS,
    NAMES,
    PAYLOADS,
    Array,
    DType,
    kind_code,
    nbytes_of,
    wire_dtype,
)
from hostring.engine.binding import Binding, Buffers, SideKey, Spot
from hostring.engine.frames import EXPECTED_BYTES, HEADER_BYTES, decode, payload_nbytes
from hostring.errors import CollectiveMismatch, ProtocolError
from hostring.topologies.schedule import Recv
from hostring.transports.link import Buffer, Link


class Pipe:
    """A link, and what was read from it too early: bytes that belong to the next message."""

    __slots__ = ("_ahead", "link", "recv", "recv_all", "send", "waited")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.waited = 0.0  # seconds in which nothing came from there
        self.send = link.send
        self.recv: Callable[[Any], int] = link.recv_into
        self.recv_all: Callable[[Sequence[Any]], int] = link.recv_into_all
        self._ahead = b""

    def push_back(self, early: bytes) -> None:
        self._ahead = early + self._ahead
        if self._ahead:
            self.recv, self.recv_all = self._recv_ahead, lambda views: self._recv_ahead(views[0])

    def _recv_ahead(self, view: Buffer) -> int:
        into = memoryview(view).cast("B")
        n = min(len(self._ahead), len(into))
        into[:n] = self._ahead[:n]
        self._ahead = self._ahead[n:]
        if not self._ahead:
            self.recv, self.recv_all = self.link.recv_into, self.link.recv_into_all
        return n


@dataclass(frozen=True)
class Landing:
    """The short form of a message that lands in scratch.

    Attributes:
        read: (the message, where it lands, its size, the frame, where its header is in the frame).
        convert: brings a payload of another dtype into place; None where the message lands there.
    """

    read: tuple[Incoming, memoryview, int, bytearray, int]
    convert: Callable[[], Any] | None


class Incoming:
    """One expected message: where it goes, and which header it must have.

    A payload of another dtype than expected (a bfloat16 rank among float16 ranks) goes through side memory and is
    converted; the next call then expects that dtype.
    """

    __slots__ = (
        "_at", "_checked", "_frame", "_got", "_home", "_key", "_target", "_view", "before", "binding", "done",
        "header", "n_elements", "peer", "pipe", "side", "size", "spot",
    )  # fmt: skip

    def __init__(
        self,
        binding: Binding,
        recv: Recv,
        pipe: Pipe,
        header: bytearray,
        spot: Spot,
        home: tuple[bytearray, int] | None,
        key: SideKey,
    ) -> None:
        self.binding, self.peer, self.pipe, self.header, self.spot = binding, recv.peer, pipe, header, spot
        self.n_elements = spot.stop - spot.start
        self.side: memoryview | None = None
        self.before: Incoming | None = None  # the message that comes first over the same link in this round
        self.done = False
        self._home, self._key = home, key
        self._got = 0
        self._checked = False
        self._target: Array | None = None
        self._expect(self.payload_dtype(), payload_nbytes(header))

    def payload_dtype(self) -> DType:
        """What the message is expected to bring, or has brought."""
        return PAYLOADS[self.header[EXPECTED_BYTES]]

    def _expect(self, payload: DType, nbytes: int) -> None:
        """Lay out where header and payload land, for a payload of dtype `payload`."""
        self.size = HEADER_BYTES + nbytes
        self._view: memoryview | None = None
        self.side = None
        if payload != self.binding.dtype:
            self._frame, self._at = self.binding.side(self._key, self.n_elements, payload)
            self._view = self.side = memoryview(self._frame)[self._at : self._at + self.size]
        elif self._home is not None:
            self._frame, self._at = self._home
            self._view = memoryview(self._frame)[self._at : self._at + self.size]
        else:  # straight into the caller's memory, the header apart
            self._frame, self._at = bytearray(HEADER_BYTES), 0

    @property
    def payload_nbytes(self) -> int:
        return self.size - HEADER_BYTES

    def landing(self) -> Landing | None:
        """The short form of a message whose header and payload land together, in scratch; None for any other."""
        if self._view is None or self.spot.fixed is None or self.before is not None:
            return None
        converts = self.side is not None and not self.binding.sixteen_bit
        convert = bound_cast(self.spot.fixed, self.side_array()) if converts else None
        return Landing((self, self._view, self.size, self._frame, self._at), convert)

    def step(self, b: Buffers) -> bool:
        """Read what is there. Returns whether anything came. Sets `done` when the message is complete.

        Whoever begins a run sets `done` to False.
        """
        got = self._got
        if got:
            n = self._step_on(got)
        elif self._view is not None:
            n = self.pipe.recv(self._view)
        else:
            self._target = self.spot.buffer(b)
            n = self.pipe.recv_all((self._frame, self._target))
        if not n:
            return False
        self.add(n, b)
        return True

    def add(self, n: int, b: Buffers) -> None:
        """Account for `n` more bytes of this message, and check its header as soon as it is there."""
        self._got = got = self._got + n
        if not self._checked and got >= HEADER_BYTES:
            if not self._frame.startswith(self.header, self._at):
                self._unexpected(b)
                return
            self._checked = True
        if got == self.size:
            self._complete()

    def _complete(self) -> None:
        self.done, self._checked, self._got = True, False, 0
        self._target = None  # a program that is kept must not keep the caller's memory

    def progress(self) -> str:
        """How far this message has come, for an error message."""
        return f"sent {self._got} of {self.size} bytes"

    def _step_on(self, got: int) -> int:
        if self._view is not None:
            return self.pipe.recv(self._view[got:])
        assert self._target is not None
        if got < HEADER_BYTES:
            return self.pipe.recv_all((memoryview(self._frame)[got:], self._target))
        return self.pipe.recv(self._target.view(np.uint8)[got - HEADER_BYTES :])

    def _unexpected(self, b: Buffers) -> None:
        """The header is another one: of a call that doesn't match, or of the same call with another payload dtype."""
        start = bytes(self._frame[self._at : self._at + HEADER_BYTES])
        theirs, ours = decode(start), decode(self.header)
        assert ours is not None
        if theirs is None:
            raise ProtocolError(
                f"rank {self.peer} sent bytes that are no hostring frame: {start[:16].hex()}…", self.peer
            )
        if start[:EXPECTED_BYTES] != bytes(self.header[:EXPECTED_BYTES]):
            sides = f"this rank calls {ours.describe_call()}; rank {self.peer} calls {theirs.describe_call()}"
            differs = ours.differs_from(theirs)
            raise CollectiveMismatch(f"{sides}; they differ in: {differs}" if differs else sides, self.peer)
        payload = PAYLOADS.get(theirs.payload_dtype)
        if payload is None or theirs.payload_nbytes != nbytes_of(self.n_elements, payload) or not self._takes(payload):
            mine = NAMES[CODES[self.binding.dtype]]
            raise CollectiveMismatch(
                f"rank {self.peer} sent {theirs.describe()}; this rank can't take that as {self.n_elements} of {mine}",
                self.peer,
            )
        self.binding.change()  # later runs move another amount, and later payloads like this one go through side memory
        received = start + self._payload_so_far()
        self.header = self.binding.own_header(bytearray(start))
        self._expect(payload, theirs.payload_nbytes)
        if self._view is None:
            self._target = self.spot.buffer(b)
        self._take_over(received)

    def _takes(self, payload: DType) -> bool:
        """Whether what this program folds or moves can be had from `payload`."""
        if payload in IN_BLOCKS:
            return self.binding.call.op is not None and wire_dtype(self.binding.dtype) == FLOAT32
        return kind_code(payload) == kind_code(self.binding.dtype)

    def _payload_so_far(self) -> bytes:
        if self._view is not None:
            return bytes(self._view[HEADER_BYTES : self._got])
        assert self._target is not None
        return self._target.view(np.uint8)[: self._got - HEADER_BYTES].tobytes()

    def _take_over(self, received: bytes) -> None:
        """Put what was read under a wrong expectation where it belongs; the rest is the next message's."""
        mine, rest = received[: self.size], received[self.size :]
        self._got = len(mine)
        if self._view is not None:
            self._view[: len(mine)] = mine
        else:
            assert self._target is not None
            self._target.view(np.uint8)[: len(mine) - HEADER_BYTES] = np.frombuffer(mine[HEADER_BYTES:], np.uint8)
        self.pipe.push_back(rest)
        self._checked = True
        if self._got == self.size:
            self._complete()

    def convert(self, b: Buffers) -> None:
        """Bring a payload of another dtype into place, rounding to nearest even where it must."""
        if not self.binding.sixteen_bit:
            cast(self.spot.array(b).view(self.binding.dtype), self.side_array())

    def side_array(self) -> Array:
        """The payload of another dtype, where it landed."""
        assert self.side is not None
        payload = self.payload_dtype()
        return np.frombuffer(self.side, payload, nbytes_of(self.n_elements, payload) // payload.itemsize, HEADER_BYTES)
