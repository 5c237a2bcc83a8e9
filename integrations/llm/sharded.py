"""From a checkpoint to the part of the model that one rank runs, without ever holding the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hostring import Comm
from hostring.integrations.llm.checkpoint.checkpoint import Checkpoint
from hostring.integrations.llm.checkpoint.layout import TensorSlice, slices_of_rank
from hostring.integrations.llm.checkpoint.whole_model import ModuleCheckpoint
from hostring.integrations.llm.model.audit import StreamAudit
from hostring.integrations.llm.model.cache import KVCache
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.one_row import OneRow
from hostring.integrations.llm.model.qwen import Decoder, Embedding
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import (
    ColumnParallelLinear,
    HiddenReducer,
    ParallelHead,
    RowParallelLinear,
    VocabParallelEmbedding,
)

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class ShardedModel:
    """What one rank runs.

    Attributes:
        decoder: the local part; its head gives the logits of this rank's vocabulary rows.
        config: the whole model.
        plan: who holds what.
        dtype: what this rank computes in.
        device: what it computes on.
        reducer: where partial sums are added up.
        max_seq: positions that the KV cache holds.
        reduced_elements: of each reduction of one position's forward pass, in order.
        compiled: torch has compiled the layers.
        one_row: the short way for a single token, on CPUs; None elsewhere, and where the layers are compiled.
    """

    decoder: Decoder
    config: ModelConfig
    plan: ShardPlan
    comm: Comm
    dtype: torch.dtype
    device: torch.device
    reducer: HiddenReducer
    max_seq: int
    reduced_elements: list[int]
    compiled: bool = False
    one_row: OneRow | None = field(init=False)

    def __post_init__(self) -> None:
        self.one_row = OneRow(self.decoder) if self.device.type == "cpu" and not self.compiled else None

    @property
    def nbytes_held(self) -> int:
        """Bytes of weights that this rank holds."""
        return sum(parameter.nbytes for parameter in self.decoder.parameters())

    def new_cache(self, batch: int = 1) -> KVCache:
        """An empty KV cache for the heads that live here.

        It holds values rounded to the rank's dtype; on a CPU in f32, whose attention kernel is five times slower in
        f16.
        """
        dtype = torch.float32 if self.device.type == "cpu" else self.dtype
        return KVCache(self.decoder.config, batch, self.max_seq, dtype, self.device)

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

    @torch.inference_mode()
    def step(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Feed tokens, shape (batch, seq); returns this rank's logits of the last one, shape (batch, local
        vocabulary), f32."""
        clock, audit = self.reducer.clock, self.reducer.audit
        clock.start()
        tokens = tokens.to(self.device)
        h: Tensor = self.decoder.embed(tokens)
        if audit is not None:
            audit.begin(h)
        single = self.one_row if tokens.numel() == 1 else None
        h = self.decoder.run_layers(h, cache) if single is None else single.run_layers(h, cache)
        if audit is not None:
            audit.end(h)
        logits = self.decoder.logits(h[:, -1:])[:, -1] if single is None else single.logits(h)
        clock.stop()
        return logits


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
) -> ShardedModel:
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
    max_seq = min(config.max_position_embeddings, 4096) if max_seq is None else max_seq
    audit = StreamAudit(2 * config.num_hidden_layers) if hash_activations else None
    reducer = HiddenReducer(comm, config.hidden_size, audit)
    with torch.device("meta"):  # shapes alone: the whole model, and even the rank's f32 part, may not fit
        decoder = Decoder(plan.local_config(config, comm.rank), max_seq)
    _fill(decoder, checkpoint, plan, comm.rank, dtype, device, reducer, replicate_embedding)
    decoder.to(device)  # the tables and constants that are in no checkpoint
    n_reductions = 2 * config.num_hidden_layers + (0 if replicate_embedding else 1)
    compiled, reduced = bool(compile), [config.hidden_size] * n_reductions
    model = ShardedModel(decoder.eval(), config, plan, comm, dtype, device, reducer, max_seq, reduced, compiled)
    if compiled:
        _compile(model, compile if isinstance(compile, str) else "inductor")
    return model


class _Alone:
    """Stands in for the group: adds nothing."""

    def all_reduce(self, x: Any, /) -> Any:
        return x


def _compile(model: ShardedModel, backend: str) -> None:
    """Compile the layers, all by the same code, and run each kind of step once without the group.

    Nothing is left to compile while a peer waits inside a reduction.
    """
    model.reducer.hide_from_compiler()
    for layer in model.decoder.layers:
        layer.compile(backend=backend, dynamic=True)
    group, model.reducer.comm = model.reducer.comm, _Alone()
    try:
        for lengths in ((5, 3, 1, 1), (7, 4)):  # a prompt, more of it, and single tokens; other lengths
            cache = model.new_cache()
            for n in (n for n in lengths if cache.length + n <= cache.max_seq):
                model.step(torch.zeros(1, n, dtype=torch.long, device=model.device), cache)
    finally:
        model.reducer.comm = group


def parallelize(
    model: Decoder,
    comm: Comm,
    plan: ShardPlan | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> ShardedModel:
    """Cut up a whole decoder that is already in memory; `model` itself is left as it is."""
    return build(
        ModuleCheckpoint(model), comm, plan=plan, dtype=dtype, device=device, max_seq=model.rotary.cos.shape[0]
    )


def _fill(
    decoder: Decoder,
    checkpoint: Checkpoint,
    plan: ShardPlan,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    reducer: HiddenReducer,
    replicate_embedding: bool,
) -> None:
    parts = slices_of_rank(checkpoint.config, plan, rank)

    def load(name: str) -> Tensor | None:
        return _stack(checkpoint, parts[name]).to(device) if name in parts else None

    def need(name: str) -> Tensor:
        return _stack(checkpoint, parts[name]).to(device)

    def matrix(name: str) -> Tensor:
        return _stack(checkpoint, parts[name]).to(device, dtype)

    if replicate_embedding:
        decoder.embed = _embedding(need("embed.weight"))
    else:
        mine, whole = plan.vocab_of(rank), parts["embed.weight"][0]
        rows = checkpoint.read(TensorSlice(whole.name, whole.shape, mine, whole.columns))
        decoder.embed = VocabParallelEmbedding(rows.to(device), mine.start, reducer)
    for name, parameter in list(decoder.named_parameters()):
        if name.endswith("norm.weight") and parameter.is_meta:
            owner = decoder.get_submodule(name.rpartition(".")[0])
            owner.weight = nn.Parameter(need(name).float(), requires_grad=False)
    for i, layer in enumerate(decoder.layers):
        for side, first, second in (("attention", "qkv_proj", "o_proj"), ("mlp", "gate_up_proj", "down_proj")):
            prefix = f"layers.{i}.{side}."
            column = ColumnParallelLinear(matrix(f"{prefix}{first}.weight"), load(f"{prefix}{first}.bias"), dtype)
            row = RowParallelLinear(matrix(f"{prefix}{second}.weight"), load(f"{prefix}{second}.bias"), dtype, reducer)
            setattr(layer.get_submodule(side), first, column)
            setattr(layer.get_submodule(side), second, row)
    decoder.head = ParallelHead(matrix("head.weight"), plan.vocab_of(rank).start, dtype)


def _stack(checkpoint: Checkpoint, parts: tuple[TensorSlice, ...]) -> Tensor:
    pieces = [checkpoint.read(part) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _embedding(weight: Tensor) -> Embedding:
    """Keeps the dtype of the checkpoint: rounding it to the rank's own would start unlike ranks from different bits."""
    with torch.device("meta"):
        embedding = Embedding(*weight.shape)
    embedding.weight = nn.Parameter(weight, requires_grad=False)
    return embedding
