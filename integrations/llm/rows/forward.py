"""Steps of ranks that hold the whole model each, and divide the rows of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.cache import KVCache, check_fit
from hostring.integrations.llm.model.expected import Expected
from hostring.integrations.llm.model.local_model import LocalModel, Numbers, Rows
from hostring.integrations.llm.model.shards import WHOLE, Boundaries, Ends
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.rows.cache import DividedRows
from hostring.integrations.llm.rows.plan import RowPlan

Stream = npt.NDArray[np.float32]
HEAD_RANK = 0


@dataclass
class RowsForward:
    """See `Forward`.

    Several rows of a sequence are divided: each layer's keys and values are exchanged by one all-gather, and the last
    rank has the logits. A single row is computed by every rank for itself, so that all caches stay whole; the head's
    logits count. Nothing is added up over the ranks.

    Attributes:
        inner: the whole model, on this rank alone, computed exact.
        comm: the group. plan: who computes which rows. reducer: of the group, with the clock and audit of `inner`.
        rows, local_rows: computed here since the last restart: of divided chunks, and by every rank for itself.
    """

    inner: LocalModel
    comm: Comm
    plan: RowPlan
    reducer: HiddenReducer
    compute: str = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)
    compiled: bool = field(init=False)
    decoder: Any = field(init=False)
    boundaries: Boundaries = field(default_factory=Boundaries, init=False)
    ends: Ends = field(default=WHOLE, init=False)
    reduced_elements: list[int] = field(default_factory=list, init=False)
    rows: int = field(default=0, init=False)
    local_rows: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        forward = self.inner.forward
        self.compute, self.dtype, self.device = forward.compute, forward.dtype, forward.device
        self.compiled, self.decoder = forward.compiled, forward.decoder

    @property
    def nbytes_held(self) -> int:
        """See `Forward`."""
        return self.inner.forward.nbytes_held

    def move_to(self, comm: Comm) -> None:
        """See `Forward`."""
        self.comm = self.reducer.comm = comm

    def new_cache(self, batch: int, max_seq: int) -> KVCache:
        """See `Forward`.

        Raises:
            ValueError: more than one sequence.
        """
        if batch != 1:
            raise ValueError(f"a cache of divided rows holds one sequence, not {batch}; make one for each")
        found: KVCache = self.inner.forward.new_cache(1, max_seq)
        return found

    def step(self, tokens: Tensor, cache: KVCache, stream: Stream | None = None) -> Tensor:
        """See `Forward.step`. Ranks that don't have the last row return logits of shape (1, 0)."""
        check_fit(cache, tokens.numel())
        rank, counts = self.comm.rank, self.plan.counts(tokens.numel())
        if not counts:
            self.local_rows += tokens.numel()
            found = self.inner.forward.step(tokens, cache)
            return found if rank == HEAD_RANK else torch.empty(1, 0)
        part = DividedRows(cache, self.comm, counts, self.reducer.clock)
        found = self.inner.forward.step(torch.split(tokens, list(counts), 1)[rank], part)
        self.rows += counts[rank]
        return found if rank == self.comm.world_size - 1 else torch.empty(1, 0)

    def step_rows(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Tensor:
        """See `Forward.step_rows`. Logits that another rank has are minus infinity here.

        Raises:
            ValueError: the logits of every row are asked for.
        """
        if every:
            raise ValueError("with --plan rows a step gives the logits of last rows only; don't speculate")
        found = torch.full((len(rows), self.inner.config.vocab_size), -torch.inf, device=self.device)
        for n, (cache, ids) in enumerate(rows):
            if (logits := self.step(torch.tensor([list(ids)]), cache)).numel():
                found[n] = logits[0]
        return found

    def decide(self, mine: Numbers, choose: Callable[[Numbers], Numbers], n: int) -> Numbers:
        """See `Deciding.decide`."""
        found: Numbers = self.comm.decide(mine, choose, HEAD_RANK, n)
        return found

    def expected(self, decided: tuple[int, int]) -> Expected:
        """See `Deciding.expected`."""
        config = self.inner.config
        width = 2 * config.num_key_value_heads * config.head_dim
        return RowsTraffic(self.comm, self.plan, config.num_hidden_layers, width, decided)

    def restart(self) -> None:
        """See `Deciding.restart`."""
        self.rows = self.local_rows = 0

    def figures(self) -> dict[str, Any]:
        """See `Deciding.figures`."""
        return {"role": "rows", "rows": self.rows, "local_rows": self.local_rows}


@dataclass(frozen=True)
class RowsTraffic:
    """What steps with divided rows cost this rank; see `Traffic`. width: numbers of keys and values of a row."""

    comm: Comm
    plan: RowPlan
    n_layers: int
    width: int
    decided: tuple[int, int]

    def collectives(self, passes: Sequence[int]) -> int:
        """An all-gather for each layer of a divided pass, and one decision."""
        return self.n_layers * sum(bool(self.plan.counts(n)) for n in passes) + 1

    def nbytes(self, passes: Sequence[int]) -> int:
        """Payload that this rank sends."""
        found = self.comm.expected_payload("decide", self.decided, "int32", root=HEAD_RANK)
        for counts in filter(None, map(self.plan.counts, passes)):
            shares = [self.width * n for n in counts]
            found += self.n_layers * self.comm.expected_payload("all_gather", shares, "float32")
        return int(found)
