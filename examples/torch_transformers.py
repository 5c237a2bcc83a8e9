"""Hugging Face `tp_plan="auto"` over hostring: generate with one model on several ranks.

transformers picks gloo for CPUs unless torch.distributed is initialised already, so that comes first.

    torchrun --nproc-per-node 2 examples/torch_transformers.py [MODEL]

MODEL is a folder, or a name on the Hub, of a model whose heads divide by the number of ranks. Without it, the script
makes a small Qwen3 with random weights. Prints

    2 ranks: logits differ from one process by 3.6e-07, tokens are the same: True
    27 tokens/s
"""

import sys
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


def small_model() -> str:
    """Make a Qwen3 of half a million parameters on rank 0. Returns its folder, the same on all ranks."""
    folder = [tempfile.mkdtemp(prefix="qwen3-")]
    dist.broadcast_object_list(folder, src=0)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
        config = Qwen3Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, **heads)
        Qwen3ForCausalLM(config).save_pretrained(folder[0])
    dist.barrier()
    return folder[0]


def main() -> None:
    dist.init_process_group("hostring")  # before from_pretrained
    path = sys.argv[1] if len(sys.argv) > 1 else small_model()
    split = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32).eval()
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        difference = (split(ids).logits - whole(ids).logits).abs().max().item()
        started = time.perf_counter()
        tokens = split.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - started
        same = torch.equal(tokens, whole.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=0))
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"{ranks} ranks: logits differ from one process by {difference:.1e}, tokens are the same: {same}")
        print(f"{32 / seconds:.0f} tokens/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
