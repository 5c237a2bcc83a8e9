"""Forward passes of a rank with the blocks of a GGUF file as they are."""

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
from hostring.integrations.llm.model.local_model import LocalModel, Rows
from hostring.integrations.llm.model.regions import layers_of
from hostring.integrations.llm.model.shards import WHOLE, Boundaries, Ends, ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.packed.cache import PackedCache
from hostring.integrations.llm.packed.decoder import PackedDecoder, units_of
from hostring.integrations.llm.packed.library import Unavailable
from hostring.integrations.llm.packed.step import Steps
from hostring.integrations.llm.packed.units import Tree, folded
from hostring.integrations.llm.packed.wide import WideSteps, are_many


@dataclass
class PackedForward:
    """See `Forward`. It is also the `Sums` of its steps.

    Attributes:
        decoder: weights as they are in the file, and how its graphs are built.
        alone: no other rank adds anything, and nobody watches the stream: a step reduces nothing then.
        batch_invariant: a row has the same bits whatever rows a step has beside it. Otherwise steps of many rows take a
            faster way.
    """

    decoder: PackedDecoder
    reducer: HiddenReducer
    alone: bool
    ends: Ends = WHOLE
    batch_invariant: bool = False
    boundaries: Boundaries = field(default_factory=Boundaries, init=False)
    compute: str = field(default="packed", init=False)
    compiled: bool = field(default=False, init=False)
    dtype: torch.dtype = field(default=torch.float32, init=False)
    device: torch.device = field(default=torch.device("cpu"), init=False)
    _steps: Steps = field(init=False)
    _wide: WideSteps = field(init=False)

    def __post_init__(self) -> None:
        self._make_steps()

    def _make_steps(self) -> None:
        sums = None if self.alone else self
        self._steps, self._wide = Steps(self.decoder, sums), WideSteps(self.decoder, sums)

    def show_sums(self) -> None:
        """Let every step call the reducer for its sums, also where no other rank adds anything: somebody looks at what
        is done in between."""
        self.alone = False
        self._make_steps()

    @property
    def goes_wide(self) -> bool:
        """Whether steps of many rows dequantise: not where kernels for repacked blocks are as fast, nor
        with experts, of which each row uses a few."""
        return not (self.batch_invariant or self.decoder.repacked or self.decoder.config.experts)

    @property
    def nbytes_held(self) -> int:
        """See `Forward`."""
        return self.decoder.nbytes_held

    def move_to(self, comm: Comm) -> None:
        """See `Forward`."""
        self.reducer.comm = comm

    @property
    def reduced_elements(self) -> list[int]:
        """See `Forward`."""
        if self.alone:
            return []
        local, folds = self.decoder.local, self.decoder.folds
        return [folds[r.side].n_slots * local.hidden_size for layer in layers_of(local) for r in layer]

    def new_cache(self, batch: int, max_seq: int) -> PackedCache:
        """See `Forward`. Keys and values are in float16.

        Raises:
            ValueError: more than one sequence.
        """
        if batch != 1:
            raise ValueError(f"a packed cache holds one sequence, not {batch}; make one for each, or compute exact")
        return PackedCache(self.decoder.local, max_seq)

    def step(self, tokens: Tensor, cache: PackedCache, stream: npt.NDArray[np.float32] | None = None) -> Tensor:
        """See `Forward.step`."""
        return self.step_rows([(cache, tokens[0].tolist())], stream)

    def step_rows(self, rows: Rows, stream: npt.NDArray[np.float32] | None = None, every: bool = False) -> Tensor:
        """See `Forward.step_rows`."""
        steps = self._wide if self.goes_wide and are_many(rows) else self._steps
        return torch.from_numpy(steps.run(rows, stream, every))

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
    ends: Ends = WHOLE,
    batch_invariant: bool = False,
) -> LocalModel:
    """Map this rank's part of a GGUF file, and check the kernels on its own blocks.

    Args:
        checkpoint, comm, max_seq, hash_activations: see `sharded.build`.
        plan: who holds what; shares must be whole units (see `UnitPlan`). As even as units allow when not given.
        threads: that compute; as many as torch uses when not given.
        beside_exact, ends: see `PackedDecoder`.
        batch_invariant: see `PackedForward`; the same on all ranks.

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
        decoder = PackedDecoder(
            checkpoint, plan, units, comm.rank, threads, beside_exact, comm.order, ends, batch_invariant
        )
    except ValueError as exc:
        raise Unavailable(str(exc)) from exc
    max_seq = min(config.max_position_embeddings, 4096) if max_seq is None else max_seq
    checkpoint.bytes_read += decoder.nbytes_held
    audit = StreamAudit(2 * config.num_hidden_layers) if hash_activations else None
    reducer = HiddenReducer(comm, config.hidden_size, audit)
    forward = PackedForward(decoder, reducer, comm.world_size == 1 and audit is None, ends, batch_invariant)
    return LocalModel(forward, config, plan, comm, reducer, max_seq)
