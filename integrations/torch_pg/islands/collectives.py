"""The collectives of a group with islands: inside by the island's library, between islands by hostring.

An all_reduce is a reduce-scatter inside, an exchange of each rank's share between islands, and an all-gather inside.
Long buffers go through in segments: while hostring exchanges one, the library reduces the next and hands out the last.
All methods have the signatures of `hostring.Comm`, and the same bits on every rank. What the libraries can't reduce,
hostring folds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import hostring
from hostring.integrations.torch_pg.islands.faults import Faults
from hostring.integrations.torch_pg.islands.inside import HALVES, Inside
from hostring.integrations.torch_pg.islands.lanes import Lanes
from hostring.integrations.torch_pg.islands.layout import Layout
from hostring.integrations.torch_pg.islands.library import Finish
from hostring.integrations.torch_pg.islands.moves import Moves

Tensor = torch.Tensor
Counts = Sequence[int] | None
Seconds = float | None

REDUCED = (*HALVES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
"""Dtypes that every library reduces. The choice depends on nothing that may differ between ranks of one call."""
OPS = ("sum", "min", "max", "prod")


class Islands:
    """One rank's side of a group with islands.

    Attributes:
        layout: which ranks form islands. inside: this rank's island. lanes: its ways to the others.
        strict: whether hostring folds the contributions of all ranks.
    """

    def __init__(
        self, comm: hostring.Comm, layout: Layout, inside: Inside, lanes: Lanes, faults: Faults, *, strict: bool
    ) -> None:
        self.layout, self.inside, self.lanes, self.strict = layout, inside, lanes, strict
        self._comm, self._faults = comm, faults
        self._moves = Moves(comm, layout, inside, lanes)

    @property
    def payload_sent(self) -> int:
        """Payload bytes that this rank has sent to other islands."""
        return self.lanes.payload_sent

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, x: Tensor, op: str = "sum", *, timeout: Seconds = None) -> Tensor:
        if not self._folds(x, op):
            self._comm.all_reduce(x, op, timeout=timeout)
        else:
            self._faults.run(lambda: self._all_reduce(x, op, self._limit(timeout)))
        return x

    def all_reduce_coalesced(self, xs: Sequence[Tensor], op: str = "sum", *, timeout: Seconds = None) -> list[Tensor]:
        """One all_reduce of all. Floats of up to 32 bits are joined as float32, so their dtypes may differ."""
        tensors = list(xs)
        devices = {x.device for x in tensors}
        if len(tensors) < 2 or len(devices) > 1 or not all(self._folds(x, op) for x in tensors):
            for x in tensors:
                self.all_reduce(x, op, timeout=timeout)
            return tensors
        dtype = torch.float32 if tensors[0].dtype in HALVES else tensors[0].dtype
        joined = torch.cat([x.detach().reshape(-1).to(dtype) for x in tensors])
        self.all_reduce(joined, op, timeout=timeout)
        for x, part in zip(tensors, torch.split(joined, [x.numel() for x in tensors]), strict=True):
            x.data.copy_(part.view(x.shape))
        return tensors

    def reduce_scatter(
        self, x: Tensor, op: str = "sum", *, counts: Counts = None, out: Any = None, timeout: Seconds = None
    ) -> Tensor:
        """Parts of unequal length, or islands of several sizes, take an all_reduce: every rank exchanges all parts."""
        if not self._folds(x, op) or not x.dim():
            return _tensor(self._comm.reduce_scatter(x, op, counts=counts, out=out, timeout=timeout))
        n, rank = self._comm.world_size, self._comm.rank
        rows = [x.shape[0] // n] * n if counts is None else list(counts)
        if sum(rows) != x.shape[0]:
            raise ValueError(f"reduce_scatter: {x.shape[0]} rows don't divide into parts of {rows} rows for {n} ranks")
        out = x.new_empty((rows[rank], *x.shape[1:])) if out is None else out
        limit = self._limit(timeout)
        if self.layout.even and len(set(rows)) == 1:
            self._faults.run(lambda: self._reduce_scatter(x, op, out, limit))
        else:
            whole = x.detach().clone()
            self._faults.run(lambda: self._all_reduce(whole, op, limit))
            out.data.copy_(torch.split(whole, rows)[rank].view(out.shape))
        return _tensor(out)

    def _folds(self, x: Tensor, op: str) -> bool:
        """Whether libraries take part in reducing `x` by `op`."""
        held = any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True))
        averages = op == "avg" and x.dtype.is_floating_point
        return not self.strict and not held and x.dtype in REDUCED and (op in OPS or averages)

    def _all_reduce(self, x: Tensor, op: str, limit: float) -> None:
        flat = self.inside.taken(x, folded=True)
        folded = "sum" if op == "avg" else op

        def exchange(share: Tensor) -> None:
            self.lanes.each(share, lambda comm, piece: comm.all_reduce(piece, folded, timeout=limit))
            if op == "avg":
                share.div_(self._comm.world_size)

        def first(piece: Tensor, share: Tensor) -> Finish:
            return self.inside.library(piece).reduce_scatter(share, piece, folded)

        self.inside.through(flat, self.layout.units, first, exchange, limit)
        self.inside.given_back(flat, x)

    def _reduce_scatter(self, x: Tensor, op: str, out: Tensor, limit: float) -> None:
        flat, folded = self.inside.taken(x, folded=True), "sum" if op == "avg" else op
        rows = flat.view(self._comm.world_size, -1)[self.layout.by_member()]
        share = flat.new_empty(flat.numel() // len(self.inside.ranks))
        self.inside.finish(self.inside.library(flat).reduce_scatter(share, rows.reshape(-1), folded), limit)
        with self.lanes.only() as lane:
            mine = lane.reduce_scatter(share, folded, timeout=limit)
        if op == "avg":
            mine.div_(self._comm.world_size)
        out.data.copy_(mine.view(out.shape))

    # ------------------------------------------------------------------ data movement

    def broadcast(self, x: Tensor, root: int = 0, *, timeout: Seconds = None) -> Tensor:
        if any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape, strict=True)):
            self._comm.broadcast(x, root, timeout=timeout)
        else:
            self._faults.run(lambda: self._moves.broadcast(x, root, self._limit(timeout)))
        return x

    def all_gather(self, x: Tensor, *, counts: Counts = None, out: Any = None, timeout: Seconds = None) -> Tensor:
        if not self.layout.even:
            return _tensor(self._comm.all_gather(x, counts=counts, out=out, timeout=timeout))
        limit = self._limit(timeout)
        return _tensor(self._faults.run(lambda: self._moves.all_gather(x, counts, out, limit)))

    def all_to_all(
        self, x: Tensor, *, send_counts: Counts = None, recv_counts: Counts = None, out: Any = None,
        timeout: Seconds = None,
    ) -> Tensor:  # fmt: skip
        if not self.layout.even or not x.dim():
            given = {"send_counts": send_counts, "recv_counts": recv_counts, "out": out, "timeout": timeout}
            return _tensor(self._comm.all_to_all(x, **given))
        limit = self._limit(timeout)
        counts = self._moves.agreed_counts(x, send_counts, recv_counts, limit)
        return _tensor(self._faults.run(lambda: self._moves.all_to_all(x, counts, out, limit)))

    # ------------------------------------------------------------------ the group

    def abort(self, reason: str) -> None:
        """End the calls that this rank is in, inside its island and between islands."""
        self.lanes.abort(reason)
        self.inside.abort(reason)

    def close(self) -> None:
        """Close what is inside and between islands. Idempotent."""
        self._faults.close()
        self.lanes.close()
        self.inside.close()

    def _limit(self, timeout: Seconds) -> float:
        return self._comm.timeout if timeout is None else timeout


def _tensor(result: Any) -> Tensor:
    tensor: Tensor = result
    return tensor
