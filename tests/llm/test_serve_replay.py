"""With --replay, texts that a lost rank broke off go on when it is back, and are what they would have been."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from running import Running
from serving_ranks import DEADLINE_S, ask

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.launch.silence import DEFAULT_SILENCE_S

pytestmark = pytest.mark.faults

NOTICED_S = 2.0  # from the death of a rank to the line that names it
LONG = "And the LORD spake unto Moses, and unto Aaron, and unto the children of Israel, saying, " * 9
TOKENS = 220


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*args: str) -> Running:
        one = Running("serve", "--port", "0", "--dtypes", "f32", "--replay", *args)
        started.append(one)
        one.wait_for(lambda out, err: out.endswith("\n") or one.process.poll() is not None)
        return one

    yield start
    for one in started:
        one.stop()


class Stream:
    """An answer that is read on a thread of its own."""

    def __init__(self, server: Running, prompt: str, **changes: Any) -> None:
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", server.out.decode())
        assert found, server.shown()
        body = {"prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True, "temperature": 0, **changes}
        self.url = found[1]
        self._request = Request(f"{self.url}/v1/completions", json.dumps(body).encode())
        self.text, self.failure = "", ""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with urlopen(self._request, timeout=DEADLINE_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.failure = self.failure or json.dumps(event.get("error", ""))
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    def end(self) -> str:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        assert self.failure in ("", '""')
        return self.text


def alone(prompt: str, tokens: int = TOKENS) -> str:
    with hostring.init(0, 1) as comm:
        return str(load_model(BUNDLED, comm).generate(prompt, Sampling(), max_tokens=tokens).text)


def lose(server: Running, rank: int, number: int) -> float:
    """Seconds until the rank was named."""
    url = re.findall(r"http://\S+", server.out.decode())[0]
    os.kill(server.rank(rank), number)
    before = time.monotonic()
    while True:
        status, why, _ = ask(f"{url}/health")
        if status == 503 and f"rank {rank} is lost" in why["reason"]:
            return time.monotonic() - before
        assert time.monotonic() - before < DEADLINE_S, server.shown()
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "dead", "phase"),
    [
        ("pp=3", 1, "decode"),
        ("pp=3", 2, "decode"),
        ("pp=3", 1, "prefill"),
        ("pp=3", 2, "prefill"),
        ("pp=2,tp=2", 1, "decode"),
        ("pp=2,tp=2", 2, "prefill"),
        ("pp=2,tp=2", 3, "decode"),
        ("even", 1, "decode"),
    ],
)
def test_a_killed_rank_is_named_and_the_text_goes_on(
    serve: Callable[..., Running], plan: str, dead: int, phase: str
) -> None:
    """Two texts are under way, one in each phase."""
    ranks = 4 if "tp" in plan else 3
    server = serve("--local", str(ranks), "--plan", plan)
    prompts = ("In the beginning", LONG) if phase == "prefill" else ("In the beginning", "And God said")
    limits = {prompt: 40 if prompt == LONG else TOKENS for prompt in prompts}
    streams = [Stream(server, prompt, max_tokens=limits[prompt]) for prompt in prompts]
    until = time.monotonic() + DEADLINE_S
    while phase == "decode" and len(streams[0].text) < 40:
        assert time.monotonic() < until, server.shown()
        time.sleep(0.005)
    assert lose(server, dead, signal.SIGKILL) < NOTICED_S
    assert [stream.end() for stream in streams] == [alone(prompt, limits[prompt]) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("stopped", [1, 2])
def test_a_stopped_stage_is_named_and_the_text_goes_on(serve: Callable[..., Running], stopped: int, phase: str) -> None:
    """A rank that stands still gives no sign of life."""
    server = serve("--local", "3", "--plan", "pp=3")
    prompt, tokens = (LONG, 40) if phase == "prefill" else ("In the beginning", TOKENS)
    stream = Stream(server, prompt, max_tokens=tokens)
    until = time.monotonic() + DEADLINE_S
    while phase == "decode" and len(stream.text) < 40:
        assert time.monotonic() < until, server.shown()
        time.sleep(0.005)
    seconds = lose(server, stopped, signal.SIGSTOP)
    print(f"rank {stopped} stopped in {phase}: named after {seconds:.2f} s")
    assert seconds < DEFAULT_SILENCE_S + NOTICED_S
    assert stream.end() == alone(prompt, tokens)
