"""One rank's stage of a pipeline: receives the residual stream, runs its layers, and passes the stream on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm, HostringError, PeerLostError, Work
from hostring.integrations.llm.model.cache import check_fit
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.local_model import LocalModel, Rows
from hostring.integrations.llm.model.shards import WHOLE, Boundaries, Ends, ShardPlan
from hostring.integrations.llm.pipeline.stages import Stage, StagePlan

Stream = npt.NDArray[np.float32]
HEADER_NBYTES = 64  # of each message, see `Comm.counters`
BOUNDARY_TAG = 17  # of the messages that carry the residual stream


@dataclass
class StagedForward:
    """See `Forward`.

    A step sends one message over each boundary: the stream of its rows, shape (rows, hidden), in f32. The first rank of
    a stage sends it to the first rank of the next stage, which shares it with the other ranks of its stage.

    Attributes:
        inner: the layers of this stage, in the group of the stage's ranks.
        comm: the group of all ranks. stages: the plan.
    """

    inner: LocalModel
    comm: Comm
    stages: StagePlan
    stage: Stage = field(init=False)
    compute: str = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)
    compiled: bool = field(init=False)
    decoder: Any = field(init=False)
    boundaries: Boundaries = field(init=False)
    ends: Ends = field(default=WHOLE, init=False)  # this rank receives and sends the stream itself

    def __post_init__(self) -> None:
        forward = self.inner.forward
        self.stage = self.stages.of_rank(self.comm.rank)
        self.compute, self.dtype, self.device = forward.compute, forward.dtype, forward.device
        self.compiled, self.decoder = forward.compiled, forward.decoder
        width = self.inner.config.hidden_size
        sends = self.inner.comm.rank == 0 and not self.stage.is_last
        shares = self.inner.comm.world_size > 1 and not self.stage.is_first
        receives = self.inner.comm.rank == 0 and not self.stage.is_first
        before = self.stages.stages[self.stage.number - 1].ranks.start if receives else None
        place = self.stage.number, len(self.stages.layers)
        self.boundaries, self._width = Boundaries(width * sends, width * shares, 0, before, 0.0, *place), width
        self._sending: Work | None = None
        self._close_with_this(self.inner.comm)

    @property
    def nbytes_held(self) -> int:
        """See `Forward`."""
        return self.inner.forward.nbytes_held

    @property
    def reduced_elements(self) -> list[int]:
        """See `Forward`: inside this stage."""
        return self.inner.forward.reduced_elements

    def move_to(self, comm: Comm) -> None:
        """See `Forward`. A collective of the new group."""
        self.comm, self._sending = comm, None
        self._close_group()
        self.inner.move_to(stage_group(comm, self.stages))
        self._close_with_this(self.inner.comm)

    def _close_with_this(self, group: Comm) -> None:
        self._close_group = weakref.finalize(self, group.close)
        self._close_group.atexit = False  # the process ends all its links then

    def new_cache(self, batch: int, max_seq: int) -> Any:
        """See `Forward`: for the layers of this stage.

        Raises:
            ValueError: more than one sequence.
        """
        if batch != 1:
            raise ValueError(f"a stage's cache holds one sequence, not {batch}; make one for each")
        return self.inner.forward.new_cache(1, max_seq)

    def step(self, tokens: Tensor, cache: Any, stream: Stream | None = None) -> Tensor:
        """See `LocalModel.step`. Ranks that are not of the last stage have no rows of the vocabulary."""
        check_fit(cache, tokens.numel())  # before a stage waits for a stream that no rank will send
        received = self._receive(tokens.numel())
        with self._ranks_of_all():
            found = self.inner.forward.step(tokens, cache, received)
        return self._pass_on(found, 1)

    def step_rows(self, rows: Rows, stream: Stream | None = None, every: bool = False) -> Tensor:
        """See `LocalModel.step_rows`. The rows of all sequences cross a boundary in one message."""
        n_tokens = sum(len(ids) for _, ids in rows)
        received = self._receive(n_tokens)
        with self._ranks_of_all():
            found = self.inner.forward.step_rows(rows, received, every)
        return self._pass_on(found, n_tokens if every else len(rows))

    def _pass_on(self, found: Tensor, n_logits: int) -> Tensor:
        """The logits, of the last stage; the others send their stream, and have none."""
        if self.stage.is_last:
            return found
        self._send(found)
        return torch.empty(n_logits, 0)

    def _send(self, stream: Tensor) -> None:
        if self.inner.comm.rank == 0:
            clock = self.inner.reducer.clock
            clock.stop()
            array = stream.numpy() if stream.is_cpu else stream
            to, background = self.stage.ranks.stop, self.boundaries.in_background
            self._sending = self.comm.send(array, to, BOUNDARY_TAG, async_op=background)
            self.boundaries.nbytes_sent += 4 * stream.numel() + HEADER_NBYTES
            clock.start()

    def _receive(self, n_rows: int) -> Stream | None:
        """What the stage before sent, shape (rows, hidden); None at the first stage. What this rank sent last is gone
        then: the step computes in the same memory."""
        clock = self.inner.reducer.clock
        clock.stop()
        received = None if self.stage.is_first else self._received(n_rows)
        if self._sending is not None:
            self._sending.wait()
        clock.start()
        return received

    def _received(self, n_rows: int) -> Stream:
        group = self.inner.comm
        stream = np.empty((n_rows, self._width), np.float32)
        if group.rank == 0:
            begun = perf_counter()
            self.comm.recv(stream, self.boundaries.before, BOUNDARY_TAG)
            self.boundaries.waited += perf_counter() - begun
        if group.world_size > 1:
            with self._ranks_of_all():
                group.broadcast(stream)
        return stream

    @contextmanager
    def _ranks_of_all(self) -> Iterator[None]:
        """Errors of the stage's own group name a rank by its number among all ranks."""
        try:
            yield
        except HostringError as exc:
            first = self.stage.ranks.start
            if exc.rank is None or first == 0:
                raise
            rank, where = first + exc.rank, f"in the group of stage {self.stage.number}, whose rank 0 is rank {first}"
            if isinstance(exc, PeerLostError):
                raise PeerLostError(rank, f"{exc.reason} ({where})") from exc
            raise type(exc)(f"{exc} ({where})", rank) from exc


def stage_group(comm: Comm, stages: StagePlan) -> Comm:
    """The group of the ranks of this rank's stage. A collective.

    Raises:
        ValueError: a rank was given other stages; on every rank.
    """
    _agree(comm, stages)
    group = comm.split(stages.of_rank(comm.rank).number)
    assert group is not None
    return group


def _agree(comm: Comm, stages: StagePlan) -> None:
    told = comm.gather_bytes(stages.sha256.encode())
    odd = [rank for rank, sha256 in enumerate(told) if sha256 != told[0]]
    if odd:
        raise ValueError(f"rank {odd[0]} has other pipeline stages than rank 0; give all ranks the same --plan")


def refuse_together(comm: Comm, why: str) -> None:
    """Raise on every rank what one refuses. A collective.

    Raises:
        ValueError: a rank has a reason.
    """
    for rank, reason in enumerate(comm.gather_bytes(why.encode())):
        if reason:
            raise ValueError(reason.decode() if rank == comm.rank else f"rank {rank}: {reason.decode()}")


def staged_model(inner: LocalModel, comm: Comm, stages: StagePlan, config: ModelConfig) -> LocalModel:
    """What a rank runs in a group of stages, made of what it runs in its stage.

    Args:
        inner: see `StagedForward`. config: of the whole model.
    """
    return LocalModel(
        StagedForward(inner, comm, stages), config, head_rows(inner, comm, stages), comm, inner.reducer, inner.max_seq
    )


def head_rows(inner: LocalModel, comm: Comm, stages: StagePlan) -> ShardPlan:
    """Who holds which rows of the vocabulary: the last stage's ranks. Groups and columns are those of each stage. A
    collective."""
    stage = stages.of_rank(comm.rank)
    plan, rank = inner.plan, inner.comm.rank
    heads = len(plan.attention_of(inner.config, rank)[0])
    mine = [plan.kv_groups[rank], plan.columns[rank], plan.vocab[rank] if stage.is_last else 0, heads, bool(plan.heads)]
    everyone = comm.all_gather(np.array(mine, np.int64)).reshape(-1, len(mine))
    kv_groups, columns, vocab, all_heads, shared = (tuple(int(n) for n in column) for column in everyone.T)
    return ShardPlan(kv_groups, columns, vocab, all_heads if any(shared) else ())
