"""What one rank of a 2-D group runs: the layers of a rank with exact compute, over a KV cache that several share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.context.cache import ContextCache, PositionShard
from hostring.integrations.llm.context.merging import Merging
from hostring.integrations.llm.context.plan import BLOCK_POSITIONS, ContextPlan
from hostring.integrations.llm.model.exact_forward import ExactForward, Stream
from hostring.integrations.llm.model.local_model import LocalModel, Rows
from hostring.integrations.llm.model.shards import Boundaries, Ends


@dataclass
class ContextForward:
    """See `Forward`.

    Attributes:
        inner: this rank's layers. Its caches are not used, nor its short way for one row, which reads them.
        plan: the grid of ranks. merging: the exchange among the ranks that hold the same heads.
    """

    inner: ExactForward
    plan: ContextPlan
    merging: Merging
    compute: str = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)
    compiled: bool = field(init=False)
    decoder: Any = field(init=False)
    boundaries: Boundaries = field(init=False)
    ends: Ends = field(init=False)

    def __post_init__(self) -> None:
        inner = self.inner
        inner.one_row = None
        self.compute, self.dtype, self.device, self.compiled = inner.compute, inner.dtype, inner.device, inner.compiled
        self.decoder, self.ends = inner.decoder, inner.ends
        self._share(self.merging.comm)

    def _share(self, group: Comm) -> None:
        """Merge in `group`, and close it when this is gone."""
        self.merging.comm = group
        merged = (self.merging.elements,) * self.decoder.config.num_hidden_layers
        self.boundaries = Boundaries(merging=group, merged=merged)
        self._close_group = weakref.finalize(self, group.close)
        self._close_group.atexit = False  # the process ends all its links then

    @property
    def nbytes_held(self) -> int:
        """See `Forward`."""
        return self.inner.nbytes_held

    @property
    def reduced_elements(self) -> list[int]:
        """See `Forward`."""
        return self.inner.reduced_elements

    def move_to(self, comm: Comm) -> None:
        """See `Forward`. A collective of the new group."""
        self._close_group()
        self.inner.move_to(comm)
        self._share(context_group(comm, self.plan))

    def new_cache(self, batch: int, max_seq: int) -> ContextCache:
        """See `Forward`: this rank's shard of it.

        Raises:
            ValueError: more than one sequence.
        """
        if batch != 1:
            raise ValueError(f"a KV cache that ranks share holds one sequence, not {batch}; make one for each")
        shard = PositionShard(self.merging.comm.rank, self.plan.context, BLOCK_POSITIONS)
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        return ContextCache(self.decoder.config, shard, max_seq, dtype, self.device, self.merging)

    def step(self, tokens: Tensor, cache: ContextCache, stream: Stream | None = None) -> Tensor:
        """See `LocalModel.step`."""
        return self.inner.step(tokens, cache, stream)

    def step_rows(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Tensor:
        """See `LocalModel.step_rows`. Parts are exchanged once for each sequence."""
        return self.inner.step_rows(rows, stream, every)


def context_group(comm: Comm, plan: ContextPlan) -> Comm:
    """The ranks that hold the same heads as this one. A collective.

    Raises:
        ValueError: a rank was given another plan; on every rank.
    """
    told = comm.gather_bytes(repr(plan).encode())
    odd = [rank for rank, one in enumerate(told) if one != told[0]]
    if odd:
        raise ValueError(f"rank {odd[0]} has another grid of ranks than rank 0; give all ranks the same --plan")
    group = comm.split(comm.rank // plan.context)
    assert group is not None
    return group


def share_context(part: LocalModel, plan: ContextPlan) -> LocalModel:
    """`part`, whose ranks share their KV caches. A collective.

    Args:
        part: with exact compute, and shares of `plan`.
    """
    assert isinstance(part.forward, ExactForward)
    group, shares = context_group(part.comm, plan), part.plan
    first = part.comm.rank - group.rank
    columns = [shares.o_columns(part.config, first + rank) for rank in range(plan.context)]
    begin = columns[0].start
    counted = tuple(range(own.start - begin, own.stop - begin) for own in columns)
    part.forward = ContextForward(part.forward, plan, Merging(group, counted, part.config.head_dim, part.reducer.clock))
    return part
