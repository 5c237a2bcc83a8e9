"""Inside one island: its libraries, and the pipeline that takes a buffer through both levels in segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import hostring
from hostring.integrations.torch_pg.islands.faults import Faults, in_whole_group
from hostring.integrations.torch_pg.islands.library import Finish, Library

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
MAX_SEGMENT_ELEMENTS = 1 << 20  # 4 MB of float32: long enough for a library's full rate, short enough to overlap


@dataclass(frozen=True)
class Inside:
    """This rank's island.

    Attributes:
        ranks: in the whole group. member: this rank's place among them.
        libraries: by type of device. The one for "cpu" also serves devices that none is for: over a copy on the host.
        faults: judges failures.
    """

    ranks: tuple[int, ...]
    member: int
    libraries: Mapping[str, Library]
    faults: Faults

    def library(self, x: Tensor) -> Library:
        """The one that serves the device of `x`."""
        return self.libraries.get(x.device.type) or self.libraries["cpu"]

    def finish(self, call: Finish, limit: float) -> None:
        """Wait for a call of a library, at most `limit` seconds."""
        try:
            call(self.faults.check, limit)
        except hostring.HostringError as exc:
            raise in_whole_group(exc, dict(enumerate(self.ranks)), "inside the island") from exc

    def taken(self, x: Tensor, *, folded: bool = False) -> Tensor:
        """`x` as a flat tensor that the library takes: in its own memory if that will do, else a copy.

        Args:
            folded: it will be reduced; where the library doesn't sum 16-bit floats well, they are widened.
        """
        library, plain = self.library(x), x.detach().resolve_conj().resolve_neg()
        if library.devices and plain.device.type not in library.devices:
            plain = plain.cpu()
        if folded and plain.dtype in HALVES and not library.sums_halves:
            plain = plain.float()
        return plain.reshape(-1)

    def given_back(self, flat: Tensor, x: Tensor) -> None:
        """Copy a result into `x`, unless `flat` is the memory of `x`."""
        if flat.data_ptr() != x.data_ptr() or flat.dtype != x.dtype or flat.device != x.device:
            x.data.copy_(flat.view(x.shape))

    def through(
        self, flat: Tensor, units: int, first: Callable[[Tensor, Tensor], Finish], exchange: Callable[[Tensor], None],
        limit: float, *, hand_out: bool = True,
    ) -> None:  # fmt: skip
        """Take `flat` through both levels, in place, and in segments: the library works on two while one is exchanged.

        Args:
            units: each segment is divided into a multiple of so many elements.
            first: starts the library's part before the exchange: fills this rank's share (second) of a segment (first).
            exchange: with the other islands, in place, of this rank's share.
            hand_out: whether this island's ranks need each other's shares afterwards.
        """
        pieces = segments(flat, units)
        shares = [piece.new_empty(piece.numel() // len(self.ranks)) for piece in pieces[:1]]
        begun, handed_out = [first(pieces[0], shares[0])] if pieces else [], []
        for k, piece in enumerate(pieces):
            if k + 1 < len(pieces):
                shares.append(pieces[k + 1].new_empty(pieces[k + 1].numel() // len(self.ranks)))
                begun.append(first(pieces[k + 1], shares[k + 1]))
            self.finish(begun[k], limit)
            exchange(shares[k])
            if hand_out:
                handed_out.append(self.library(piece).all_gather(piece, shares[k]))
        for call in handed_out:
            self.finish(call, limit)
        if pieces:
            tail = flat[(len(pieces) - 1) * pieces[0].numel() :]
            if tail.numel() < pieces[-1].numel():  # the last segment is a longer copy
                tail.copy_(pieces[-1][: tail.numel()])

    def abort(self, reason: str) -> None:
        """End the calls that this rank is in."""
        for library in self.libraries.values():
            library.abort(reason)

    def close(self) -> None:
        for library in self.libraries.values():
            library.close()


def segments(flat: Tensor, units: int) -> list[Tensor]:
    """`flat` in pieces, each a multiple of `units` long. The last may be a longer copy, with zeros at its end."""
    length = max(units, MAX_SEGMENT_ELEMENTS // units * units)
    pieces = list(torch.split(flat, length)) if flat.numel() else []
    if pieces and (missing := -pieces[-1].numel() % units):
        pieces[-1] = torch.cat([pieces[-1], pieces[-1].new_zeros(missing)])
    return pieces
