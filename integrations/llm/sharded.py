"""From a checkpoint to the part of the model that one rank runs, without ever holding the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from hostring import Comm
from hostring.integrations.llm.checkpoint.checkpoint import Checkpoint
from hostring.integrations.llm.checkpoint.layout import TensorSlice, slices_of_rank, slices_to_read
from hostring.integrations.llm.checkpoint.whole_model import ModuleCheckpoint
from hostring.integrations.llm.model.audit import StreamAudit
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.exact_forward import ExactForward
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.qwen import (
    AttentionWeights,
    Decoder,
    Embedding,
    ExpertsWeights,
    Layer,
    inside,
)
from hostring.integrations.llm.model.regions import Experts, Region
from hostring.integrations.llm.model.shards import WHOLE, Ends, ShardPlan
from hostring.integrations.llm.model.tensor_parallel import (
    ColumnParallelLinear,
    HiddenReducer,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def build(
    checkpoint: Checkpoint,
    comm: Comm,
    *,
    plan: ShardPlan | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_seq: int | None = None,
    replicate_embedding: bool = True,
    hash_activations: bool = False,
    compile: bool | str = False,
    ends: Ends = WHOLE,
) -> LocalModel:
    """Read this rank's slices and assemble its part of the model.

    Args:
        checkpoint: where the tensors come from; only the rank's slices are read.
        comm: the group; its rank decides which slices.
        plan: who holds what; balanced when not given. Must be the same on all ranks.
        dtype: what this rank computes in; ranks may differ.
        device: what it computes on, see `find_device`; ranks may differ. Slices are read on the host and moved one by
            one.
        max_seq: positions to hold; what the model was trained for, but at most 4096, when not given.
        replicate_embedding: every rank holds all embedding rows and looks them up alone. Otherwise they are split too,
            which costs one more reduction per step.
        hash_activations: keep a running sha256 of the reduced hidden states, and check that they were used.
        compile: let torch compile the layers, here and now; or the name of the backend of `torch.compile`. Ranks may
            differ; the others wait for this one in their first collective, up to its timeout.
        ends: which ends of the decoder to read.

    Raises:
        ValueError: there is no such device, the plan doesn't fit the group or the model, or a tensor is missing or
        misshapen.
    """
    device = find_device(device)
    config = checkpoint.config
    plan = ShardPlan.balanced(config, comm.world_size) if plan is None else plan
    plan.check(config)
    if plan.world_size != comm.world_size:
        raise ValueError(f"the plan is for {plan.world_size} ranks, the group has {comm.world_size}")
    checkpoint.prepare(slices_to_read(config, plan, comm.rank, ends, replicate_embedding))
    max_seq = min(config.max_position_embeddings, 4096) if max_seq is None else max_seq
    audit = StreamAudit(2 * config.num_hidden_layers) if hash_activations else None
    reducer = HiddenReducer(comm, config.hidden_size, audit)
    with torch.device("meta"):  # shapes alone: the whole model, and even the rank's f32 part, may not fit
        decoder = Decoder(plan.local_config(config, comm.rank), max_seq)
    _fill(decoder, checkpoint, plan, comm.rank, dtype, device, reducer, replicate_embedding, ends)
    decoder.to(device)  # the tables and constants that are in no checkpoint
    n_reductions = 2 * config.num_hidden_layers + (ends.embedding and not replicate_embedding)
    reduced = [config.hidden_size] * n_reductions
    forward = ExactForward(decoder.eval(), reducer, dtype, device, reduced, bool(compile), ends)
    model = LocalModel(forward, config, plan, comm, reducer, max_seq)
    if compile:
        _compile(model, compile if isinstance(compile, str) else "inductor")
    return model


class _Alone:
    """Stands in for the group: adds nothing."""

    def all_reduce(self, x: Any, /) -> Any:
        return x


def _compile(model: LocalModel, backend: str) -> None:
    """Compile the layers, all by the same code, and run each kind of step once without the group.

    Nothing is left to compile while a peer waits inside a reduction.
    """
    compiled = torch.compile(inside, backend=backend, dynamic=True)
    for layer in cast(list[Layer], model.decoder.layers):
        layer.compiled = compiled
    group, model.reducer.comm = model.reducer.comm, _Alone()
    try:
        for lengths in ((5, 3, 1, 1), (7, 4)):  # a prompt, more of it, and single tokens; other lengths
            cache = model.new_cache()
            for n in (n for n in lengths if cache.length + n <= cache.max_seq):
                stream = None if model.forward.ends.embedding else np.zeros((n, model.config.hidden_size), np.float32)
                model.forward.step(torch.zeros(1, n, dtype=torch.long), cache, stream)
    finally:
        model.reducer.comm = group


def parallelize(
    model: Decoder,
    comm: Comm,
    plan: ShardPlan | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> LocalModel:
    """Cut up a whole decoder that is already in memory; `model` itself is left as it is."""
    return build(
        ModuleCheckpoint(model), comm, plan=plan, dtype=dtype, device=device, max_seq=model.rotary.cos.shape[0]
    )


@dataclass(frozen=True)
class _Slices:
    """What one rank reads of a checkpoint, by the names of the decoder's parameters."""

    checkpoint: Checkpoint
    parts: dict[str, tuple[TensorSlice, ...]]
    dtype: torch.dtype
    device: torch.device

    def need(self, name: str) -> Tensor:
        return _stack(self.checkpoint, self.parts[name]).to(self.device)

    def load(self, name: str) -> Tensor | None:
        return self.need(name) if name in self.parts else None

    def frozen(self, name: str) -> nn.Parameter:
        return nn.Parameter(self.need(name).float(), requires_grad=False)

    def column(self, name: str) -> ColumnParallelLinear:
        weight = self.need(f"{name}.weight").to(self.dtype)
        return ColumnParallelLinear(weight, self.load(f"{name}.bias"), self.dtype)

    def fill(self, side: nn.Module, name: str, region: Region, reducer: HiddenReducer | None) -> None:
        """The first and the last matrix of `side`, which is called `name`."""
        first, last = f"{name}.{region.first}", f"{name}.{region.last}"
        setattr(side, region.first, self.column(first))
        weight = self.need(f"{last}.weight").to(self.dtype)
        setattr(side, region.last, RowParallelLinear(weight, self.load(f"{last}.bias"), self.dtype, reducer))

    def fill_experts(self, side: ExpertsWeights, name: str, region: Experts, reducer: HiddenReducer) -> None:
        """The router and the matrices of all experts, which sum over the ranks once, together."""
        side.reducer = reducer
        side.router.weight = self.frozen(f"{name}.router.weight")
        for n, expert in enumerate(side.experts):
            self.fill(expert, f"{name}.experts.{n}", region, None)
        if side.shared is not None:
            side.router.shared = self.frozen(f"{name}.router.shared")
            self.fill(side.shared, f"{name}.shared", region, None)


def _fill(
    decoder: Decoder,
    checkpoint: Checkpoint,
    plan: ShardPlan,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    reducer: HiddenReducer,
    replicate_embedding: bool,
    ends: Ends,
) -> None:
    parts = slices_of_rank(checkpoint.config, plan, rank)
    slices = _Slices(checkpoint, parts, dtype, device)
    decoder.embed = decoder.head = nn.Identity()
    if ends.embedding and replicate_embedding:
        decoder.embed = _embedding(slices.need("embed.weight"))
    elif ends.embedding:
        decoder.embed = _split_embedding(checkpoint, parts["embed.weight"][0], plan.vocab_of(rank), device, reducer)
    for name, parameter in list(decoder.named_parameters()):
        if name.endswith("norm.weight") and parameter.is_meta:
            decoder.get_submodule(name.rpartition(".")[0]).weight = slices.frozen(name)
    for i, layer in enumerate(cast(list[Layer], decoder.layers)):
        for region in layer.regions:
            side, name = layer.get_submodule(region.side), f"layers.{i}.{region.side}"
            if isinstance(side, ExpertsWeights) and isinstance(region, Experts):
                slices.fill_experts(side, name, region, reducer)
                continue
            slices.fill(side, name, region, reducer)
            if isinstance(side, AttentionWeights) and f"{name}.q_others.weight" in parts:
                side.others_proj = nn.ModuleList(slices.column(f"{name}.{n}_others") for n in "qk")
    if ends.head:
        decoder.head = ParallelHead(slices.need("head.weight").to(dtype), plan.vocab_of(rank).start, dtype)


def _stack(checkpoint: Checkpoint, parts: tuple[TensorSlice, ...]) -> Tensor:
    pieces = [checkpoint.read(part) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _split_embedding(
    checkpoint: Checkpoint, whole: TensorSlice, mine: range, device: torch.device, reducer: HiddenReducer
) -> VocabParallelEmbedding:
    rows = checkpoint.read(TensorSlice(whole.name, whole.shape, mine, whole.columns))
    return VocabParallelEmbedding(rows.to(device), mine.start, reducer)


def _embedding(weight: Tensor) -> Embedding:
    """Keeps the dtype of the checkpoint: rounding it to the rank's own would start unlike ranks from different bits."""
    with torch.device("meta"):
        embedding = Embedding(*weight.shape)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    return embedding
