"""One answer for any number of ranks: one sha256 of all logits, whoever holds what, however they are joined, whatever
the prompt's chunks and the state of the cache; what can't promise it is refused at start, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import byte_tokenizer, packable_model, write_gguf
from ranks import RankFailed, in_threads

import hostring
from hostring.integrations.llm import generation, load_model, same_bits
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.decoder import units_of
from hostring.integrations.llm.packed.library import Ggml, Unavailable, load
from hostring.integrations.llm.pipeline.stages import StagePlan
from hostring.integrations.llm.prefix import PrefixCache

try:
    load()
except Unavailable as exc:
    pytest.skip(str(exc), allow_module_level=True)

IDS = [5, 17, 3, 250, 9, 9, 101, 42, 7, 311, 12]
N_TOKENS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 KV heads, and FFN columns in 8 units."""
    folder = tmp_path_factory.mktemp("same_bits")
    return write_gguf(packable_model("qwen3", 8, 64), folder / "m.gguf", Kind.Q4_1, byte_tokenizer(400))


@pytest.fixture(scope="module")
def alone(path: Path) -> str:
    return answer(path, hostring.init(0, 1))


def answer(path: Path, comm: hostring.Comm, plan: ShardPlan | StagePlan | None = None, cache: str = "fresh") -> str:
    """sha256 of the logits of a few greedy tokens; empty on other ranks than the head."""
    model = load_model(path, comm, plan=plan, max_seq=64, same_bits=True)
    if cache == "fresh":
        found = model.generate(IDS, max_tokens=N_TOKENS)
    elif cache == "truncated":
        used = model.sharded.new_cache()
        model.generate([*IDS, 1, 2, 3], max_tokens=20, cache=used)
        used.truncate(0)
        found = model.generate(IDS, max_tokens=N_TOKENS, cache=used)
    else:  # refilled: the start of the prompt is there, and what followed it is another text
        prefix = PrefixCache(model.sharded.new_cache())
        model.generate([*IDS[:7], 77, 78, 79], max_tokens=20, prefix=prefix)
        found = model.generate(IDS, max_tokens=N_TOKENS, prefix=prefix)
        assert found.stats.reused_tokens == 7
    stats = found.stats
    assert stats.prefill_collectives == stats.expected_prefill_collectives
    assert stats.bytes_per_token == stats.expected_bytes_per_token
    return stats.logits_sha256 or ""


def plans(path: Path, world_size: int) -> list[ShardPlan | None]:
    """The even one, and an uneven one whose heads, columns and vocabulary are all split otherwise."""
    if world_size == 1:
        return [None]
    units = units_of(GgufCheckpoint(path))
    rest = world_size - 1
    groups = (8 - rest, *[1] * rest)
    columns = [len(u) for u in units.columns]
    uneven = ShardPlan(groups, (*columns[:rest], sum(columns[rest:])), (*[3] * rest, 400 - 3 * rest))
    return [None, uneven]


WAYS = [("mesh", "rank"), ("ring", "ring"), ("star", "rank"), ("tree", "tree")]


@pytest.mark.parametrize(("topology", "order"), WAYS, ids=lambda w: w)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_one_hash_for_every_number_of_ranks_split_and_topology(
    world_size: int, topology: str, order: str, path: Path, alone: str
) -> None:
    for plan in plans(path, world_size):
        hashes = in_threads(
            world_size, lambda comm, plan=plan: answer(path, comm, plan), topology=topology, order=order
        )
        assert hashes == [alone, *[""] * (world_size - 1)]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_one_hash_for_pipelines(ranks: tuple[int, int], path: Path, alone: str) -> None:
    stages = StagePlan((1, 1), ranks)
    assert in_threads(sum(ranks), lambda comm: answer(path, comm, stages))[0] == alone


@pytest.mark.parametrize("cache", ["truncated", "refilled"])
@pytest.mark.parametrize("chunk", [512, 4, 1])
def test_one_hash_for_every_chunk_and_state_of_the_cache(
    chunk: int, cache: str, path: Path, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_PREFILL_CHUNK", chunk)
    assert answer(path, hostring.init(0, 1)) == alone
    assert in_threads(3, lambda comm: answer(path, comm, None, cache), order="ring")[0] == alone


def test_one_hash_for_every_number_of_threads(path: Path, alone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert answer(path, hostring.init(0, 1)) == alone


def test_the_hash_tells_answers_apart(path: Path, alone: str) -> None:
    model = load_model(path, hostring.init(0, 1), max_seq=64, same_bits=True)
    assert model.generate([*IDS[:-1], 13], max_tokens=N_TOKENS).stats.logits_sha256 != alone
    assert model.generate(IDS, max_tokens=N_TOKENS - 1).stats.logits_sha256 != alone


def test_logits_are_not_gathered_unless_asked_for(path: Path) -> None:
    stats = load_model(path, hostring.init(0, 1), max_seq=64).generate(IDS, max_tokens=2).stats
    assert stats.logits_sha256 is None


def refusal(world_size: int, load: Callable[[hostring.Comm], Any], **group: Any) -> str:
    """What every rank says. One that hears it late may hear first that another rank has ended for that reason."""
    with pytest.raises(RankFailed) as failed:
        in_threads(world_size, load, **group)
    assert set(failed.value.errors) == set(range(world_size))
    errors = failed.value.errors.values()
    (said,) = {str(exc) for exc in errors if isinstance(exc, ValueError)}
    assert all(said in str(exc) for exc in errors)
    return said


def test_a_rank_that_computes_exact_is_refused_on_every_rank(path: Path) -> None:
    def load_one_exact(comm: hostring.Comm) -> Any:
        return load_model(path, comm, compute="exact" if comm.rank == 1 else "auto", same_bits=True)

    said = refusal(3, load_one_exact)
    assert "rank 1 computes exact, and its sums depend on its share of the model (it was told to" in said
    assert "use a GGUF file and --compute packed on every rank" in said


def test_other_kernels_are_refused_on_every_rank(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, releases = Ggml.instructions, same_bits.version

    def instructions(ggml: Ggml) -> list[str]:
        return plain(ggml) if threading.current_thread().name != "rank 1" else ["neon", "sve"]

    with monkeypatch.context() as patched:
        patched.setattr(Ggml, "instructions", instructions)
        said = refusal(2, lambda comm: load_model(path, comm, same_bits=True))
    assert "rank 1 has the instructions neon sve, rank 0 has" in said

    def version(package: str) -> str:
        return releases(package) if threading.current_thread().name != "rank 1" else "2026.10.1"

    monkeypatch.setattr(same_bits, "version", version)
    stages = StagePlan((1, 1), (1, 1))
    assert "rank 1 has the kernels" in refusal(2, lambda comm: load_model(path, comm, plan=stages, same_bits=True))
    said = refusal(2, lambda comm: load_model(path, comm, same_bits=True))
    assert "rank 1 has the kernels xllamacpp 2026.10.1, rank 0 has xllamacpp 2026.10" in said


def test_a_wire_that_rounds_is_refused(path: Path) -> None:
    said = refusal(2, lambda comm: load_model(path, comm, same_bits=True), wire="bfloat16")
    assert "the group rounds what travels to bfloat16" in said
