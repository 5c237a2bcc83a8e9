"""What a program receives: where each message lands, what its header must be, and what if it is another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hostring.arrays.casting import bound_cast, cast
from hostring.arrays.dtypes import (
    CODES,
    FLOAT32,
    MXINT8,
    NAMES,
    PAYLOADS,
    Array,
    DType,
    kind_code,
    nbytes_of,
    wire_dtype,
)
from hostring.engine.frames import EXPECTED_BYTES, HEADER_BYTES, decode
from hostring.engine.sending import Buffers, Spot
from hostring.errors import CollectiveMismatch, ProtocolError
from hostring.topologies.schedule import Recv
from hostring.transports.link import Buffer, Link

if TYPE_CHECKING:
    from hostring.engine.program import Program

SidePlace: TypeAlias = "tuple[str, int]"


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


class Sides:
    """Memory for payloads of another dtype than their program's, that come or go. All programs of a group share it: one runs at a time."""

    def __init__(self) -> None:
        self.block = bytearray()

    def reserve(self, nbytes: int, ahead: int = 1) -> bytearray:
        """The block, of at least `nbytes`, grown by the factor `ahead`: a block that is replaced lives on under older programs."""
        if nbytes > len(self.block):
            self.block = bytearray(max(nbytes, ahead * len(self.block)))
        return self.block


class Incoming:
    """One expected message: where it goes, and what its header must be.

    A payload of another dtype than expected (a bfloat16 rank among float16 ranks) goes through a side buffer and is
    converted; the next call then expects that dtype.
    """

    __slots__ = (
        "_at", "_checked", "_frame", "_got", "_home", "_place", "_size", "_target", "_view", "before", "done", "dtype", "header",
        "n_elements", "peer", "pipe", "program", "side", "spot",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        recv: Recv,
        pipe: Pipe,
        header: bytearray,
        spot: Spot,
        home: tuple[bytearray, int] | None,
        place: SidePlace,
    ) -> None:
        self.program, self.peer, self.pipe, self.header, self.spot = program, recv.peer, pipe, header, spot
        self._place = place
        self.n_elements = spot.stop - spot.start
        self.dtype = program.dtype
        self.side: memoryview | None = None
        self.before: Incoming | None = None  # the message that comes first over the same link in this round
        self.done = False
        self._home = home
        self._got = 0
        self._checked = False
        self._expect(self.payload_dtype())

    def payload_dtype(self) -> DType:
        """What the message is expected to bring, or has brought."""
        return PAYLOADS[self.header[EXPECTED_BYTES]]

    def _expect(self, payload: DType) -> None:
        """Lay out where header and payload land, for a payload of dtype `payload`."""
        self._size = HEADER_BYTES + nbytes_of(self.n_elements, payload)
        self._view: memoryview | None = None
        self.side = None
        if payload != self.dtype:
            self._frame, self._at = self.program.side(self._place, self.n_elements, payload)
            self._view = self.side = memoryview(self._frame)[self._at : self._at + self._size]
        elif self._home is not None:
            self._frame, self._at = self._home
            self._view = memoryview(self._frame)[self._at : self._at + self._size]
        else:  # straight into the caller's memory, the header apart
            self._frame, self._at = bytearray(HEADER_BYTES), 0

    @property
    def in_one_piece(self) -> bool:
        """Whether header and payload land together, and the target is scratch."""
        return self._view is not None and self.spot.fixed is not None

    def landing(self) -> tuple[Incoming, memoryview, int, bytearray, int]:
        """(this message, where it lands, its size, the frame and where the header is in it)."""
        assert self._view is not None
        return self, self._view, self._size, self._frame, self._at

    def start(self, b: Buffers) -> None:
        self.done = self._checked = False
        self._got = 0
        # A message with a side buffer needs its target as well: its sender may have changed back to our dtype.
        self._target = (
            self.spot.buffer(b) if self._view is None or (self.side is not None and self._home is None) else None
        )

    def step(self) -> bool:
        """Read what is there. Returns whether anything came. Sets `done` when the message is complete."""
        got = self._got
        if got == 0:
            n = (
                self.pipe.recv(self._view)
                if self._view is not None
                else self.pipe.recv_all((self._frame, self._target))
            )
        else:
            n = self._step_on(got)
        if not n:
            return False
        self.took(n)
        return True

    def took(self, n: int) -> None:
        """Account for `n` more bytes of this message, and check its header as soon as it is there."""
        self._got = got = self._got + n
        if not self._checked and got >= HEADER_BYTES:
            if not self._frame.startswith(self.header, self._at):
                self._unexpected()
                return
            self._checked = True
        if got == self._size:
            self._complete()

    def _complete(self) -> None:
        self.done, self._target = True, None  # a program that is kept must not keep the caller's memory

    def progress(self) -> str:
        """How far this message has come, for an error message."""
        return f"sent {self._got} of {self._size} bytes"

    def _step_on(self, got: int) -> int:
        if self._view is not None:
            return self.pipe.recv(self._view[got:])
        assert self._target is not None
        if got < HEADER_BYTES:
            return self.pipe.recv_all((memoryview(self._frame)[got:], self._target))
        return self.pipe.recv(self._target.view(np.uint8)[got - HEADER_BYTES :])

    def _unexpected(self) -> None:
        """The header is not the expected one: a call that does not match, or the same call with another payload dtype."""
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
            mine = NAMES[CODES[self.dtype]]
            raise CollectiveMismatch(
                f"rank {self.peer} sent {theirs.describe()}; this rank can't take that as {self.n_elements} of {mine}",
                self.peer,
            )
        if not self.program.changed:
            self.program.bank()
        self.program.changed = True  # it goes through a side buffer from now on
        received = start + self._payload_so_far()
        self.header = self.program.own_header(bytearray(start))
        self._expect(payload)
        self._take_over(received)

    def _takes(self, payload: DType) -> bool:
        """Whether what this program folds or moves can be had from `payload`."""
        if payload == MXINT8:
            return self.program.call.op is not None and wire_dtype(self.dtype) == FLOAT32
        return kind_code(payload) == kind_code(self.dtype)

    def _payload_so_far(self) -> bytes:
        if self._view is not None:
            return bytes(self._view[HEADER_BYTES : self._got])
        assert self._target is not None
        return self._target.view(np.uint8)[: self._got - HEADER_BYTES].tobytes()

    def _take_over(self, received: bytes) -> None:
        """Put what was read under a wrong expectation where it belongs; the rest is the next message's."""
        mine, rest = received[: self._size], received[self._size :]
        self._got = len(mine)
        if self._view is not None:
            self._view[: len(mine)] = mine
        else:
            assert self._target is not None
            self._target.view(np.uint8)[: len(mine) - HEADER_BYTES] = np.frombuffer(mine[HEADER_BYTES:], np.uint8)
        self.pipe.push_back(rest)
        self._checked = True
        if self._got == self._size:
            self._complete()

    def convert(self, b: Buffers) -> None:
        """Bring a payload of another dtype into place, rounding to nearest even where it must."""
        if not self.program.narrow:
            cast(self.spot.array(b).view(self.dtype), self.side_array())

    def side_array(self) -> Array:
        """The payload of another dtype, where it landed."""
        assert self.side is not None
        payload = self.payload_dtype()
        return np.frombuffer(self.side, payload, nbytes_of(self.n_elements, payload) // payload.itemsize, HEADER_BYTES)

    def bound_convert(self) -> Callable[[], Any] | None:
        """`convert` for a target in scratch, bound once and for all; None where nothing has to be converted."""
        assert self.spot.fixed is not None
        return None if self.side is None or self.program.narrow else bound_cast(self.spot.fixed, self.side_array())
