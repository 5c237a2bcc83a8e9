"""What one rank runs when it decodes packed: the counterpart of `ShardedModel`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostring import Comm
from hostring.integrations.llm.checkpoint.checkpoint import Checkpoint
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.model.audit import StreamAudit
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.packed.cache import PackedCache
from hostring.integrations.llm.packed.decoder import PackedDecoder, units_of
from hostring.integrations.llm.packed.library import Unavailable
from hostring.integrations.llm.packed.units import Tree, folded


@dataclass
class PackedModel:
    """What one rank runs.

    Attributes:
        decoder: weights as they are in the file, and how its graphs are built.
        config: the whole model. plan: who holds what.
        reducer: where partial sums are added up.
        max_seq: positions that a cache holds.
    """

    decoder: PackedDecoder
    config: ModelConfig
    plan: ShardPlan
    comm: Comm
    reducer: HiddenReducer
    max_seq: int
    compiled: bool = field(default=False, init=False)
    dtype: torch.dtype = field(default=torch.float32, init=False)  # of what enters the reductions
    device: torch.device = field(default=torch.device("cpu"), init=False)

    @property
    def nbytes_held(self) -> int:
        """Bytes of the file that this rank holds, mapped or copied."""
        return self.decoder.nbytes_held

    @property
    def reduced_elements(self) -> list[int]:
        """Elements of each reduction of one row's step, in order."""
        width = self.config.hidden_size
        return [fold.n_slots * width for fold in self.decoder.folds] * self.config.num_hidden_layers

    def new_cache(self, batch: int = 1) -> PackedCache:
        """An empty KV cache for the heads that live here, in float16.

        Raises:
            ValueError: more than one sequence.
        """
        if batch != 1:
            raise ValueError(f"a packed decoder runs one sequence at a time, not {batch}; use compute='exact'")
        return PackedCache(self.decoder, self.max_seq)

    def move_to(self, comm: Comm) -> None:
        """Go on in a rebuilt group, with the weights that are here.

        Raises:
            ValueError: this rank is another one there, or there are more or fewer: it would need other slices.
        """
        old = self.comm
        if (comm.rank, comm.world_size) != (old.rank, old.world_size):
            was, now = f"rank {old.rank} of {old.world_size}", f"rank {comm.rank} of {comm.world_size}"
            raise ValueError(f"this part of the model is that of {was}, the group makes this {now}; load it again")
        self.comm = self.reducer.comm = comm

    def step(self, tokens: Tensor, cache: PackedCache) -> Tensor:
        """Feed tokens, shape (1, seq); returns this rank's logits of the last one, shape (1, local vocabulary), f32."""
        clock = self.reducer.clock
        clock.start()
        logits = torch.from_numpy(cache.step(tokens[0].tolist(), self))
        clock.stop()
        return logits

    def begin(self, x: npt.NDArray[np.float32]) -> None:
        """See `Sums`."""
        if self.reducer.audit is not None:
            self.reducer.audit.begin(torch.from_numpy(x))

    def reduce(self, slots: npt.NDArray[np.float32], completes: Tree) -> None:
        """See `Sums`."""
        self.reducer.reduce_array(slots, lambda: folded(completes, slots))

    def end(self, x: npt.NDArray[np.float32]) -> None:
        """See `Sums`."""
        if self.reducer.audit is not None:
            self.reducer.audit.end(torch.from_numpy(x))


def build_packed(
    checkpoint: Checkpoint,
    comm: Comm,
    *,
    plan: ShardPlan | None = None,
    max_seq: int | None = None,
    hash_activations: bool = False,
    threads: int | None = None,
    beside_exact: bool = False,
) -> PackedModel:
    """Map this rank's part of a GGUF file, and check the kernels on its own blocks.

    Args:
        checkpoint, comm, max_seq, hash_activations: see `sharded.build`.
        plan: who holds what; shares must be whole units (see `UnitPlan`). As even as units allow when not given.
        threads: that compute; as many as torch uses when not given.
        beside_exact: see `PackedDecoder`.

    Raises:
        Unavailable: this file can't be decoded packed here, or not by this plan; says why.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        raise Unavailable("only GGUF files hold weights that can be decoded packed")
    config = checkpoint.config
    try:
        units = units_of(checkpoint)
        plan = units.shares(config, comm.world_size) if plan is None else plan
        plan.check(config)
        threads = threads or torch.get_num_threads()
        decoder = PackedDecoder(checkpoint, plan, units, comm.rank, threads, beside_exact, comm.order)
    except ValueError as exc:
        raise Unavailable(str(exc)) from exc
    max_seq = min(config.max_position_embeddings, 4096) if max_seq is None else max_seq
    checkpoint.bytes_read += decoder.nbytes_held
    audit = StreamAudit(2 * config.num_hidden_layers) if hash_activations else None
    return PackedModel(decoder, config, plan, comm, HiddenReducer(comm, config.hidden_size, audit), max_seq)
