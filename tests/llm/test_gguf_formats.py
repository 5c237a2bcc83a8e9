"""Every block format of GGUF, cut for 3 and 5 ranks in the middle of blocks: the values of gguf's own
dequantisation. The blocks are random bytes, which any format can be read from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint, gguf_name
from hostring.integrations.llm.checkpoint.layout import slices_of_rank
from hostring.integrations.llm.model.shards import ShardPlan

FORMATS = (
    "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "IQ3_S", "IQ2_S", "TQ1_0", "MXFP4",
)  # fmt: skip
HIDDEN, COLUMNS, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 19, 8, 4, 32
MATRICES = {
    "token_embd": (VOCAB, HIDDEN),
    "blk.0.attn_q": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.ffn_gate": (COLUMNS, HIDDEN),
    "blk.0.ffn_up": (COLUMNS, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, COLUMNS),
}


def write_random(kind: Kind, path: Path) -> None:
    random = np.random.default_rng(int(kind))
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    block, block_nbytes = gguf.GGML_QUANT_SIZES[kind]
    for name, (rows, columns) in MATRICES.items():
        raw = random.integers(0, 256, (rows, columns // block * block_nbytes), np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales may be no numbers
@pytest.mark.parametrize("name", FORMATS)
def test_every_rank_reads_the_values_of_gguf(name: str, tmp_path: Path) -> None:
    write_random(Kind[name], tmp_path / "m.gguf")
    checkpoint = GgufCheckpoint(tmp_path / "m.gguf")
    want = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)])
        for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors
    }
    for world_size in (3, 5):  # 5 ranks share the 4 KV heads
        plan = ShardPlan.balanced(checkpoint.config, world_size)
        for rank in range(world_size):
            for parts in slices_of_rank(checkpoint.config, plan, rank).values():
                for part in parts:
                    whole = want[gguf_name(part.name)][part.rows.start : part.rows.stop]
                    cut = whole if part.columns is None else whole[:, part.columns.start : part.columns.stop]
                    np.testing.assert_array_equal(checkpoint.read(part).float().numpy(), cut)
