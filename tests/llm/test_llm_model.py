"""The decoder alone, against transformers on the same random weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llm_models import FAMILIES, hf_model, save

import hostring
from hostring.integrations.llm.checkpoint.hf_config import config_from_hf
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.checkpoint.whole_model import save_hf
from hostring.integrations.llm.generate import load_model
from hostring.integrations.llm.model.cache import KVCache
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.qwen import MAX_NARROW_ROWS, Decoder, linear
from hostring.integrations.llm.sharded import DTYPES, build

# Sums of some 50 products through 3 layers: a few hundred roundings of the dtype's epsilon, most of which cancel.
ROUNDINGS = 40


@pytest.fixture
def alone() -> Iterator[hostring.Comm]:
    with hostring.init(0, 1) as comm:
        yield comm


def tokens_of(batch: int, seq: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 101, (batch, seq), generator=torch.Generator().manual_seed(seed))


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: str = "float32") -> None:
    scale = want.abs().max().item()
    assert (got - want).abs().max().item() <= ROUNDINGS * torch.finfo(DTYPES[dtype]).eps * scale


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, dtype: str, tmp_path: Path, alone: hostring.Comm) -> None:
    oracle = hf_model(family)
    model = build(open_checkpoint(save(oracle, tmp_path)), alone, dtype=DTYPES[dtype])
    tokens = tokens_of(2, 23)
    with torch.inference_mode():
        want, got = oracle(tokens).logits, model.decoder(tokens)
        assert_close(got, want, dtype)
        assert want.abs().max() > 1  # far from the all-equal logits of an untrained model


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_through_the_cache_are_the_whole_sequence(family: str, tmp_path: Path, alone: hostring.Comm) -> None:
    oracle = hf_model(family)
    decoder = build(open_checkpoint(save(oracle, tmp_path)), alone).decoder
    tokens, cache = tokens_of(2, 20), KVCache(decoder.config, batch=2, max_seq=20)
    with torch.inference_mode():
        pieces = [decoder(tokens[:, a:b], cache) for a, b in ((0, 7), (7, 8), (8, 13), (13, 14), (14, 20))]
        assert_close(torch.cat(pieces, 1), oracle(tokens).logits)
    assert cache.length == 20
    with pytest.raises(ValueError, match="holds 20 positions, 20 are taken and 1 more"):
        decoder(tokens[:, :1], cache)


@pytest.mark.parametrize("threads", ["1", "2"])  # numpy multiplies, torch does
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bound_row_is_the_decoder(
    family: str, dtype: str, threads: str, tmp_path: Path, alone: hostring.Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    model = build(open_checkpoint(save(hf_model(family), tmp_path)), alone, dtype=DTYPES[dtype])
    tokens, ours, theirs = tokens_of(1, 9), model.new_cache(), model.new_cache()
    with torch.inference_mode():
        for cache in (ours, theirs):
            model.decoder(tokens, cache)
        for token in (3, 77, 5):
            one = torch.tensor([[token]])
            assert_close(model.forward.one_row(one, ours), model.decoder(one, theirs)[:, 0], dtype)


@pytest.mark.parametrize("n_rows", [2, MAX_NARROW_ROWS, MAX_NARROW_ROWS + 1])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows_in_16_bits_have_the_bits_of_each_alone(biased: bool, n_rows: int) -> None:
    generator = torch.Generator().manual_seed(n_rows)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((1, n_rows, 48), (40, 48), (40,)))
    added = bias.bfloat16() if biased else None
    together = linear(x, weight.bfloat16(), added)
    assert_close(together.float(), x @ weight.t() + (bias if biased else 0), "bfloat16")
    if n_rows <= MAX_NARROW_ROWS:
        for row in range(n_rows):
            assert torch.equal(together[:, row], linear(x[:, row : row + 1], weight.bfloat16(), added)[:, 0])


@pytest.mark.parametrize("threads", ["1", "2"])
def test_the_bound_row_copies_no_matrix(
    threads: str, tmp_path: Path, alone: hostring.Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    model = build(open_checkpoint(save(hf_model("llama"), tmp_path)), alone)
    token = torch.tensor([[3]])
    with torch.inference_mode():
        before = model.forward.one_row(token, model.new_cache())
        kept = before.clone()
        for name, weight in model.decoder.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(-0.5)
        after = model.forward.one_row(token, model.new_cache())
        assert_close(after, model.decoder(token, model.new_cache())[:, 0])
    assert torch.equal(before, kept)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_that_of_transformers(family: str, tmp_path: Path, alone: hostring.Comm) -> None:
    oracle = hf_model(family)
    model = load_model(save(oracle, tmp_path), alone)
    model.tokenizer.eos_ids = frozenset()
    prompt = tokens_of(1, 11)
    want = oracle.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40, pad_token_id=0
    )
    got = model.generate(prompt[0].tolist(), max_tokens=40)
    assert got.tokens == want[0, 11:].tolist()
    assert got.stop_reason == "length"


def test_several_prompts_continue_one_cache(tmp_path: Path, alone: hostring.Comm) -> None:
    model = load_model(save(hf_model("qwen3-tied"), tmp_path), alone)
    model.tokenizer.eos_ids = frozenset()
    first, second = [5, 6, 7], [8, 9]
    cache = model.sharded.new_cache()
    one = model.generate(first, max_tokens=4, cache=cache)
    # The last token of a turn was never fed: it starts the next prompt.
    two = model.generate([one.tokens[-1], *second], max_tokens=4, cache=cache)
    whole = model.generate([*first, *one.tokens, *second], max_tokens=4)
    assert two.tokens == whole.tokens


def test_training_reaches_every_weight_and_lowers_the_loss() -> None:
    config = ModelConfig(31, 24, 36, 2, 4, 2, 6, qkv_bias=True, tie_word_embeddings=False, max_position_embeddings=32)
    model = Decoder(config).initialise(seed=3)
    tokens = torch.arange(32).remainder(31).repeat(4, 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        losses.append(loss.item())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert losses[0] == pytest.approx(np.log(31), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"model_type": "llama", "qk_norm": False}, {"model_type": "qwen2", "qk_norm": False, "qkv_bias": True}],
)
@pytest.mark.parametrize("tied", [True, False])
def test_what_we_write_transformers_reads(
    options: dict[str, Any], tied: bool, tmp_path: Path, alone: hostring.Comm
) -> None:
    config = ModelConfig(61, 32, 40, 2, 4, 2, 8, tie_word_embeddings=tied, max_position_embeddings=64, **options)
    model = Decoder(config).initialise(seed=2, std=0.2).eval()
    save_hf(model, tmp_path, torch.float32)
    tokens = tokens_of(1, 12).remainder(61)
    with torch.inference_mode():
        want = model(tokens)
        assert_close(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, want)
        assert_close(build(open_checkpoint(tmp_path), alone).decoder(tokens), want)
    assert open_checkpoint(tmp_path).config == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; this decoder covers qwen3, qwen2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers of type sliding_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"num_key_value_heads": 3}, "10 query heads can't be grouped over 3 KV heads"),
    ],
)
def test_what_the_decoder_lacks_is_refused(change: dict[str, Any], message: str) -> None:
    fields = {**FAMILIES["qwen3-tied"]().to_dict(), "rope_parameters": None, **change}
    with pytest.raises(ValueError, match=message):
        config_from_hf("config.json", fields)
