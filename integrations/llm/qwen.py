"""A Qwen3-style decoder that knows nothing of tensor parallelism.

RMSNorm, rotary positions, grouped-query attention, optional QK-norm (Qwen3) and biases (Qwen2), SwiGLU, tied or untied
head. The residual stream and the norms are f32 whatever the weights are; matmul inputs are cast to the dtype of the
weights, and what a sub-layer adds to the stream is f32 again. So the stream stays comparable between ranks that
compute in different dtypes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hostring.integrations.llm.config import ModelConfig, rotary_frequencies


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in f32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(self.eps)) * self.weight  # (..., width)


class Linear(nn.Module):
    """y = x Wᵀ + b in the dtype of the weights.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether there is one.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)  # (..., out_features)


class Embedding(nn.Module):
    """Token ids to f32 rows."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).float()  # (batch, seq, hidden)


class Rotary(nn.Module):
    """Cosines and signed sines of every position, so that rotating is x * cos + swap_halves(x) * sin."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, max_seq: int) -> None:
        super().__init__()
        frequencies = torch.tensor(rotary_frequencies(config), dtype=torch.float64, device="cpu")
        angles = torch.outer(torch.arange(max_seq, dtype=torch.float64, device="cpu"), frequencies)  # (max_seq, head_dim/2)
        cos, sin = angles.cos().float(), angles.sin().float()
        self.register_buffer("cos", torch.cat((cos, cos), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1), persistent=False)

    def at(self, start: int, n_positions: int) -> tuple[Tensor, Tensor]:
        """Tables of positions start … start + n_positions − 1, shape (n_positions, 1, head_dim) each."""
        stop = start + n_positions
        if stop > self.cos.shape[0]:
            raise ValueError(f"position {stop - 1} is past the rotary table of {self.cos.shape[0]} positions; raise max_seq")
        return self.cos[start:stop, None], self.sin[start:stop, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads to their positions, in f32. x: (batch, seq, heads, head_dim)."""
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return torch.addcmul(x * rope[0], swapped, rope[1])


class KVCache:
    """Keys and values of the heads that live here, preallocated for `max_seq` positions.

    Attributes:
        length: positions filled so far, the same for every sequence of the batch.
    """

    def __init__(self, config: ModelConfig, batch: int = 1, max_seq: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.max_seq = config.max_position_embeddings if max_seq is None else max_seq
        shape = (batch, config.num_key_value_heads, self.max_seq, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.num_hidden_layers)]
        self.length = 0

    def room_for(self, n_positions: int) -> None:
        """Raise a ValueError unless `n_positions` more fit."""
        if self.length + n_positions > self.max_seq:
            raise ValueError(
                f"KV cache holds {self.max_seq} positions, {self.length} are taken and {n_positions} more are needed; raise max_seq"
            )

    def clear(self) -> None:
        """Forget every position; the memory stays."""
        self.length = 0


class Attention(nn.Module):
    """Grouped-query attention over the heads given by `config`: all of them, or the ones of a shard."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv_proj: nn.Module = Linear(config.hidden_size, rows, config.qkv_bias)
        self.o_proj: nn.Module = Linear(self.heads * self.head_dim, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None, layer: int) -> Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv_proj(x).view(batch, seq, -1, self.head_dim)  # (batch, seq, heads + 2 kv_heads, head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        q = rotate(q, rope).to(qkv.dtype).transpose(1, 2)  # (batch, heads, seq, head_dim)
        k = rotate(k, rope).to(qkv.dtype).transpose(1, 2)  # (batch, kv_heads, seq, head_dim)
        v = v.transpose(1, 2)
        start = 0
        if cache is not None:
            start, stop = cache.length, cache.length + seq
            cache.keys[layer][:, :, start:stop] = k
            cache.values[layer][:, :, start:stop] = v
            k, v = cache.keys[layer][:, :, :stop], cache.values[layer][:, :, :stop]
        out = attend(q, k, v, start)  # (batch, heads, seq, head_dim)
        return self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1)).float()  # (batch, seq, hidden)


def attend(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of queries at positions start … over keys at positions 0 …

    Args:
        q: shape (batch, heads, queries, head_dim).
        k: shape (batch, kv_heads, start + queries, head_dim); v alike.
        start: position of the first query.

    Returns:
        shape (batch, heads, queries, head_dim).
    """
    batch, heads, queries, head_dim = q.shape
    if queries == 1:  # the heads of a group see the same keys, so they can be the query rows of one KV head
        grouped = q.view(batch, k.shape[1], -1, head_dim)
        return F.scaled_dot_product_attention(grouped, k, v).view(batch, heads, 1, head_dim)
    if start == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = torch.ones(queries, start + queries, dtype=torch.bool).tril(start)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.columns = config.intermediate_size
        self.gate_up_proj: nn.Module = Linear(config.hidden_size, 2 * self.columns, config.mlp_bias)
        self.down_proj: nn.Module = Linear(self.columns, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)  # (batch, seq, 2 columns)
        gate, up = gate_up[..., : self.columns], gate_up[..., self.columns :]
        return self.down_proj(F.silu(gate) * up).float()  # (batch, seq, hidden)


class Layer(nn.Module):
    """Pre-norm attention and MLP around the f32 residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, h: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None, layer: int) -> Tensor:
        h = h + self.attention(self.input_norm(h), rope, cache, layer)
        return h + self.mlp(self.post_norm(h))


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
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            head.weight = self.embed.weight  # type: ignore[assignment]
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
        seq = tokens.shape[1]
        if cache is not None:
            cache.room_for(seq)
        rope = self.rotary.at(cache.length if cache is not None else 0, seq)
        h = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            h = layer(h, rope, cache, i)
        if cache is not None:
            cache.length += seq
        if last_only:
            h = h[:, -1:]
        logits: Tensor = self.head(self.norm(h))
        return logits.float()
