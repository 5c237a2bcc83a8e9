"""A running server, asked by OpenAI's own client and byte for byte."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import openai
import pytest
from demo_jobs import PROMPTS
from serving_ranks import ask, events, served

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.serve.serving import Serving
from hostring.integrations.llm.serve.text_request import TextRequest

GREEDY = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with served(streams=3, queue=4) as serving:
        yield serving


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What one rank alone writes, greedily."""
    with hostring.init(0, 1) as comm:
        model = load_model(BUNDLED, comm)
        return {prompt: model.generate(prompt, Sampling(), max_tokens=16).text for prompt in PROMPTS}


def idle(server: Serving) -> None:
    """Wait until nothing runs."""
    until = time.monotonic() + 20
    while server.scheduler.in_flight != (0, 0):
        assert time.monotonic() < until, server.scheduler.in_flight
        time.sleep(0.01)


def test_completions_are_what_the_model_generates(client: openai.OpenAI, texts: dict[str, str]) -> None:
    for prompt in PROMPTS:
        found = client.completions.create(model="tiny", prompt=prompt, **GREEDY)
        assert found.choices[0].text == texts[prompt]
        assert found.choices[0].finish_reason == "length"
        assert found.usage is not None
        assert found.usage.completion_tokens == 16


def test_several_at_a_time_get_what_each_gets_alone(client: openai.OpenAI, texts: dict[str, str]) -> None:
    def one(prompt: str) -> str:
        return client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, PROMPTS * 3)) == [texts[prompt] for prompt in PROMPTS] * 3


def test_a_stream_joined_is_the_whole_answer(client: openai.OpenAI, texts: dict[str, str]) -> None:
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    whole = client.chat.completions.create(model="tiny", messages=messages, **GREEDY)
    assert whole.choices[0].message.content == texts[PROMPTS[0]]
    pieces = client.chat.completions.create(model="tiny", messages=messages, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == texts[PROMPTS[0]]


def test_chunks_of_a_chat_are_exactly_as_clients_expect(server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "stream_options": {"include_usage": True}, **GREEDY}
    *found, done = events(f"{server.url}/v1/chat/completions", body)
    assert done == "[DONE]"
    chunks = [json.loads(text) for text in found]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in middle)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (first, *middle))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert all(chunk["usage"] is None for chunk in (first, *middle, last))
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 16)


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it(server: Serving, texts: dict[str, str]) -> None:
    text = texts[PROMPTS[0]]
    stop = text[10:16]  # across tokens
    body = {"prompt": PROMPTS[0], "stop": ["never there", stop], **GREEDY}
    *found, _ = events(f"{server.url}/v1/completions", body)
    choices = [json.loads(chunk)["choices"][0] for chunk in found]
    assert "".join(choice["text"] for choice in choices) == text[: text.index(stop)]
    assert choices[-1]["finish_reason"] == "stop"


def test_seeds_repeat_and_choices_differ(client: openai.OpenAI) -> None:
    def texts_of(seed: int) -> list[str]:
        found = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=12, n=3, seed=seed)
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        return [choice.text for choice in found.choices]

    first = texts_of(7)
    assert texts_of(7) == first
    assert len(set(first)) == 3


def test_a_conversation_reuses_what_is_in_the_cache(client: openai.OpenAI, server: Serving) -> None:
    idle(server)
    text = "The LORD said unto Moses, Speak unto the children of Israel"
    first = client.completions.create(model="tiny", prompt=text, **GREEDY)
    again = client.completions.create(model="tiny", prompt=text + first.choices[0].text + " and", **GREEDY)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 2  # all but the last two


def test_a_client_that_goes_away_frees_its_slot(server: Serving) -> None:
    idle(server)
    parts = urlsplit(server.url)
    before = server.scheduler.totals.ended.get("cancelled", 0)
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((str(parts.hostname), int(parts.port or 0))) as connection:
        connection.sendall(head.encode() + body)
        assert b"data:" in connection.recv(4096) + connection.recv(4096)
    idle(server)
    assert server.scheduler.totals.ended["cancelled"] == before + 1


def test_a_full_queue_says_when_to_try_again(server: Serving) -> None:
    idle(server)
    long = TextRequest((5, 6, 7), 400, ignore_eos=True)
    taken = server.scheduler.submit([long] * 7, [lambda event: None] * 7)
    try:
        status, found, headers = ask(f"{server.url}/v1/completions", {"prompt": "so"})
        assert (status, found["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) > 0
    finally:
        for sequence in taken:
            server.scheduler.cancel(sequence)
    idle(server)
    assert ask(f"{server.url}/v1/completions", {"prompt": "so", "max_tokens": 1})[0] == 200


def test_the_page_asks_no_other_host(server: Serving) -> None:
    """Neither by its rules nor in its files."""
    wanted = {"/"}
    seen: set[str] = set()
    while wanted - seen:
        path = (wanted - seen).pop()
        seen.add(path)
        status, text, headers = ask(f"{server.url}{path}")
        assert status == 200, path
        assert headers["content-security-policy"].startswith("default-src 'self';")
        found = re.findall(r'(?:src|href)="([^"]+)"|from "\./([^"]+)"', text.decode())
        wanted |= {f"/{a or b}" for a, b in found}
        assert set(re.findall(r"https?://[\w.]+", text.decode())) <= {"http://www.w3.org"}, path
    assert {"/", "/main.js", "/style.css", "/chat.js"} <= seen


def test_the_cluster_view_has_every_rank(server: Serving) -> None:
    until = time.monotonic() + 20
    while not (found := ask(f"{server.url}/cluster")[1])["ranks"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert sum(rank["share"] for rank in found["ranks"]) == pytest.approx(1)
    assert all(set(rank["sent_per_s"]) == {"0", "1", "2"} - {str(rank["rank"])} for rank in found["ranks"])
    assert (found["model"], found["why_not"], found["lost"]) == ("tiny", "", [])


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Ur", "Nineveh"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_call_of_a_function_has_the_arguments_of_its_schema(client: openai.OpenAI, choice: Any) -> None:
    """Whole and streamed, though this model has never seen a tool."""
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Will it rain?"}], "tools": [WEATHER]}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": 3, "max_tokens": 120}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, arguments["city"] in ("Ur", "Nineveh"), 1 <= arguments["days"] <= 9) == (
        "weather",
        True,
        True,
    )
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **asked)]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert (pieces[0].index, pieces[0].function.name, pieces[0].function.arguments) == (0, "weather", "")
    assert pieces[0].id
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert not any(delta.content for delta in deltas)


def test_an_answer_is_json_of_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    schema["additionalProperties"] = False
    found = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "How many?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "count", "schema": schema}},
        max_tokens=60,
        n=2,
    )
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        assert list(json.loads(choice.message.content or "")) == ["n"]


def test_probabilities_are_those_of_the_model(client: openai.OpenAI) -> None:
    """With bias and penalties, too: they change what is chosen, and not what is told of it."""
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 6,
        "logprobs": True,
    }
    found = client.chat.completions.create(top_logprobs=5, temperature=0, **asked).choices[0].logprobs
    assert found is not None
    assert found.content is not None
    for one in found.content:
        assert [top.logprob for top in one.top_logprobs] == sorted(
            (top.logprob for top in one.top_logprobs), reverse=True
        )
        assert (one.token, one.logprob) == (one.top_logprobs[0].token, one.top_logprobs[0].logprob)
        assert bytes(one.bytes or ()).decode() == one.token
    biased = client.chat.completions.create(logit_bias={"5": 100}, temperature=0, top_logprobs=1, **asked)
    assert biased.choices[0].logprobs is not None
    assert biased.choices[0].logprobs.content is not None
    first, *others = biased.choices[0].logprobs.content
    assert {one.token for one in others} == {first.token}
    assert first.top_logprobs[0].token == found.content[0].token
    assert first.logprob < first.top_logprobs[0].logprob


def test_an_echo_tells_the_probabilities_of_the_prompt(client: openai.OpenAI) -> None:
    """As harnesses want them: those of a text's own continuation are what the model told while it wrote it."""
    written = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=5, temperature=0, logprobs=1)
    text = PROMPTS[0] + written.choices[0].text
    echoed = client.completions.create(model="tiny", prompt=text, max_tokens=0, echo=True, logprobs=1)
    choice = echoed.choices[0]
    assert (choice.text, choice.finish_reason) == (text, "length")
    assert choice.logprobs is not None
    assert written.choices[0].logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert "".join(choice.logprobs.tokens) == text
    assert choice.logprobs.token_logprobs[-5:] == pytest.approx(written.choices[0].logprobs.token_logprobs, abs=1e-4)
    offsets = choice.logprobs.text_offset
    assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == choice.logprobs.tokens


def test_a_stream_that_waits_shows_that_it_lives(server: Serving) -> None:
    """Its headers, the role and then comments come while all places are taken."""
    idle(server)
    taken = server.scheduler.submit([TextRequest((5, 6, 7), 500, ignore_eos=True)] * 6, [lambda event: None] * 6)
    try:
        body = {"messages": [{"role": "user", "content": "so"}], "stream": True, "max_tokens": 2}
        with urlopen(Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode()), timeout=30) as stream:
            assert b'"role":"assistant","content":""' in stream.readline()
            assert [stream.readline(), stream.readline()] == [b"\n", b": keepalive\n"]
    finally:
        for sequence in taken:
            server.scheduler.cancel(sequence)
    idle(server)
