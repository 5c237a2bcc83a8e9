"""Guessed tokens: the text that comes without them, in fewer steps; none where they would lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, packable_model, write_gguf

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.conversation import Conversation
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.generate import Model
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import WHOLE, Boundaries, ShardPlan
from hostring.integrations.llm.model.tensor_parallel import HiddenReducer
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.pipeline.stages import StagePlan
from hostring.integrations.llm.speculation.depth import Depth
from hostring.integrations.llm.speculation.lookup import PromptLookup
from hostring.integrations.llm.speculation.wish import Speculation

IDS = [5, 17, 3, 250, 9, 9, 101, 42, 7, 311, 12]
ALWAYS = Speculation("lookup", most=3, always=True)
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guesses")
    return write_gguf(packable_model("qwen3", 3, 64), folder / "m.gguf", Kind.Q4_1, byte_tokenizer(400))


def needs_ggml() -> None:
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))


def test_guesses_follow_the_latest_place_of_the_longest_run() -> None:
    lookup = PromptLookup()
    lookup.begin([1, 2, 3, 4, 9, 2, 3, 5, 7, 8, 2, 3])
    assert lookup.guesses(3) == [5, 7, 8]  # after 2, 3 the last time
    lookup.extend([4])
    assert lookup.guesses(2) == [9, 2]  # 2, 3, 4 is longer
    lookup.extend([6])
    assert lookup.guesses(3) == []
    lookup.begin([1, 2, 1, 2])
    assert lookup.guesses(5) == [1, 2, 1, 2, 1]
    lookup.begin([4])
    assert lookup.guesses(2) == []


def taken(depth: Depth, n_tokens: int, hit: float, plain_s: float, row_s: float, seed: int = 0) -> tuple[float, float]:
    """Seconds and steps for so many tokens, where a guess is right with probability `hit`, a step of one row takes
    `plain_s`, and each further one `row_s` more."""
    draw, seconds, steps, tokens = np.random.default_rng(seed), 0.0, 0, 0
    while tokens < n_tokens:
        count = depth.choose()
        right = 0
        while right < count and draw.random() < hit:
            right += 1
        took = (plain_s + count * row_s) * draw.normal(1.0, 0.03)
        depth.note(1, count, right + 1, took, row_s * (1 + count))
        seconds, steps, tokens = seconds + took, steps + 1, tokens + right + 1
    return seconds, steps


@pytest.mark.parametrize(("plain_s", "row_s"), [(0.1, 0.01), (0.011, 0.009), (0.02, 0.04)])
@pytest.mark.parametrize("hit", [0.0, 0.1, 0.3])
def test_what_guesses_may_lose_is_bounded(hit: float, plain_s: float, row_s: float) -> None:
    for seed in range(5):
        seconds, _ = taken(Depth(7), 400, hit, plain_s, row_s, seed)
        assert seconds < 1.03 * 400 * plain_s


def test_what_was_saved_in_one_text_is_not_lost_in_the_next() -> None:
    for seed in range(5):
        depth = Depth(7)
        saved, _ = taken(depth, 400, 0.9, 0.1, 0.01, seed)
        assert saved < 0.5 * 400 * 0.1
        for _ in range(3):
            depth.begin_text()
            seconds, _ = taken(depth, 100, 0.0, 0.1, 0.01, seed)
            assert seconds < 1.03 * 100 * 0.1


def test_a_row_that_takes_as_long_as_a_step_is_tried_once() -> None:
    """Its candidates fill a slow link, which nobody knows before."""
    depth, most = Depth(7), 0
    for _ in range(200):
        count = depth.choose()
        most = max(most, count)
        depth.note(1, count, 1, 0.1 * (1 + count), 0.001)
    assert most == 1


def test_more_is_guessed_the_slower_the_link_and_the_better_the_guesses() -> None:
    steps = {}
    for plain_s in (0.010, 0.1):
        for hit in (0.5, 0.9):
            seconds, steps[plain_s, hit] = taken(Depth(7), 400, hit, plain_s, 0.009)
            assert plain_s == 0.01 or seconds < 400 * plain_s / (1.3 if hit == 0.5 else 3)
    assert 400 / steps[0.1, 0.9] > 4
    assert 400 / steps[0.01, 0.5] < 1.2
    assert 400 / steps[0.1, 0.5] > 1.5


def test_many_texts_have_fewer_guesses_each() -> None:
    depth = Depth(7, always=True)
    assert [depth.choose(n) for n in (1, 3, 4, 7, 8, 15, 16)] == [7, 7, 3, 3, 1, 1, 0]


def generated(path: Path, comm: hostring.Comm, wish: Speculation | None, sampling: Sampling, **how: Any) -> Generation:
    model = load_model(path, comm, **how)
    if comm.rank == 0:
        model.tokenizer.eos_ids = frozenset()
    if wish is not None:
        model.speculate(wish if comm.rank == 0 else Speculation())
    return model.generate(IDS, sampling, max_tokens=40)


def together(path: Path, wish: Speculation, sampling: Sampling, **how: Any) -> Callable[[hostring.Comm], Generation]:
    return lambda comm: generated(path, comm, wish, sampling, **how)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.4, top_k=20, seed=7), Sampling(0.6, top_p=0.9, seed=1)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_text_and_logits_are_those_without_guesses(
    world_size: int, sampling: Sampling, packable: Path, run_ranks: Ranks
) -> None:
    needs_ggml()
    how: dict[str, Any] = {"same_bits": True, "max_seq": 64, "hash_activations": True}
    plain = generated(packable, hostring.init(0, 1), None, sampling, **how)
    for rank, found in enumerate(run_ranks(world_size, together(packable, ALWAYS, sampling, **how))):
        stats = found.stats
        assert found.tokens == plain.tokens
        assert stats.wrong_steps == 0
        assert stats.logits_sha256 == (plain.stats.logits_sha256 if rank == 0 else None)
        assert stats.collectives_per_token == stats.expected_collectives_per_token
        assert stats.bytes_per_token == stats.expected_bytes_per_token
        assert stats.decode_steps < 39 or not sampling.greedy
        assert stats.tokens_per_step == 39 / stats.decode_steps


def test_exact_ranks_and_stages_write_the_text_without_guesses(run_ranks: Ranks) -> None:
    plain = generated(BUNDLED, hostring.init(0, 1), None, Sampling())
    for plan, world_size in ((None, 2), (StagePlan((2, 2), (1, 1)), 2)):
        for found in run_ranks(world_size, together(BUNDLED, ALWAYS, Sampling(), plan=plan)):
            assert found.tokens == plain.tokens
            assert found.stats.bytes_per_token == found.stats.expected_bytes_per_token


def test_a_conversation_goes_on_from_a_cache_without_wrong_guesses(run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> list[Any]:
        model = load_model(BUNDLED, comm)
        texts = []
        for wish in (Speculation(), ALWAYS):
            model.speculate(wish)
            talk = Conversation(model)
            said = [talk.ask(prompt, max_tokens=20) for prompt in ("In the beginning", "And God said", "And")]
            texts.append([(one.tokens, one.stats.reused_tokens) for one in said])
        return texts

    for plain, guessed in run_ranks(2, run):
        assert guessed == plain
        assert plain[2][1] > 20


def test_a_text_ends_where_it_ends_without_guesses(packable: Path) -> None:
    """At its limit, at the end of the cache, and at a token that ends it, in the middle of right guesses too."""
    needs_ggml()
    model = load_model(packable, hostring.init(0, 1), max_seq=48)
    model.tokenizer.eos_ids = frozenset()
    whole = model.generate(IDS, max_tokens=100)
    assert len(whole.tokens) == 48 - len(IDS) + 1
    model.speculate(ALWAYS)
    assert model.generate(IDS, max_tokens=100).tokens == whole.tokens
    for n in range(1, 20):
        assert model.generate(IDS, max_tokens=n).tokens == whole.tokens[:n]
        model.tokenizer.eos_ids = frozenset({whole.tokens[n]})
        found = model.generate(IDS, max_tokens=100)
        assert found.tokens == whole.tokens[: whole.tokens.index(whole.tokens[n]) + 1]
        assert found.stop_reason == "eos"
        model.tokenizer.eos_ids = frozenset()


class _Chain:
    """A `Forward` whose logits depend on the last token alone."""

    compute, dtype, device, compiled = "packed", torch.float32, torch.device("cpu"), False
    ends, boundaries, decoder, nbytes_held, reduced_elements = WHOLE, Boundaries(), None, 0, list[int]()

    def __init__(self, logits: np.ndarray[Any, Any]) -> None:
        self._logits = torch.from_numpy(logits)

    def step(self, tokens: torch.Tensor, cache: Any, stream: Any = None) -> torch.Tensor:
        return self.step_rows([(cache, tokens[0].tolist())])

    def step_rows(self, rows: Any, stream: Any = None, every: bool = False) -> torch.Tensor:
        ((cache, ids),) = rows
        cache.length += len(ids)
        return self._logits[ids if every else ids[-1:]]


def chain(logits: np.ndarray[Any, Any], tokenizer: ChatTokenizer) -> tuple[Model, Callable[[], Any]]:
    size, comm = len(logits), hostring.init(0, 1)
    config: Any = SimpleNamespace(vocab_size=size)
    plan = ShardPlan((1,), (1,), (size,))
    part = LocalModel(_Chain(logits), config, plan, comm, HiddenReducer(comm, 1), 64)

    def cache() -> Any:
        made = SimpleNamespace(length=0, max_seq=64)
        made.truncate = lambda length: setattr(made, "length", length)
        return made

    return Model(part, tokenizer), cache


def test_guesses_leave_the_distribution_as_it_is() -> None:
    """Chi-square over all pairs of neighbours of a chain of 4 tokens, with guesses that are often wrong."""
    size, n_texts, n_tokens = 4, 500, 12
    logits = np.random.default_rng(3).normal(0, 1.5, (size, size)).astype(np.float32)
    tokenizer: Any = SimpleNamespace(
        eos_ids=frozenset(), known_ids=lambda: frozenset(range(size)), stream=lambda: None, decode=lambda ids: ""
    )
    model, cache = chain(logits, tokenizer)
    model.speculate(ALWAYS)
    pairs: Counter[tuple[int, int]] = Counter()
    steps = 0
    for seed in range(n_texts):
        found = model.generate([0, 1, 2, 3, 0, 1], Sampling(1.0, seed=seed), max_tokens=n_tokens, cache=cache())
        pairs.update(pairwise([1, *found.tokens]))
        steps += found.stats.decode_steps
    assert steps < 0.9 * n_texts * (n_tokens - 1)
    chi_square = 0.0
    for a in range(size):
        p = np.exp(logits[a].astype(np.float64))
        expected = p / p.sum() * sum(pairs[a, b] for b in range(size))
        chi_square += float(sum((pairs[a, b] - expected[b]) ** 2 / expected[b] for b in range(size)))
    assert chi_square < 32.9  # one in a thousand at 12 degrees of freedom is above


def test_a_draft_model_guesses_on_the_head(packable: Path, run_ranks: Ranks) -> None:
    needs_ggml()
    wish = Speculation(draft=str(packable), most=3, always=True)
    plain = generated(packable, hostring.init(0, 1), None, Sampling(), max_seq=64)
    for found in run_ranks(2, together(packable, wish, Sampling(), max_seq=64)):
        assert found.tokens == plain.tokens
        assert found.stats.decode_steps == 10  # of four tokens each: the draft is the model itself


def test_a_draft_of_another_vocabulary_is_refused_on_every_rank(packable: Path, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> str:
        model = load_model(BUNDLED, comm)
        for path in (packable, Path("absent.gguf")):
            with pytest.raises(ValueError, match=r"--draft .*(another vocabulary|no such file)") as caught:
                model.speculate(Speculation(draft=str(path)))
        return str(caught.value)

    assert len(set(run_ranks(2, run))) == 1


def test_wishes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="--speculate wild is not one of off, lookup"):
        Speculation("wild")
    with pytest.raises(ValueError, match="--draft-max 0: between 1 and 14"):
        Speculation("lookup", most=0)
