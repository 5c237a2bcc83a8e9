"""What the messages of one program share: its call and dtype, headers, memory beside the scratch, and counts of runs.

Lower than `receiving`, `sending` and `program`: a message that meets another dtype than expected changes the binding,
and the program looks there after the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from hostring.arrays.dtypes import Array, DType, nbytes_of
from hostring.engine.frames import HEADER_BYTES, SEQ, SEQ_OFFSET, Call
from hostring.topologies.schedule import Recv, Round, Schedule

ALIGN: Final = 64
SideKey: TypeAlias = "tuple[str, int]"
Traffic: TypeAlias = "dict[int, tuple[int, int, int, int]]"
"""By peer: messages and payload bytes sent, messages and payload bytes received."""


def flat(array: Array) -> Array:
    """`array` as a flat, base-class view of the same memory: a subclass such as `np.matrix` slices in its own way.

    Raises:
        TypeError: its elements are not contiguous.
    """
    if not array.flags.c_contiguous:
        raise TypeError(f"an array of shape {array.shape} and strides {array.strides} is not contiguous; pass a copy")
    return array.view(np.ndarray).reshape(-1)


@dataclass
class Buffers:
    """The caller's arrays for one run, in the program's (carrier) dtype. `raw` holds contributions in fewer bits."""

    data: Array
    out: Array
    raw: Array | None = None


@dataclass(slots=True)
class Spot:
    """A piece of a buffer: fixed over scratch, or cut from the caller's arrays. `whole` means all of that array."""

    fixed: Array | None
    is_out: bool
    start: int
    stop: int
    whole: bool

    def array(self, b: Buffers) -> Array:
        if self.fixed is not None:
            return self.fixed
        base = b.out if self.is_out else b.data
        return base if self.whole else base[self.start : self.stop]

    def buffer(self, b: Buffers) -> Array:
        """The same as something that a socket takes: complex numbers as pairs."""
        array = self.array(b)
        return array.view(array.real.dtype) if array.dtype.kind == "c" else array


class SideMemory:
    """Memory for payloads of another dtype than their program's.

    All programs of a group share it: one runs at a time.
    """

    def __init__(self) -> None:
        self.block = bytearray()

    def reserve(self, nbytes: int, growth: int = 1) -> bytearray:
        """The block, of at least `nbytes`.

        It grows by the factor `growth` at least: older programs keep a block that is replaced alive.
        """
        if nbytes > len(self.block):
            self.block = bytearray(max(nbytes, growth * len(self.block)))
        return self.block


class _Counted(Protocol):
    @property
    def payload_nbytes(self) -> int: ...


class Binding:
    """See the module.

    Args:
        sixteen_bit: contributions are 16-bit floats, and are folded as such.
        sides: for payloads of another dtype. results: for results that are rounded before they leave, if any are.

    Attributes:
        headers: of all messages, to be numbered before each run. seq: the number of the present run.
        runs: completed runs since traffic was last put aside.
        changed: a peer brought another dtype than before in this run.
        sent, received: (peer, message) of all messages.
    """

    def __init__(
        self,
        schedule: Schedule,
        call: Call,
        dtype: DType,
        sixteen_bit: bool,
        sides: SideMemory,
        results: SideMemory | None,
    ) -> None:
        self.call, self.dtype, self.sixteen_bit = call, dtype, sixteen_bit
        self.headers: list[bytearray] = []
        self.seq = self.runs = 0
        self.changed = False
        self.sent: list[tuple[int, _Counted]] = []
        self.received: list[tuple[int, _Counted]] = []
        self.results, self.results_nbytes = results, 0
        self._rounds, self._sides = schedule.rounds, sides
        self._sides_nbytes = 0
        self._sides_at: dict[SideKey, tuple[int, int]] = {}
        self._shared: dict[bytes, bytearray] = {}
        self._banked: dict[int, tuple[int, ...]] = {}

    def own_header(self, header: bytearray) -> bytearray:
        """A header that is numbered before each run. Equal headers are one object."""
        SEQ.pack_into(header, SEQ_OFFSET, 0)
        key = bytes(header)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = header
            self.headers.append(header)
            SEQ.pack_into(header, SEQ_OFFSET, self.seq)
        return shared

    def side(self, key: SideKey, n_elements: int, payload: DType) -> tuple[bytearray, int]:
        """Where a `payload` of another dtype lands, header first: memory and an offset."""
        if self._sides_at.get(key, (0, 0))[1] < HEADER_BYTES + nbytes_of(n_elements, payload):
            self.lay_out_sides(payload, lambda recv: True)
            self._sides.reserve(self._sides_nbytes, 2)
        return self._sides.reserve(self._sides_nbytes), self._sides_at[key][0]

    def lay_out_sides(self, payload: DType, wanted: Callable[[Recv], bool]) -> None:
        """Give each receive that is `wanted` a place for its message in the dtype `payload`."""
        sizes: dict[SideKey, int] = {}
        for round_ in self._rounds:
            for recv, key in zip(round_.recvs, side_keys(round_), strict=True):
                if wanted(recv):
                    sizes[key] = max(sizes.get(key, 0), HEADER_BYTES + nbytes_of(len(recv.into), payload))
        for key, size in sizes.items():
            self._sides_at[key] = self._sides_nbytes, size
            self._sides_nbytes += -(-size // ALIGN) * ALIGN

    def change(self) -> None:
        """A peer brings another dtype. What was moved until now is put aside, because later runs move other amounts."""
        if not self.changed:
            self._bank()
        self.changed = True

    def moved(self) -> dict[int, tuple[int, ...]]:
        """What was moved since this was last asked, in the form of `Traffic`."""
        self._bank()
        moved, self._banked = self._banked, {}
        return moved

    def _bank(self) -> None:
        runs, self.runs = self.runs, 0
        if runs:
            for peer, row in self.traffic().items():
                before = self._banked.get(peer, (0, 0, 0, 0))
                self._banked[peer] = tuple(b + runs * r for b, r in zip(before, row, strict=True))

    def traffic(self) -> Traffic:
        """What one run moves."""
        total: dict[int, list[int]] = {}
        for at, messages in ((0, self.sent), (2, self.received)):
            for peer, message in messages:
                row = total.setdefault(peer, [0, 0, 0, 0])
                row[at] += 1
                row[at + 1] += message.payload_nbytes
        return {peer: (a, b, c, d) for peer, (a, b, c, d) in total.items()}


def side_keys(round_: Round) -> Iterator[SideKey]:
    """For each receive of a round, the key of its side memory. Receives with the same key share it.

    Receives into the same place of scratch can share: as long as one of them is in use, the scratch is too. Results are
    brought into place as soon as they are there, so those of different rounds can share.
    """
    n_results = 0
    for recv in round_.recvs:
        yield ("a result", n_results) if recv.result else (recv.into.buffer, recv.into.start)
        n_results += recv.result
