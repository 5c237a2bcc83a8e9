"""Requests for a running `hostring serve`, and the text of its answer: for `serve_soak.py` and `serve_rates.py`."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 600.0  # for the next byte of an answer
_TOPICS = ("the sea", "a short story about a goat", "how bread is made", "why the sky is blue", "the moon", "old maps")
_STORY = "the river runs past seven grey stones and a mill where nobody has worked since the war ended"
_WORDS = _STORY.split()


@dataclass(frozen=True)
class Asked:
    """A request, as a client sends it."""

    route: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))


def varied_requests(count: int, seed: int) -> list[Asked]:
    """Chat and completions, streamed and whole, greedy and seeded, short and long; many begin alike."""
    rng = random.Random(seed)
    return [_one(rng) for _ in range(count)]


def _one(rng: random.Random) -> Asked:
    topic = rng.choice(_TOPICS)
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 12, 24, 48)), "stream": rng.random() < 0.6}
    if rng.random() < 0.5:
        body["temperature"] = 0
    else:
        body |= {"temperature": 0.8, "seed": rng.randrange(1000), "top_k": rng.choice((0, 40)), "top_p": 0.95}
    if rng.random() < 0.2:
        body["stop"] = [".", "\n\n"]
    if rng.random() < 0.15:
        body["frequency_penalty"] = 0.5
    if rng.random() < 0.5:
        messages = [{"role": "user", "content": f"Tell me about {topic}."}]
        for _ in range(rng.choice((0, 0, 1, 2))):  # a conversation that goes on
            messages += [{"role": "assistant", "content": _words(rng, 20)}, {"role": "user", "content": "Go on."}]
        return Asked("/v1/chat/completions", {**body, "messages": messages})
    return Asked("/v1/completions", {**body, "prompt": f"About {topic}: " + _words(rng, rng.choice((3, 30, 150, 400)))})


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


class Broken(Exception):
    """The answer was an error, or ended before it was complete."""


@dataclass(frozen=True)
class Piece:
    """Text that came, and when, by the monotonic clock."""

    text: str
    at: float


class Connection:
    """One request on a connection of its own. Closing it early is how a client goes away."""

    def __init__(self, url: str, asked: Asked) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
        self._asked = asked
        self._connection.request("POST", asked.route, json.dumps(asked.body), {"Content-Type": "application/json"})

    def close(self) -> None:
        self._connection.close()

    def pieces(self) -> Iterator[Piece]:
        """The answer's text; of one that is not streamed, a single piece.

        Raises:
            Broken: the answer is an error, or not complete.
            OSError: the connection broke.
        """
        response = self._connection.getresponse()
        if response.status != 200:
            raise Broken(f"status {response.status}: {response.read()[:300]!r}")
        if not self._asked.streams:
            yield Piece(_text_of(json.loads(response.read())["choices"]), time.monotonic())
            return
        for line in response:
            data = line.decode().rstrip("\n").removeprefix("data: ")
            if data == "[DONE]":
                return
            if line.startswith(b"data: "):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise Broken(chunk["error"]["message"])
                if text := _text_of(chunk["choices"]):
                    yield Piece(text, time.monotonic())
        raise Broken("the stream ended without [DONE]")


def _text_of(choices: Sequence[dict[str, Any]]) -> str:
    if not choices:
        return ""
    said = choices[0]
    return str(
        said["text"] if "text" in said else (said.get("delta") or said.get("message") or {}).get("content") or ""
    )


def answer(url: str, asked: Asked) -> str:
    """The whole text."""
    connection = Connection(url, asked)
    try:
        return "".join(piece.text for piece in connection.pieces())
    finally:
        connection.close()
