"""Steps over rows of several sequences: the logits of each are those that it has alone, on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from llm_models import hf_model, packable_model, save, write_gguf

import hostring
from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.packed.decoder import units_of
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.model import build_packed
from hostring.integrations.llm.sharded import DTYPES, build

PROMPT, FED = [5, 17, 3, 250, 9, 9, 101, 42, 7, 311, 12], [77, 5, 240]
Ranks = Callable[..., list[Any]]


def needs_ggml() -> None:
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def packable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(packable_model("qwen3", 3, 64), tmp_path_factory.mktemp("packed") / "m.gguf", Kind.Q4_1)


def whole(model: LocalModel, logits: torch.Tensor) -> np.ndarray[Any, Any]:
    """Logits of the whole vocabulary, shape (sequences, vocabulary)."""
    rows = [model.comm.all_gather(row, counts=model.plan.vocab) for row in logits.numpy().copy()]
    return np.array(rows)


def pieces_of(chunks: Sequence[int], prompt: Sequence[int] = PROMPT) -> list[list[int]]:
    """What a sequence feeds step by step: its prompt in chunks, then single ids."""
    ends = np.cumsum(chunks).tolist()
    return [*(list(p) for p in np.split(np.array(prompt), ends)), *([token] for token in FED)]


def others(n: int, n_steps: int) -> list[list[list[int]]]:
    """Sequences of other lengths, each with a prompt of many ids now or later and single ids before and after."""
    draw = np.random.default_rng(n)
    lengths = [[1 if (s + k) % 3 else 2 + 3 * k for s in range(n_steps)] for k in range(n)]
    return [[draw.integers(0, 400, length).tolist() for length in steps] for steps in lengths]


def run_together(model: LocalModel, sequences: list[list[list[int]]]) -> list[list[np.ndarray[Any, Any]]]:
    """Logits of each sequence after each step, when all run together."""
    caches = [model.new_cache() for _ in sequences]
    found: list[list[np.ndarray[Any, Any]]] = [[] for _ in sequences]
    for step in zip(*sequences, strict=True):
        logits = whole(model, model.step_rows(list(zip(caches, step, strict=True))))
        for of_sequence, row in zip(found, logits, strict=True):
            of_sequence.append(row)
    return found


def sha256(rows: Sequence[np.ndarray[Any, Any]]) -> str:
    return hashlib.sha256(np.array(rows).tobytes()).hexdigest()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_packed_logits_have_one_hash_in_any_company(world_size: int, packable: Path, run_ranks: Ranks) -> None:
    needs_ggml()

    def run(comm: hostring.Comm) -> tuple[str, set[str]]:
        model = build_packed(GgufCheckpoint(packable), comm, max_seq=256, batch_invariant=True)
        cache, hashes = model.new_cache(), set()
        alone = sha256([whole(model, model.step(torch.tensor([p]), cache))[0] for p in pieces_of([])])
        for company in (0, 1, 3, 7):
            for chunks in ((), (8,), (3, 5)):
                target = pieces_of(chunks)
                beside = others(company, len(target))
                sequences = [*beside[: company // 2], target, *beside[company // 2 :]]
                rows = run_together(model, sequences)[company // 2]
                hashes.add(sha256(rows[len(chunks) :]))  # from the prompt's end on
        return alone, hashes

    with hostring.init(0, 1) as comm:
        (alone, _) = run(comm)
    for here, hashes in run_ranks(world_size, run):
        assert here == alone
        assert hashes == {alone}


def test_every_sequence_of_a_packed_step_has_its_own_logits(packable: Path) -> None:
    """One of them reads more than 256 cached positions, beside short ones."""
    needs_ggml()
    model = build_packed(GgufCheckpoint(packable), hostring.init(0, 1), max_seq=600, batch_invariant=True)
    sequences = [*others(3, 4), [list(range(300)), [1], list(range(280)), [2]]]
    together = run_together(model, sequences)
    for sequence, rows in zip(sequences, together, strict=True):
        np.testing.assert_array_equal(run_together(model, [sequence])[0], rows)
    assert len({sha256(rows[-1:]) for rows in together}) == len(sequences)


def test_a_packed_step_reduces_all_rows_at_once(packable: Path, run_ranks: Ranks) -> None:
    needs_ggml()

    def run(comm: hostring.Comm) -> int:
        model = build_packed(GgufCheckpoint(packable), comm, max_seq=64, hash_activations=True)
        rows = [(model.new_cache(), ids) for ids in ([1, 2, 3], [4], [5])]
        before = comm.counters.calls["all_reduce"]
        model.step_rows(rows)
        assert model.reducer.audit is not None
        assert model.reducer.audit.wrong_steps == 0
        return comm.counters.calls["all_reduce"] - before

    assert run_ranks(2, run) == [4, 4]  # two layers


@pytest.mark.parametrize(("watched", "n_reductions"), [(False, 0), (True, 4)])
def test_a_packed_rank_alone_reduces_only_what_is_watched(watched: bool, n_reductions: int, packable: Path) -> None:
    needs_ggml()
    comm = hostring.init(0, 1)
    model = build_packed(GgufCheckpoint(packable), comm, max_seq=64, hash_activations=watched)
    model.step_rows([(model.new_cache(), [1, 2, 3])])
    assert comm.counters.calls.get("all_reduce", 0) == len(model.forward.reduced_elements) == n_reductions


def differ(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.array(a) - np.array(b)) / np.linalg.norm(b))


@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "float32"), ("bfloat16", "float16")])
def test_exact_rows_are_those_of_each_sequence_alone(dtypes: tuple[str, ...], tmp_path: Path, run_ranks: Ranks) -> None:
    path = save(hf_model("qwen3-untied-biased"), tmp_path)
    sequences = [[[p % 101 for p in piece] for piece in s] for s in (*others(2, 4), pieces_of([]))]

    def run(comm: hostring.Comm) -> int:
        model = build(open_checkpoint(path), comm, dtype=DTYPES[dtypes[comm.rank]], hash_activations=True)
        before = comm.counters.calls["all_reduce"]
        together = run_together(model, sequences)
        counted = comm.counters.calls["all_reduce"] - before
        for sequence, rows in zip(sequences, together, strict=True):
            cache = model.new_cache()
            alone = [whole(model, model.step(torch.tensor([piece]), cache))[0] for piece in sequence]
            assert differ(rows, alone) < (1e-5 if dtypes[0] == "float32" else 0.03)
        assert model.reducer.audit is not None
        assert model.reducer.audit.wrong_steps == 0
        return counted

    assert run_ranks(len(dtypes), run) == [4 * 2 * 3] * len(dtypes)  # steps, regions, layers


def test_a_packed_rank_beside_an_exact_one_takes_the_same_rows(packable: Path, run_ranks: Ranks) -> None:
    needs_ggml()
    sequences = [*others(2, 4), pieces_of([])]

    def run(comm: hostring.Comm) -> tuple[str, Any]:
        options: dict[str, Any] = {"max_seq": 256, "hash_activations": True}
        checkpoint = GgufCheckpoint(packable)
        plan = units_of(checkpoint).shares(checkpoint.config, comm.world_size)
        if comm.rank == 1:
            model = build_packed(checkpoint, comm, plan=plan, beside_exact=True, **options)
        else:
            model = build(checkpoint, comm, plan=plan, dtype=DTYPES[("bfloat16", "", "float32")[comm.rank]], **options)
        found = run_together(model, sequences)
        assert model.reducer.audit is not None
        return model.reducer.audit.sha256, found

    hashes, logits = zip(*run_ranks(3, run), strict=True)
    assert len(set(hashes)) == 1
    exact = run_together(build(GgufCheckpoint(packable), hostring.init(0, 1), max_seq=256), sequences)
    for ours, theirs in zip(logits[0], exact, strict=True):
        assert differ(ours, theirs) < 0.06


def test_a_step_that_cannot_be_taken_changes_nothing(packable: Path) -> None:
    needs_ggml()
    model = build_packed(GgufCheckpoint(packable), hostring.init(0, 1), max_seq=4)
    short, full = model.new_cache(), model.new_cache()
    model.step_rows([(short, [1]), (full, [1, 2, 3])])
    for rows, message in (
        ([], "at least one sequence"),
        ([(short, [1]), (short, [2])], "a cache stands in a step twice"),
        ([(short, [1]), (full, [])], "sequence 1 of the step has no token"),
        ([(short, [1]), (full, [2, 3])], "KV cache holds 4 positions, 3 are taken and 2 more are needed"),
    ):
        with pytest.raises(ValueError, match=message):
            model.step_rows(rows)
        assert (short.length, full.length) == (1, 3)


@pytest.mark.parametrize("exact", [False, True])
def test_every_row_has_the_logits_of_a_text_that_ends_there(exact: bool, packable: Path, run_ranks: Ranks) -> None:
    needs_ggml()
    texts = [[4, 5], [1], PROMPT]

    def run(comm: hostring.Comm) -> None:
        checkpoint = GgufCheckpoint(packable)
        model = build(checkpoint, comm, max_seq=64) if exact else build_packed(checkpoint, comm, max_seq=64)
        rows = whole(model, model.step_rows([(model.new_cache(), ids) for ids in texts], every=True))
        ends = [text[: n + 1] for text in texts for n in range(len(text))]
        assert len(rows) == len(ends)
        for row, ids in zip(rows, ends, strict=True):
            expected = whole(model, model.step(torch.tensor([ids]), model.new_cache()))[0]
            np.testing.assert_allclose(row, expected, rtol=1e-4 if exact else 0, atol=1e-4 if exact else 0)

    run_ranks(2, run)
