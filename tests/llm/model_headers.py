"""Checkpoints that are all header: sparse files, whose weights take no room on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


def sparse_gguf(
    path: Path,
    *,
    layers: int = 4,
    hidden: int = 512,
    columns: int = 2048,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 64,
    vocab: int = 1000,
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
) -> Path:
    """A GGUF file of the llama layout with tied embeddings, whose tensors are holes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(columns)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    matrices = _matrices(layers, hidden, columns, heads * head_dim, kv_heads * head_dim)
    matrices["token_embd.weight"] = (vocab, hidden)
    norms = [f"blk.{n}.{name}_norm.weight" for n in range(layers) for name in ("attn", "ffn")] + ["output_norm.weight"]
    block, block_nbytes = GGML_QUANT_SIZES[kind]
    total = 0
    for name, shape in matrices.items():
        stored = (shape[0], shape[1] // block * block_nbytes)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), stored[0] * stored[1], kind)
        total += stored[0] * stored[1] + 32
    for name in norms:
        writer.add_tensor_info(name, (hidden,), np.dtype(np.float32), 4 * hidden)
        total += 4 * hidden + 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + total)
    return path


def _matrices(layers: int, hidden: int, columns: int, queries: int, keys: int) -> dict[str, tuple[int, int]]:
    """The shapes of all layers' matrices, by name."""
    shapes = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (columns, hidden),
        "ffn_up": (columns, hidden),
        "ffn_down": (hidden, columns),
    }
    return {f"blk.{n}.{name}.weight": shape for n in range(layers) for name, shape in shapes.items()}
