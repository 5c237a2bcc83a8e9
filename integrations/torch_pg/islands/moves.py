"""Data movement over islands: broadcast, all_gather and all_to_all. Each byte goes to another island once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

import hostring
from hostring.integrations.torch_pg.islands.inside import Inside
from hostring.integrations.torch_pg.islands.lanes import Lanes
from hostring.integrations.torch_pg.islands.layout import Layout
from hostring.integrations.torch_pg.islands.library import Finish

Tensor = torch.Tensor
Counts = Sequence[int] | None
Matrix = list[list[int]]


class Moves:
    """One rank's side of what is only moved."""

    def __init__(self, comm: hostring.Comm, layout: Layout, inside: Inside, lanes: Lanes) -> None:
        self._comm, self._layout, self._inside, self._lanes = comm, layout, inside, lanes

    def broadcast(self, x: Tensor, root: int, limit: float) -> None:
        """Inside the root's island first; then each of its ranks gives its share to one rank of each other island."""
        inside, island = self._inside, self._layout.island_of(root)
        flat = inside.taken(x)
        at_root = root in inside.ranks

        def first(piece: Tensor, share: Tensor) -> Finish:
            if not at_root:
                return _nothing
            call = inside.library(piece).broadcast(piece, inside.ranks.index(root))

            def finish(check: Callable[[], None], timeout: float) -> None:
                call(check, timeout)
                share.copy_(piece.view(len(inside.ranks), -1)[inside.member])

            return finish

        def exchange(share: Tensor) -> None:
            self._lanes.each(share, lambda comm, piece: comm.broadcast(piece, island, timeout=limit))

        inside.through(flat, self._layout.units, first, exchange, limit, hand_out=not at_root)
        if self._comm.rank != root:
            inside.given_back(flat, x)

    def all_gather(self, x: Tensor, counts: Counts, out: Any, limit: float) -> Tensor:
        """Between islands first, so that each lane carries its own rank's part; then inside."""
        n, rank = self._comm.world_size, self._comm.rank
        flat = self._inside.taken(x)
        width = math.prod(x.shape[1:]) if counts is not None else 1
        sizes = [flat.numel()] * n if counts is None else [count * width for count in counts]
        mine = flat.new_zeros(max(sizes))
        mine[: flat.numel()] = flat
        with self._lanes.only() as lane:
            of_lane = lane.all_gather(mine, timeout=limit)
        everything = of_lane.new_empty(of_lane.numel() * len(self._inside.ranks))
        self._inside.finish(self._inside.library(flat).all_gather(everything, of_lane.reshape(-1)), limit)
        parts: list[Tensor] = [mine] * n
        for source, part in zip(self._layout.by_member(), everything.view(n, -1), strict=True):
            parts[source] = part[: sizes[source]]
        parts[rank] = flat
        result = torch.cat(parts)
        if out is None:
            shape = (n, *x.shape) if counts is None else (sum(counts), *x.shape[1:])
            return result.to(x.device).view(shape)
        out.data.copy_(result.view(out.shape))
        given: Tensor = out
        return given

    # ------------------------------------------------------------------ all_to_all

    def agreed_counts(self, x: Tensor, send_counts: Counts, recv_counts: Counts, limit: float) -> Matrix:
        """The rows that each rank sends to each: [from][to]."""
        n, rank = self._comm.world_size, self._comm.rank
        if send_counts is None and recv_counts is None:
            if x.shape[0] % n:
                raise ValueError(f"all_to_all: {x.shape[0]} rows don't divide evenly over {n} ranks; give send_counts")
            return [[x.shape[0] // n] * n] * n
        mine = np.array([x.shape[0] // n] * n if send_counts is None else send_counts, np.int64)
        matrix: Matrix = self._comm.all_gather(mine, timeout=limit).tolist()
        received = [row[rank] for row in matrix]
        if recv_counts is not None and received != list(recv_counts):
            what = f"all_to_all: rank {rank} expects {list(recv_counts)} rows, the others send it {received}"
            raise self._comm.session.fail(hostring.CollectiveMismatch(what, rank))
        return matrix

    def all_to_all(self, x: Tensor, counts: Matrix, out: Any, limit: float) -> Tensor:
        """Inside first: to each rank, what its lane carries. Then along the lanes, as one part for each island."""
        islands, mine = self._layout.islands, self._inside.ranks
        rank, width = self._comm.rank, math.prod(x.shape[1:])
        parts = torch.split(self._inside.taken(x), [rows * width for rows in counts[rank]])

        def along_lane(source: int, member: int) -> list[int]:
            return [counts[source][ranks[member]] * width for ranks in islands]

        sent = torch.cat([parts[target] for target in self._layout.by_member()])
        from_each = [along_lane(source, self._inside.member) for source in mine]
        got = sent.new_empty(sum(map(sum, from_each)))
        to_each = [sum(along_lane(rank, member)) for member in range(len(mine))]
        arrived = [sum(sizes) for sizes in from_each]
        call = self._inside.library(sent).all_to_all(got, sent, arrived, to_each)
        self._inside.finish(call, limit)
        by_source = zip(torch.split(got, arrived), from_each, strict=True)
        pieces = [torch.split(part, sizes) for part, sizes in by_source]
        onward = [torch.cat([of_source[i] for of_source in pieces]) for i in range(len(islands))]
        arriving = [[counts[source][rank] * width for source in ranks] for ranks in islands]
        with self._lanes.only() as lane:
            received = lane.all_to_all(
                torch.cat(onward), send_counts=[part.numel() for part in onward],
                recv_counts=[sum(sizes) for sizes in arriving], timeout=limit,
            )  # fmt: skip
        by_rank = dict(zip(chain(*islands), torch.split(received, list(chain(*arriving))), strict=True))
        return self._placed(torch.cat([by_rank[source] for source in sorted(by_rank)]), x, out)

    def _placed(self, result: Tensor, x: Tensor, out: Any) -> Tensor:
        if out is None:
            return result.to(x.device).view(-1, *x.shape[1:])
        out.data.copy_(result.view(out.shape))
        given: Tensor = out
        return given


def _nothing(check: Callable[[], None], timeout: float) -> None:
    """What other islands wait for before a broadcast reaches them: nothing."""
