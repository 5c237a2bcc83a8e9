"""Write a GGUF of a mixture of experts with random weights, for timing: `python benchmarks/random_experts.py OUT.gguf
--like FILE.gguf`. It is a qwen3moe of 0.9 billion elements, of which a token reads 0.2, with the tokenizer of `--like`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import quantize

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 16, 16, 4, 64
EXPERTS, USED, COLUMNS = 32, 4, 512
KINDS = ("Q4_0", "Q8_0", "F16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--like", required=True, help="a GGUF file with a byte-level BPE tokenizer")
    parser.add_argument("--kind", default="Q4_0", choices=KINDS)
    options = parser.parse_args()
    fields = GGUFReader(options.like).fields
    writer = GGUFWriter(options.out, "qwen3moe")
    describe(writer, fields)
    add_weights(writer, len(fields["tokenizer.ggml.tokens"].contents()), GGMLQuantizationType[options.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: GGUFWriter, fields: Any) -> None:
    """Shapes and the tokenizer."""
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(COLUMNS)
    writer.add_expert_feed_forward_length(COLUMNS)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    pre = fields.get("tokenizer.ggml.pre")
    writer.add_tokenizer_pre("smollm" if pre is None else pre.contents())
    writer.add_token_list(fields["tokenizer.ggml.tokens"].contents())
    writer.add_token_types(fields["tokenizer.ggml.token_type"].contents())
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_weights(writer: GGUFWriter, n_tokens: int, kind: GGMLQuantizationType) -> None:
    random = np.random.default_rng(0)

    def add(name: str, shape: tuple[int, ...], stored: GGMLQuantizationType = kind) -> None:
        values = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        writer.add_tensor(f"{name}.weight", quantize(values, stored), raw_dtype=stored)

    def add_ones(name: str, n: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))

    add("token_embd", (n_tokens, HIDDEN))
    add_ones("output_norm", HIDDEN)
    add("output", (n_tokens, HIDDEN))
    for layer in range(LAYERS):
        home = f"blk.{layer}."
        for norm, n in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ):
            add_ones(home + norm, n)
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", KV_HEADS)):
            add(home + name, (heads * HEAD_DIM, HIDDEN))
        add(home + "attn_output", (HIDDEN, HEADS * HEAD_DIM))
        add(home + "ffn_gate_inp", (EXPERTS, HIDDEN), GGMLQuantizationType.F32)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            add(home + name, (EXPERTS, COLUMNS, HIDDEN))
        add(home + "ffn_down_exps", (EXPERTS, HIDDEN, COLUMNS))


if __name__ == "__main__":
    main()
