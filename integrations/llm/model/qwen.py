"""A Qwen3-style decoder that knows nothing of tensor parallelism.

RMSNorm, rotary positions, grouped-query attention, optional QK-norm (Qwen3) and biases (Qwen2), SwiGLU, tied or untied
head. The residual stream and the norms are f32 whatever the weights are; matmul inputs are rounded to the dtype of the
weights, and what a sub-layer adds to the stream is f32 again. So the stream stays comparable between ranks that
compute in different dtypes.

Decoding one token is bound by the time to read the weights once, so gate and up are one matrix, and so are q, k and v;
what is left of a layer is few operations on short rows. Which operations those are, `regions.py` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.model.cache import KVCache, Slot
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.eager import Eager, Rope
from hostring.integrations.llm.model.regions import Attention, Experts, GatedMlp, Region, layers_of
from hostring.integrations.llm.model.rope import rotary_frequencies
from hostring.integrations.llm.model.routing import Router

MAX_NARROW_ROWS = 5  # that a CPU multiplies one by one in 16 bits: 42 ms each through SmolLM2, where widening takes 220


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in f32."""

    eps: Tensor
    inverse_width: Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        # As tensors: torch spends 2 µs to wrap a Python number, which is more than the sum itself at one row.
        self.register_buffer("eps", torch.tensor(eps, device="cpu"), persistent=False)
        self.register_buffer("inverse_width", torch.tensor(1.0 / width, device="cpu"), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean_eps = torch.addcmul(self.eps, x.square().sum(-1, keepdim=True), self.inverse_width)  # (..., 1)
        return x * mean_eps.rsqrt() * self.weight  # (..., width)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b, with x rounded to the dtype of `weight`, summed in f32, returned in the dtype of `weight`.

    CPUs without 16-bit matrix units multiply 16-bit matrices row by row (23 ms instead of 3 for 64 rows by 3072 x 576).
    So many rows are multiplied in f32 after widening both sides, which is exact. For few rows, widening the matrix
    costs more than it saves. Accelerators have such units.
    """
    dtype = weight.dtype
    if x.dtype != dtype:
        x = x.to(dtype)
    n_rows = x.numel() // x.shape[-1] if x.shape[-1] else 1
    if dtype == torch.float32 or not x.is_cpu or n_rows == 1:
        return F.linear(x, weight, bias)
    if n_rows <= MAX_NARROW_ROWS and not torch.compiler.is_compiling():  # which would compile for each number of rows
        rows = [F.linear(row, weight, bias) for row in x.reshape(n_rows, 1, -1)]
        return torch.cat(rows).view(*x.shape[:-1], weight.shape[0])
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)


class Linear(nn.Module):
    """y = x Wᵀ + b in the dtype of the weights. `weight`: (out_features, in_features)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)  # (..., out_features)


class Embedding(nn.Module):
    """Token ids to f32 rows. Its weights keep the dtype of the checkpoint, so that every rank starts from the same
    bits."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).float()  # (batch, seq, hidden)


class Rotary(nn.Module):
    """Cosines and signed sines of every position, so that rotating is x * cos + swap_halves(x) * sin.

    Values pass through the same three operations as queries and keys, with cos 1 and sin 0: that leaves them as they
    are and saves taking the fused row apart in every layer.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, max_seq: int) -> None:
        super().__init__()
        self.turning, self.fixed = config.num_attention_heads + config.num_key_value_heads, config.num_key_value_heads
        plain = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        frequencies = torch.tensor(plain, dtype=torch.float64, device="cpu")
        angles = torch.outer(
            torch.arange(max_seq, dtype=torch.float64, device="cpu"), frequencies
        )  # (max_seq, head_dim/2)
        scale = config.rope_scaling.attention_factor
        cos, sin = (angles.cos() * scale).float(), (angles.sin() * scale).float()
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)

    def at(self, start: int, n_positions: int) -> Rope:
        """Tables of `n_positions` positions from `start` on, shape (n_positions, heads + 2 kv_heads, head_dim) each."""
        stop = start + n_positions
        if stop > self.cos.shape[0]:
            raise ValueError(
                f"position {stop - 1} is past the rotary table of {self.cos.shape[0]} positions; raise max_seq"
            )
        cos, sin = (t[start:stop, None].expand(-1, self.turning, -1) for t in (self.cos, self.sin))
        fixed = (n_positions, self.fixed, self.cos.shape[1])
        return torch.cat((cos, cos.new_ones(fixed)), 1), torch.cat((sin, sin.new_zeros(fixed)), 1)


class AttentionWeights(nn.Module):
    """Those of an attention region: q, k and v as one matrix, the output projection, and the norms of heads.

    Where a norm is over all heads, `others_proj` has the queries' rows that other ranks compute, then the keys': the
    norm needs their squares, and computing them here saves a message.
    """

    def __init__(self, config: ModelConfig, region: Attention) -> None:
        super().__init__()
        rows = (region.heads + 2 * region.kv_heads) * region.head_dim
        self.qkv_proj: nn.Module = Linear(config.hidden_size, rows, config.qkv_bias)
        self.o_proj: nn.Module = Linear(region.heads * region.head_dim, config.hidden_size, config.o_bias)
        norms = [(heads if region.across else 1) * region.head_dim for heads in (region.heads, region.kv_heads)]
        self.q_norm, self.k_norm = (RMSNorm(width, config.rms_norm_eps) if region.qk_norm else None for width in norms)
        self.others_proj: nn.ModuleList | None = None


class GatedMlpWeights(nn.Module):
    """Those of an MLP region: gate and up as one matrix, gate first, and the down projection."""

    def __init__(self, config: ModelConfig, region: GatedMlp) -> None:
        super().__init__()
        self.gate_up_proj: nn.Module = Linear(config.hidden_size, 2 * region.columns, config.mlp_bias)
        self.down_proj: nn.Module = Linear(region.columns, config.hidden_size, config.mlp_bias)


class ExpertsWeights(nn.Module):
    """Those of a region of experts.

    Attributes:
        reducer: sums what the experts of this rank give over all ranks; None in a decoder that is on one rank.
    """

    reducer: Callable[[Tensor], Tensor] | None = None

    def __init__(self, config: ModelConfig, region: Experts) -> None:
        super().__init__()
        mixture, one = region.mixture, GatedMlp(region.columns)
        self.router = Router(config.hidden_size, mixture)
        self.experts = nn.ModuleList(GatedMlpWeights(config, one) for _ in mixture.here)
        self.shared: nn.Module | None = None
        if mixture.shared_columns:
            self.shared = GatedMlpWeights(config, GatedMlp(mixture.shared_columns))


HELD = {Attention: AttentionWeights, GatedMlp: GatedMlpWeights, Experts: ExpertsWeights}


def inside(region: Region, ops: Eager, h: Tensor) -> Tensor:
    """What lies between two sums: what torch may compile. One function for all layers, so that it does so once."""
    found: Tensor = region.inside(ops, h)
    return found


class Layer(nn.Module):
    """The weights that regions name, and the regions applied to tensors.

    Attributes:
        compiled: `inside`, compiled; None where torch was not asked to.
    """

    compiled: Callable[[Region, Eager, Tensor], Tensor] | None = None

    def __init__(self, config: ModelConfig, regions: Sequence[Region]) -> None:
        super().__init__()
        self.regions = tuple(regions)
        for region in self.regions:
            self.add_module(region.norm, RMSNorm(config.hidden_size, config.rms_norm_eps))
            self.add_module(region.side, HELD[type(region)](config, region))

    def forward(self, h: Tensor, rope: Rope, slots: Sequence[Slot] | None) -> Tensor:
        ops = Eager(self, rope, slots)
        # Steps of several sequences aren't compiled: a peer would wait for the compiler at each new shape.
        several = slots is not None and len(slots) > 1
        for region in self.regions:
            # Which experts run is known in each step alone.
            between = inside if several or isinstance(region, Experts) else self.compiled or inside
            h = ops.add_sum(h, between(region, ops, h), region)
        return h


class Decoder(nn.Module):
    """Token ids to logits.

    Args:
        config: shapes; a rank that holds a shard passes its own numbers of heads and columns.
        max_seq: positions in the rotary table; `config.max_position_embeddings` when not given.
    """

    def __init__(self, config: ModelConfig, max_seq: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed: nn.Module = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config, config.max_position_embeddings if max_seq is None else max_seq)
        self.layers = nn.ModuleList(Layer(config, regions) for regions in layers_of(config))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            head.weight = self.embed.weight
        self.head: nn.Module = head

    def initialise(self, seed: int = 0, std: float = 0.02) -> Decoder:
        """Fill the weights for training from scratch: normal, narrower where a matrix writes to the residual stream."""
        generator = torch.Generator().manual_seed(seed)
        into_stream = std / (2 * self.config.num_hidden_layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    narrow = "o_proj" in name or "down_proj" in name
                    parameter.normal_(0.0, into_stream if narrow else std, generator=generator)
        return self

    def forward(self, tokens: Tensor, cache: KVCache | None = None, *, last_only: bool = False) -> Tensor:
        """Logits of every position, or of the last one, in f32.

        Args:
            tokens: ids, shape (batch, seq).
            cache: appended to, in place; positions continue after what it holds. Without one, positions start at 0.
            last_only: skip the head for all positions but the last.

        Returns:
            shape (batch, seq or 1, vocab).
        """
        h = self.run_layers(self.embed(tokens), cache)
        return self.logits(h[:, -1:] if last_only else h)

    def run_layers(self, h: Tensor, cache: KVCache | None = None) -> Tensor:
        """The residual stream after all layers. h: that of the embedding, shape (batch, seq, hidden), f32."""
        seq = h.shape[1]
        rope = self.rotary.at(0 if cache is None else cache.length, seq)
        slots = [None] * len(self.layers) if cache is None else [(slot,) for slot in cache.extend(seq)]
        for layer, of_layer in zip(self.layers, slots, strict=True):
            h = layer(h, rope, of_layer)
        return h

    def run_sequences(self, h: Tensor, parts: Sequence[tuple[KVCache, int]]) -> Tensor:
        """The same for rows of several sequences.

        Args:
            h: shape (1, rows, hidden).
            parts: (cache, rows) of each sequence, one after another.
        """
        cosines, sines = zip(*(self.rotary.at(cache.length, n_rows) for cache, n_rows in parts), strict=True)
        rope = torch.cat(cosines), torch.cat(sines)
        slots = zip(*(cache.extend(n_rows) for cache, n_rows in parts), strict=True)
        for layer, of_layer in zip(self.layers, slots, strict=True):
            h = layer(h, rope, of_layer)
        return h

    def logits(self, h: Tensor) -> Tensor:
        """From the residual stream to logits in f32, shape (batch, seq, vocab)."""
        logits: Tensor = self.head(self.norm(h))
        return logits.float()
