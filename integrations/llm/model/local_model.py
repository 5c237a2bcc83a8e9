"""What one rank runs, whichever way it computes: its part of a model, in a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.expected import Expected
from hostring.integrations.llm.model.shards import Boundaries, Ends, ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer

Rows = Sequence[tuple[Any, Sequence[int]]]
Numbers = npt.NDArray[np.int32]


class Deciding(Protocol):
    """How tokens are chosen where one rank at a time has all logits: without a collective."""

    def decide(self, mine: Numbers, choose: Callable[[Numbers], Numbers], n: int) -> Numbers:
        """See `Comm.decide`: what `choose` makes of the candidates of the rank that computed, on every rank."""

    def expected(self, decided: tuple[int, int]) -> Expected:
        """What this costs when so many numbers are told for a choice, and so many come of it."""

    def restart(self) -> None:
        """Count from 0."""

    def figures(self) -> dict[str, Any]:
        """What was counted, for JSON."""


class Forward(Protocol):
    """How a rank computes: `ExactForward` with dequantised weights, `PackedForward` with the file's own blocks.

    Attributes:
        compute: "exact" or "packed".
        dtype: of what this rank computes in; packed, of what enters the reductions. device: where it computes.
        compiled: torch has compiled the layers.
        ends: of the decoder that are here. boundaries: what crosses the borders of its stage.
        decoder: the local weights.
    """

    compute: str
    dtype: torch.dtype
    device: torch.device
    compiled: bool
    ends: Ends
    boundaries: Boundaries
    decoder: Any

    @property
    def nbytes_held(self) -> int:
        """Bytes of weights that this rank holds, mapped or copied."""

    @property
    def reduced_elements(self) -> list[int]:
        """Elements of each reduction of one row's step, in order."""

    def move_to(self, comm: Comm) -> None:
        """See `LocalModel.move_to`."""

    def new_cache(self, batch: int, max_seq: int) -> Any:
        """An empty `Cache`."""

    def step(self, tokens: Tensor, cache: Any, stream: npt.NDArray[np.float32] | None = None) -> Tensor:
        """See `LocalModel.step`.

        Args:
            stream: where this rank holds no embedding, the residual stream before its layers, shape (seq, hidden).

        Returns:
            where this rank holds no head, the stream after its layers, shape (seq, hidden), valid until the next step.
        """

    def step_rows(self, rows: Rows, stream: npt.NDArray[np.float32] | None = None, every: bool = False) -> Tensor:
        """See `LocalModel.step_rows`, and `step` for the stream: of all rows, in the order of `rows`. The sequence with
        the most tokens comes first."""


@dataclass
class LocalModel:
    """What one rank runs.

    Attributes:
        forward: the weights that are here, and how they are computed with.
        config: the whole model. plan: who holds what.
        reducer: where partial sums are added up.
        max_seq: positions that a cache holds.
        deciding: how tokens are chosen; None where all ranks choose together, by `Comm.decide`.
    """

    forward: Forward
    config: ModelConfig
    plan: ShardPlan
    comm: Comm
    reducer: HiddenReducer
    max_seq: int
    deciding: Deciding | None = None

    @property
    def decoder(self) -> Any:
        """The local weights, for what looks inside: a `Decoder` of torch, or a `PackedDecoder`."""
        return self.forward.decoder

    @property
    def reducing(self) -> Comm:
        """The group that adds up: of this rank's stage in a pipeline, else the one of all ranks."""
        return cast(Comm, self.reducer.comm)

    def counts(self) -> dict[str, Any]:
        """What this rank's groups have counted so far, all together, with ranks as in `comm`; see
        `Counters.snapshot`. "boundary_sent" is in bytes, headers included."""
        found, crossed = self.comm.counters.snapshot(), self.forward.boundaries
        found["boundary_sent"] = crossed.nbytes_sent
        if crossed.before is not None:
            found["seconds"]["wait"] += crossed.waited
            found["waited_for"][crossed.before] = found["waited_for"].get(crossed.before, 0.0) + crossed.waited
        for group in (self.reducing, crossed.merging):
            # Neither the group itself, nor what stands in for it.
            if group is not None and group.counters is not self.comm.counters:
                first = self.comm.rank - group.rank  # its ranks are neighbours
                found = _added(found, group.counters.snapshot(), first)
        return found

    def decide(self, mine: Numbers, choose: Callable[[Numbers], Numbers], root: int, n: int) -> Numbers:
        """Choose a token; see `Comm.decide`. Where one rank at a time has all logits, that is not `root`'s choice."""
        if self.deciding is not None:
            return self.deciding.decide(mine, choose, n)
        found: Numbers = self.comm.decide(mine, choose, root, n)
        return found

    def new_cache(self, batch: int = 1) -> Any:
        """An empty `Cache` for the heads that live here. Packed, `batch` is 1."""
        return self.forward.new_cache(batch, self.max_seq)

    def move_to(self, comm: Comm) -> None:
        """Go on in a rebuilt group, with the weights that are here.

        Raises:
            ValueError: this rank is another one there, or there are more or fewer: it would need other slices.
        """
        old = self.comm
        if (comm.rank, comm.world_size) != (old.rank, old.world_size):
            was, now = f"rank {old.rank} of {old.world_size}", f"rank {comm.rank} of {comm.world_size}"
            raise ValueError(f"this part of the model is that of {was}, the group makes this {now}; load it again")
        self.comm = comm
        self.forward.move_to(comm)

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        """Feed tokens of one sequence, shape (1, seq). A collective.

        Returns:
            this rank's logits of the last one, shape (1, local vocabulary), f32; valid until the next step.

        Raises:
            ValueError: they don't fit the cache. Nothing was computed then, on any rank.
        """
        clock = self.reducer.clock
        clock.start()
        logits = self.forward.step(tokens, cache)
        clock.stop()
        return logits

    def step_rows(self, rows: Rows, every: bool = False) -> Tensor:
        """Feed tokens of several sequences in one step, such as a chunk of one prompt and the last tokens of others.

        A collective: all ranks call it with the same tokens in the same order, each with its own caches. Every rank
        multiplies all rows at once, and they are reduced together, twice per layer. With
        `same_bits`, the logits of a sequence have the same bits whatever stands beside it. Otherwise the last bits may
        differ: packed ranks take another way for many rows, and torch's kernels add in another order for another
        number of rows.

        Args:
            rows: (cache, token ids) of each sequence, every cache once, one id or more of each.
            every: the logits of all tokens are wanted, not only those of each sequence's last one.

        Returns:
            this rank's logits of each sequence's last token, shape (sequences, local vocabulary), f32, in the order of
            `rows`; of all tokens, shape (tokens, local vocabulary), with `every`; valid until the next step.

        Raises:
            ValueError: there are no rows, a sequence has no token, a cache stands there twice, or tokens don't fit.
                Nothing was computed then, on any rank, and no cache has changed.
        """
        check_rows(rows)
        # The longest first, on all ranks: packed ranks keep their graphs by shape, wherever a chunk stood.
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n][1]))
        clock = self.reducer.clock
        clock.start()
        logits = self.forward.step_rows([rows[n] for n in order], every=every)
        clock.stop()
        if order == sorted(order):
            return logits
        parts = torch.split(logits, [len(rows[n][1]) if every else 1 for n in order])
        return torch.cat([parts[order.index(n)] for n in range(len(rows))])


def _added(whole: dict[str, Any], stage: dict[str, Any], first: int) -> dict[str, Any]:
    """`whole` and what a smaller group has counted whose rank 0 is rank `first` of `whole`."""
    for name in ("payload_sent", "payload_received", "header_sent"):
        whole[name] += stage[name]
    for name, by in (("calls", 0), ("seconds", 0), ("waited_for", first)):
        for key, count in stage[name].items():
            own = key + by if by else key
            whole[name][own] = whole[name].get(own, 0) + count
    return whole


def check_rows(rows: Rows) -> None:
    """Raise a ValueError unless a step can take these."""
    if not rows:
        raise ValueError("a step needs the tokens of at least one sequence")
    if len({id(cache) for cache, _ in rows}) < len(rows):
        raise ValueError("a cache stands in a step twice; give all new tokens of a sequence at once")
    for number, (cache, ids) in enumerate(rows):
        if not len(ids):
            raise ValueError(f"sequence {number} of the step has no token")
        check_fit(cache, len(ids))
