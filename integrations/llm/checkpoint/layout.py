"""Which slices of a checkpoint make up each parameter of a rank's decoder. Names are those of HF checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hostring.integrations.llm.model.config import Mixture, ModelConfig
from hostring.integrations.llm.model.shards import Ends, ShardPlan

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


_LAYER = re.compile(r"^(model\.layers|blk)\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer to which a tensor belongs, by its name in HF's or in GGUF's words; None for what belongs to none."""
    found = _LAYER.match(name)
    return int(found[2]) if found else None


def renumbered(name: str, by: int) -> str:
    """`name` with the number of its layer raised by `by`."""
    return _LAYER.sub(lambda found: f"{found[1]}.{int(found[2]) + by}.", name)


@dataclass(frozen=True)
class TensorSlice:
    """A rectangle of one checkpoint tensor.

    Attributes:
        name: HF name of the tensor.
        shape: shape of the whole tensor, to be checked against the file.
        rows: which rows.
        columns: which columns; None for a vector.
    """

    name: str
    shape: tuple[int, ...]
    rows: range
    columns: range | None

    @property
    def n_elements(self) -> int:
        return len(self.rows) * (1 if self.columns is None else len(self.columns))


def _slice(name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None) -> TensorSlice:
    whole = tuple(range(n) for n in shape)
    return TensorSlice(
        name, shape, whole[0] if rows is None else rows, columns if columns is not None else (whole[1:] or (None,))[0]
    )


def slices_of_rank(config: ModelConfig, plan: ShardPlan, rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    """Parameter name in `Decoder` to the parts that are stacked to make it, for everything that `rank` holds.

    Biases of the row-parallel projections appear on rank 0 alone: it adds them, once, to its partial sum.
    """
    found: dict[str, tuple[TensorSlice, ...]] = {
        "embed.weight": (_slice(EMBEDDING, (config.vocab_size, config.hidden_size)),),
        "norm.weight": (_slice("model.norm.weight", (config.hidden_size,)),),
        "head.weight": (
            _slice(
                EMBEDDING if config.tie_word_embeddings else HEAD,
                (config.vocab_size, config.hidden_size),
                rows=plan.vocab_of(rank),
            ),
        ),
    }
    for layer in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{layer}.", f"layers.{layer}."
        mlp = _mlp(config, plan, rank) if config.experts is None else _experts(config, config.experts, plan, rank)
        for name, parts in {**_attention(config, plan, rank), **mlp}.items():
            found[ours + name] = tuple(TensorSlice(theirs + p.name, p.shape, p.rows, p.columns) for p in parts)
    return found


def slices_to_read(
    config: ModelConfig, plan: ShardPlan, rank: int, ends: Ends, whole_embedding: bool = True
) -> list[TensorSlice]:
    """What a rank reads of a checkpoint.

    Args:
        ends: of the decoder that it holds. whole_embedding: it holds all rows of the embedding, not its share alone.
    """
    parts = slices_of_rank(config, plan, rank)
    embedding, head = parts.pop("embed.weight")[0], parts.pop("head.weight")[0]
    found = [part for several in parts.values() for part in several]
    if ends.embedding:
        found.append(embedding if whole_embedding else replace(embedding, rows=plan.vocab_of(rank)))
    return [*found, head] if ends.head else found


def _attention(config: ModelConfig, plan: ShardPlan, rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    dim, hidden = config.head_dim, config.hidden_size
    q_rows, kv_rows = (range(heads.start * dim, heads.stop * dim) for heads in plan.attention_of(config, rank))
    q_all, kv_all = config.num_attention_heads * dim, config.num_key_value_heads * dim
    qkv = (("q", q_all, q_rows), ("k", kv_all, kv_rows), ("v", kv_all, kv_rows))
    found = {
        "input_norm.weight": (_slice("input_layernorm.weight", (hidden,)),),
        "attention.qkv_proj.weight": tuple(
            _slice(f"self_attn.{n}_proj.weight", (total, hidden), rows) for n, total, rows in qkv
        ),
        "attention.o_proj.weight": (
            _slice("self_attn.o_proj.weight", (hidden, q_all), columns=plan.o_columns(config, rank)),
        ),
    }
    if config.qkv_bias:
        found["attention.qkv_proj.bias"] = tuple(
            _slice(f"self_attn.{n}_proj.bias", (total,), rows) for n, total, rows in qkv
        )
    if config.o_bias and rank == 0:
        found["attention.o_proj.bias"] = (_slice("self_attn.o_proj.bias", (hidden,)),)
    if config.qk_norm_across:
        for n, total, rows in qkv[:2]:
            found[f"attention.{n}_norm.weight"] = (_slice(f"self_attn.{n}_norm.weight", (total,), rows),)
            others = [part for part in (range(rows.start), range(rows.stop, total)) if part]
            if others:
                found[f"attention.{n}_others.weight"] = tuple(
                    _slice(f"self_attn.{n}_proj.weight", (total, hidden), part) for part in others
                )
            if others and config.qkv_bias:
                found[f"attention.{n}_others.bias"] = tuple(
                    _slice(f"self_attn.{n}_proj.bias", (total,), part) for part in others
                )
    elif config.qk_norm:
        for n in "qk":
            found[f"attention.{n}_norm.weight"] = (_slice(f"self_attn.{n}_norm.weight", (dim,)),)
    return found


def _mlp(config: ModelConfig, plan: ShardPlan, rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    columns, total, hidden = plan.columns_of(rank), config.intermediate_size, config.hidden_size
    found = {
        "post_norm.weight": (_slice("post_attention_layernorm.weight", (hidden,)),),
        "mlp.gate_up_proj.weight": tuple(
            _slice(f"mlp.{n}_proj.weight", (total, hidden), columns) for n in ("gate", "up")
        ),
        "mlp.down_proj.weight": (_slice("mlp.down_proj.weight", (hidden, total), columns=columns),),
    }
    if config.mlp_bias:
        found["mlp.gate_up_proj.bias"] = tuple(_slice(f"mlp.{n}_proj.bias", (total,), columns) for n in ("gate", "up"))
        if rank == 0:
            found["mlp.down_proj.bias"] = (_slice("mlp.down_proj.bias", (hidden,)),)
    return found


_EXPERT_NAMES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
"""How a model type calls the experts, and gate, up and down of each, where it isn't as Qwen does."""


def _experts(config: ModelConfig, mixture: Mixture, plan: ShardPlan, rank: int) -> dict[str, tuple[TensorSlice, ...]]:
    usual = "mlp", "gate_proj", "up_proj", "down_proj"
    home, *matrices = _EXPERT_NAMES.get(config.model_type, usual)
    hidden, columns = config.hidden_size, plan.columns_of(rank)
    found: dict[str, tuple[TensorSlice, ...]] = {
        "post_norm.weight": (_slice("post_attention_layernorm.weight", (hidden,)),),
        "mlp.router.weight": (_slice(f"{home}.gate.weight", (mixture.count, hidden)),),
    }
    placed = plan.experts_of(rank)
    cut, here = (columns, range(mixture.count)) if placed is None else (range(config.intermediate_size), placed)
    for n in here:
        names = [f"{home}.experts.{n}.{name}.weight" for name in matrices]
        found |= _gated(f"mlp.experts.{n - here.start}", names, config.intermediate_size, cut, hidden)
    if mine := plan.shared_columns_of(config, rank):
        found["mlp.router.shared"] = (_slice("mlp.shared_expert_gate.weight", (1, hidden)),)
        names = [f"mlp.shared_expert.{name}.weight" for name in usual[1:]]
        found |= _gated("mlp.shared", names, mixture.shared_columns, mine, hidden)
    return found


def _gated(ours: str, names: list[str], total: int, columns: range, hidden: int) -> dict[str, tuple[TensorSlice, ...]]:
    """Gate, up and down of one MLP, called `ours`."""
    gate, up, down = names
    return {
        f"{ours}.gate_up_proj.weight": tuple(_slice(name, (total, hidden), columns) for name in (gate, up)),
        f"{ours}.down_proj.weight": (_slice(down, (hidden, total), columns=columns),),
    }
