"""Prefill here, decode there: two ranks write what one rank writes, and what travels is checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from demo_jobs import PROMPTS, job, silent
from gguf import GGMLQuantizationType as Kind
from llm_models import packable_model, write_gguf
from ranks import side_by_side
from serving_ranks import ask, served

import hostring
from hostring.errors import HostringError
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.conversation import Conversation
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.demo.measure import measure
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.handover import transfer
from hostring.integrations.llm.handover.roles import Roles
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.packed.wide import MIN_WIDE_ROWS
from hostring.rendezvous import MemoryStore

PROMPT, TOKENS = "In the beginning", 16
IDS = [5, 17, 3, 250, 9, 9, 101]
MANY = list(range(MIN_WIDE_ROWS + 8))
CONFIG = open_checkpoint(BUNDLED).config
RunRanks = Callable[..., list[Any]]


def generated(plan: Roles | None, sampling: Sampling, comm: hostring.Comm, **options: Any) -> Generation:
    model = load_model(BUNDLED, comm, plan=plan, hash_activations=True, **options)
    return model.generate(PROMPT if comm.rank == 0 else None, sampling, max_tokens=TOKENS)


@pytest.mark.parametrize(
    ("plan", "dtype", "sampling"),
    [
        (Roles(0, 1), "float32", Sampling()),
        (Roles(1, 0), "bfloat16", Sampling()),
        (Roles(0, 1), "bfloat16", Sampling(0.8, seed=3)),
        (Roles(1, 0), "float32", Sampling(0.8, seed=3)),
    ],
)
def test_two_ranks_write_what_one_writes(plan: Roles, dtype: str, sampling: Sampling, run_ranks: RunRanks) -> None:
    (alone,) = run_ranks(1, partial(generated, None, sampling, dtype=dtype))
    found = run_ranks(2, partial(generated, plan, sampling, dtype=dtype))
    n_rows, width = found[0].stats.prompt_tokens, 2 * CONFIG.num_key_value_heads * CONFIG.head_dim
    kv_bytes = CONFIG.num_hidden_layers * (n_rows * width * (4 if dtype == "float32" else 2) + 32)
    for rank, one in enumerate(found):
        assert (one.tokens, one.text, one.stop_reason) == (alone.tokens, alone.text, alone.stop_reason)
        stats = one.stats
        assert stats.collectives_per_token == stats.prefill_collectives == 0
        assert stats.bytes_per_token == stats.expected_bytes_per_token == (8 if rank == plan.decode else 0)
        assert stats.prefill_bytes == stats.expected_prefill_bytes > 0
        assert stats.wrong_steps == 0
        assert stats.handover is not None
        assert stats.handover["kv_bytes"] == kv_bytes
        assert stats.handover["role"] == ("prefill" if rank == plan.prefill else "decode")


def test_a_second_turn_computes_what_the_other_rank_decoded(run_ranks: RunRanks) -> None:
    def talk(plan: Roles | None, comm: hostring.Comm) -> list[Any]:
        conversation = Conversation(load_model(BUNDLED, comm, plan=plan))
        first = conversation.ask(PROMPT, max_tokens=TOKENS)
        second = conversation.ask(" and then", max_tokens=TOKENS)
        return [first.tokens, second.tokens, second.stats.reused_tokens, second.stats.handover]

    (alone,) = run_ranks(1, partial(talk, None))
    for found in run_ranks(2, partial(talk, Roles(0, 1))):
        assert found[:3] == alone[:3]
        assert found[2] > 0
    prefill, decode = (found[3] for found in run_ranks(2, partial(talk, Roles(0, 1))))
    assert prefill["caught_up"] == TOKENS - 1
    assert prefill["rows"] == decode["rows"] > 0


@pytest.mark.parametrize("ways", [("packed", "packed"), ("exact", "packed"), ("packed", "exact")])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_packed_and_exact_ranks(ways: tuple[str, ...], architecture: str, tmp_path: Path, run_ranks: RunRanks) -> None:
    """Logits of packed ranks are those of one packed rank, bit for bit, in chunks, single rows and several sequences.

    Keys of llama's files turn in pairs where they are packed, and in halves elsewhere.
    """
    try:
        load()
    except Unavailable as exc:
        pytest.skip(str(exc))
    path = write_gguf(packable_model(architecture, 1, 64), tmp_path / "small.gguf", Kind.Q4_1)

    def logits(plan: Roles | None, ways: tuple[str, ...], comm: hostring.Comm) -> Any:
        part, packed = build_local(
            open_checkpoint(path), comm, ways[comm.rank], torch.device("cpu"), plan=plan, max_seq=128,
            hash_activations=False, compile=False, dtype=torch.float32,
        )  # fmt: skip
        cache, other = part.new_cache(), part.new_cache()
        steps = [part.step(torch.tensor([ids]), cache).clone() for ids in (IDS, [8], [4], IDS[:3], [6], MANY)]
        part.step(torch.tensor([IDS[:2]]), other)
        steps += part.step_rows([(cache, [7]), (other, [9, 3])]).clone().split(1)
        comm.barrier()  # the last blocks are confirmed
        return [step.numpy() for step in steps], list(packed)

    ((whole, _),) = run_ranks(1, partial(logits, None, ways[1:]))
    (there, first), (here, second) = run_ranks(2, partial(logits, Roles(0, 1), ways))
    assert first == second == [way == "packed" for way in ways]
    for a, b, expected in zip(there, here, whole, strict=True):
        has_a, has_b = (found.size > 0 and bool(np.isfinite(found).all()) for found in (a, b))
        assert has_a != has_b
        if len(set(ways)) == 1:
            np.testing.assert_array_equal(a if has_a else b, expected)
        else:
            np.testing.assert_allclose(a if has_a else b, expected, atol=0.05 * np.abs(expected).max())


def test_serve_computes_prompts_on_one_rank_and_writes_on_the_other(run_ranks: RunRanks) -> None:
    prompts = [PROMPT, "The earth was", "Speak unto"]

    def texts(comm: hostring.Comm) -> list[str]:
        model = load_model(BUNDLED, comm)
        return [model.generate(prompt, max_tokens=TOKENS).text for prompt in prompts]

    (alone,) = run_ranks(1, texts)
    with served(("float32",) * 2, how={"roles": (1, 0)}, streams=2, context=480) as serving:
        body = {"prompt": prompts, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        status, found, _ = ask(f"{serving.url}/v1/completions", body)
        assert status == 200, found
        assert [choice["text"] for choice in found["choices"]] == alone
        status, found, _ = ask(f"{serving.url}/v1/completions", {**body, "prompt": PROMPT, "logprobs": 1, "echo": True})
        assert status == 200, found
        assert len(found["choices"][0]["logprobs"]["tokens"]) > TOKENS


class _Corrupting:
    """A group in which one byte of one layer's block is changed on its way."""

    def __init__(self, comm: hostring.Comm, layer: int) -> None:
        self._comm, self._layer, self._n = comm, layer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def send(self, x: Any, dst: int, tag: int = 0, **options: Any) -> Any:
        if tag == transfer.BLOCK_TAG:
            self._n += 1
            if self._n == self._layer + 1:
                x[1000] ^= 1
        return self._comm.send(x, dst, tag, **options)


def test_a_corrupted_block_is_noticed_and_named(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> str:
        model = load_model(BUNDLED, comm, plan=Roles(0, 1))
        model.sharded.forward.handing.move_to(_Corrupting(comm, 2))
        try:
            with comm:  # as a rank's process does
                model.generate(IDS, max_tokens=TOKENS)
        except HostringError as exc:
            return str(exc)
        return "no error"

    for error in run_ranks(2, body):
        assert "keys and values of layer 2, rows 0 to 6, came corrupted from rank 0" in error


def test_a_lost_rank_is_named_with_the_text_so_far(run_ranks: RunRanks) -> None:
    def body(plan: Roles, comm: hostring.Comm) -> tuple[str, int | None, int]:
        model = load_model(BUNDLED, comm, plan=plan)
        tokens: list[int] = []

        def on_token(token: int) -> None:
            tokens.append(token)
            if comm.rank == 1 and len(tokens) == 3:
                comm.abort("the test ends this rank")

        try:
            model.generate(PROMPT, max_tokens=TOKENS, on_token=on_token)
        except HostringError as exc:
            return str(exc), exc.rank, len(tokens)
        return "no error", None, len(tokens)

    for plan in (Roles(0, 1), Roles(1, 0)):
        (error, rank, n_tokens), _ = run_ranks(2, partial(body, plan))
        assert "rank 1" in error
        assert rank == 1
        assert 2 <= n_tokens < TOKENS


@pytest.mark.parametrize("both", [(0, 1), (1, 0)])
def test_a_rank_that_comes_back_takes_its_role_again(both: tuple[int, int]) -> None:
    """The head keeps the text so far, and the next prompt is answered."""
    store, gone, work = MemoryStore(), threading.Event(), job(*PROMPTS, dtypes=("float32",) * 2, patience=20.0)
    work = replace(work, roles=both)
    comms: dict[int, hostring.Comm] = {}
    results: dict[int, Any] = {}
    pieces: list[str] = []

    def tell(kind: str, value: Any) -> None:
        if kind == "text":
            pieces.append(value)
        if len(pieces) > 5 and not gone.is_set():
            comms[1].session.group.abort()
            gone.set()

    def body(who: int, rank: int) -> None:
        if who == 2:
            assert gone.wait(40)
        try:
            with hostring.init(rank, 2, store=store, transport="tcp", timeout=20, rejoin=who == 2) as comm:
                comms.setdefault(rank, comm)
                stays = work if who != 1 else replace(work, patience=0.0)
                results[who] = measure(stays, comm, tell if rank == 0 else silent)
        except Exception as exc:
            results[who] = exc

    side_by_side([partial(body, who, rank) for who, rank in ((0, 0), (1, 1), (2, 1))])
    assert isinstance(results[1], hostring.HostringError)
    assert results[2] is None
    first, second = results[0]["turns"]
    assert first["lost"]["rank"] == 1
    assert 5 < len(first["tokens"]) < 24
    assert second["complete"]
    assert results[0]["faults"] == []
    assert results[0]["plan"]["roles"] == {"prefill": both[0], "decode": both[1]}
    assert results[0]["kv_bytes"] > 0
    assert results[0]["overlap"]["transfer_s"] > 0


def test_a_step_that_does_not_fit_is_refused_on_both(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> list[int]:
        part = load_model(BUNDLED, comm, plan=Roles(0, 1), max_seq=4).sharded
        cache = part.new_cache()
        with pytest.raises(ValueError, match="KV cache holds 4 positions"):
            part.step(torch.tensor([[1, 2, 3, 4, 5]]), cache)
        return list(part.step(torch.tensor([[1, 2, 3]]), cache).shape)

    assert run_ranks(2, body, timeout=10.0) == [[1, CONFIG.vocab_size], [1, 0]]


def test_what_one_rank_refuses_both_refuse(run_ranks: RunRanks) -> None:
    def body(comm: hostring.Comm) -> None:
        with pytest.raises(ValueError, match="only GGUF files"):
            load_model(BUNDLED, comm, plan=Roles(0, 1), compute="packed" if comm.rank else "auto")
        with pytest.raises(ValueError, match="other roles"):
            load_model(BUNDLED, comm, plan=Roles(comm.rank, 1 - comm.rank))
        with pytest.raises(ValueError, match="same bits can't be promised"):
            load_model(BUNDLED, comm, plan=Roles(0, 1), same_bits=True)

    run_ranks(2, body)
