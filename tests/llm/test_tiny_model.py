"""The bundled model: small, uneven over two and three ranks, readable by others, and able to write."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hostring
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.generate import Model, load_model
from hostring.integrations.llm.model.sampling import Sampling
from hostring.integrations.llm.model.shards import ShardPlan

PASSAGE = (
    "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them, "
    "When ye come into the land which I give unto you, then shall the land keep a sabbath unto the LORD."
)
GLUE = frozenset(
    (
        "the",
        "and",
        "of",
        "to",
        "in",
        "that",
        "he",
        "shall",
        "unto",
        "for",
        "i",
        "his",
        "a",
        "they",
        "be",
        "is",
        "him",
        "not",
        "them",
        "it",
    )
)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(BUNDLED, hostring.init(0, 1))


@torch.inference_mode()
def mean_loss(model: Model, text: str) -> float:
    """Nats per token after the first."""
    ids = torch.tensor([model.tokenizer.encode(text)])
    return float(F.cross_entropy(model.sharded.decoder(ids)[0, :-1], ids[0, 1:]))


def test_it_fits_in_four_megabytes_with_its_tokenizer_and_says_where_it_comes_from() -> None:
    files = {f.name: f.stat().st_size for f in BUNDLED.iterdir()}
    assert sum(files.values()) <= 4_000_000, files
    readme = (BUNDLED / "README.md").read_text(encoding="utf-8")
    for fact in ("bible-kjv-text", "public domain", "train_tiny.py", "held-out", "Qwen3"):
        assert fact in readme


def test_nothing_divides_evenly_by_two_or_three(model: Model) -> None:
    config = model.sharded.config
    for total in (config.num_key_value_heads, config.intermediate_size, config.vocab_size):
        assert total % 2
        assert total % 3
    for world_size in (2, 3):
        plan = ShardPlan.balanced(config, world_size)
        for shares in (plan.kv_groups, plan.columns, plan.vocab):
            assert len(set(shares)) > 1, plan


@pytest.mark.parametrize("prompt", ["In the beginning", "And God said unto", "Then the king answered, saying,"])
def test_it_writes_words_of_its_text_with_the_glue_of_sentences(model: Model, prompt: str) -> None:
    text = model.generate(prompt, Sampling(0.7, 40, 0.95), max_tokens=160).text
    words = [w.lower() for w in re.findall("[A-Za-z]+", text)]
    vocabulary = model.tokenizer.tokenizer.get_vocab()
    whole = {token[1:].lower() for token in vocabulary if re.fullmatch("Ġ[A-Za-z]{2,}", token)} | {"i", "a", "o"}
    known = sum(w in whole for w in words) / len(words)
    assert len(words) > 80, text
    assert known > 0.8, (known, text)
    assert 0.25 < sum(w in GLUE for w in words) / len(words) < 0.8, text
    assert len(set(words)) > 25, text  # not one phrase again and again


def test_it_knows_sentences_from_heaps_of_words(model: Model) -> None:
    words = PASSAGE.split()
    random.Random(0).shuffle(words)
    assert mean_loss(model, PASSAGE) < 3.2
    assert mean_loss(model, " ".join(words)) > mean_loss(model, PASSAGE) + 1.5


def test_transformers_loads_it_and_computes_the_same(model: Model) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    ids = model.tokenizer.encode(PASSAGE)
    assert tokenizer(PASSAGE)["input_ids"] == ids
    assert tokenizer.decode(ids) == PASSAGE == model.tokenizer.decode(ids)
    assert model.tokenizer.eos_ids == {tokenizer.eos_token_id}
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits
        got = model.sharded.decoder(torch.tensor([ids]))
    # Both compute in f32, in different orders: sums of 160 and 437 terms in 4 layers, far below 1000 roundings of
    # 2^-24.
    torch.testing.assert_close(got, expected, rtol=0, atol=float(1000 * 2.0**-24 * expected.abs().max()))


def test_the_script_that_trained_it_ends_with_equal_weights(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    verses = [f"Ge{c}:{v} {PASSAGE} Number {v} of {c}." for c in range(1, 60) for v in range(1, 6)]
    text.write_text("\n".join(verses), encoding="utf-8")
    script = Path(__file__).parents[2] / "examples" / "train_tiny.py"
    args = ["--text", text, "--out", tmp_path / "out", "--minutes", "0.02", "--windows", "2", "--window", "64"]
    command = [sys.executable, "-m", "hostring", "launch", "-n", "2", str(script), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert re.search(r"weights sha256 [0-9a-f]{64} on all 2 ranks", done.stdout), done.stdout
    assert "Ge1:" not in (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8")
    fields = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert fields["architectures"] == ["Qwen3ForCausalLM"]
    with hostring.init(0, 1) as comm:
        assert load_model(tmp_path / "out", comm).generate("And the", max_tokens=4).stats.generated_tokens == 4
