"""A conversation: the second question sees the first, and what both have in common is computed once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llm_models import hf_model, save

import hostring
from hostring.integrations.llm import Conversation, Sampling, load_model
from hostring.integrations.llm.demo.job import BUNDLED

Ranks = Callable[..., list[Any]]
GGUF = os.environ.get("HOSTRING_TEST_GGUF")


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_second_question_sees_the_first_and_reuses_it(world_size: int, run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        model, head = load_model(BUNDLED, comm), comm.rank == 0
        talk = Conversation(model)
        first = talk.ask("In the beginning" if head else None, max_tokens=12)
        second = talk.ask("And God said" if head else None, max_tokens=12)
        whole = model.tokenizer.encode("In the beginning") + first.tokens
        whole += model.tokenizer.encode_bare("\nAnd God said")
        fresh = model.generate(whole, max_tokens=12)
        alone = model.generate("And God said", max_tokens=12)
        talk.restart()
        return first, second, fresh, alone, talk.ask("And God said" if head else None, max_tokens=12)

    for first, second, fresh, alone, restarted in run_ranks(world_size, run):
        assert second.tokens == fresh.tokens
        assert second.tokens != alone.tokens
        assert second.stats.prompt_tokens == fresh.stats.prompt_tokens
        # All that was fed: the prompt, and every token of the answer but the last.
        assert second.stats.reused_tokens == first.stats.prompt_tokens + 11
        assert second.stats.prefill_bytes == second.stats.expected_prefill_bytes
        assert restarted.tokens == alone.tokens
        assert restarted.stats.reused_tokens == 0


def test_messages_go_through_the_template_with_the_answers(tmp_path: Path, run_ranks: Ranks) -> None:
    path = save(hf_model("qwen3-tied"), tmp_path)

    def run(comm: hostring.Comm) -> Any:
        model = load_model(path, comm)
        model.tokenizer.eos_ids = frozenset()
        talk = Conversation(model)
        first = talk.ask("God", max_tokens=5)
        ids = talk.ids("the heaven")
        return first.text, ids, model.tokenizer.chat([*talk.messages, {"role": "user", "content": "the heaven"}])

    (text, ids, wanted) = run_ranks(1, run)[0]
    assert ids == wanted
    assert text
    assert len(ids) > 10


def test_a_refused_question_is_forgotten_and_the_group_lives(run_ranks: Ranks) -> None:
    def run(comm: hostring.Comm) -> Any:
        talk, head = Conversation(load_model(BUNDLED, comm, max_seq=40)), comm.rank == 0
        first = talk.ask("In the beginning" if head else None, max_tokens=8)
        for bad, message in (("long " * 60, "don't fit the KV cache of 40"), ("\ud83d", "half of a surrogate pair")):
            with pytest.raises(ValueError, match=message):
                talk.ask(bad if head else None)
        assert len(talk.messages) == (2 if head else 0)
        return first, talk.ask("And" if head else None, max_tokens=4)

    for first, second in run_ranks(2, run):
        assert second.stats.reused_tokens == first.stats.prompt_tokens + 7


def test_ranks_with_different_memories_agree_on_what_all_have(run_ranks: Ranks) -> None:
    """As after a failure that only some ranks noticed."""

    def run(comm: hostring.Comm) -> Any:
        model, head = load_model(BUNDLED, comm), comm.rank == 0
        talk = Conversation(model)
        talk.ask("In the beginning" if head else None, max_tokens=8)
        if comm.rank == 1:
            talk.forget_cache()
        second = talk.ask("And God" if head else None, max_tokens=8)
        return second.stats.reused_tokens, second.tokens

    results = run_ranks(2, run)
    assert results[0] == results[1]
    assert results[0][0] == 0


def chat(lines: str, *args: str) -> str:
    command = [sys.executable, "-m", "hostring", "demo", "--chat", "--temperature", "0", "--dtypes", "f32", *args]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_chat_on_the_command_line_remembers_until_it_is_told_not_to(tmp_path: Path) -> None:
    import json

    file = tmp_path / "out.json"
    shown = chat(
        "In the beginning\nIn the beginning\n/new\nIn the beginning\n", "--max-tokens", "12", "--json", str(file)
    )
    first, second, third = json.loads(file.read_text(encoding="utf-8"))["turns"]
    assert first["tokens"] == third["tokens"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + 11
    assert second["reused_tokens"] == first["prompt_tokens"] + 11
    assert "a new conversation" in shown


@pytest.mark.skipif(GGUF is None, reason="HOSTRING_TEST_GGUF names no file")
@pytest.mark.timeout(600)
def test_the_real_model_remembers_a_name() -> None:
    with hostring.init(0, 1) as comm:
        talk = Conversation(load_model(str(GGUF), comm, max_seq=256))
        talk.ask("My name is Zebulon. Please say hello to me.", Sampling(), max_tokens=24)
        answer = talk.ask("What is my name?", Sampling(), max_tokens=24)
    assert "Zebulon" in answer.text
    assert answer.stats.reused_tokens > 20
