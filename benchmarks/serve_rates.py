"""Rates of `hostring serve` with many streams: `python benchmarks/serve_rates.py MODEL`. Arguments after `--` go to it.

First, tokens per second of 1, 2, 4, ... streams at a time, over HTTP. Then, how long a stream waits for its next token
while a long prompt comes in beside it, beside what it waits without one. The last line is the summary, as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from typing import Any

from serve_process import Server
from serve_requests import Asked, Connection, answer

from hostring.integrations.llm.serve.options import ServeOptions

STREAMS = (1, 2, 4, 8, 16)
TOKENS = 64  # of each stream


def stream_of(prompt: str, tokens: int) -> Asked:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return Asked("/v1/completions", body)


def rate(server: Server, count: int, tokens: int) -> float:
    """Tokens per second of all streams together, from the first step that writes to the last."""
    before = server.metrics()["hostring_generated_tokens_total"]
    clients = [
        threading.Thread(target=answer, args=(server.url, stream_of(f"{n} ships", tokens))) for n in range(count)
    ]
    began = time.monotonic()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    seconds = time.monotonic() - began
    return (server.metrics()["hostring_generated_tokens_total"] - before) / seconds


def gaps(server: Server, tokens: int, beside: Asked | None) -> list[float]:
    """Seconds between the pieces of a stream, while `beside` is answered, where it is asked for."""
    connection = Connection(server.url, stream_of("One ship", tokens))
    times: list[float] = []
    other: threading.Thread | None = None
    started = ended = 0.0
    for piece in connection.pieces():
        times.append(piece.at)
        if beside is not None and other is None and len(times) == 8:
            started = piece.at
            other = threading.Thread(target=answer, args=(server.url, beside))
            other.start()
        if other is not None and not ended and not other.is_alive():
            ended = piece.at
    connection.close()
    if other is not None:
        other.join()
    last = ended or times[-1]
    return [b - a for a, b in itertools.pairwise(times) if beside is None or started <= a <= last]


def shown(waits: list[float]) -> dict[str, Any]:
    ordered = sorted(waits)
    at = min(len(ordered) - 1, int(0.99 * len(ordered)))
    return {"median_s": statistics.median(ordered), "p99_s": ordered[at], "longest_s": ordered[-1], "n": len(ordered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream")
    parser.add_argument(
        "--prompt-words", type=int, default=820, help="of the long prompt, of which each second one is a number"
    )
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, serve = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    with Server(given.model, "--local", str(given.ranks), "--streams", str(max(STREAMS)), *serve) as server:
        rate(server, 2, 8)  # what is made once
        rates = {count: rate(server, count, given.tokens) for count in STREAMS}
        before = shown(gaps(server, given.tokens, None))
        prompt = " ".join(f"word {n}" for n in range(given.prompt_words // 2))
        during = shown(gaps(server, 4 * given.tokens, stream_of(prompt, 1)))
    limit_s = ServeOptions.step_limit_s
    print(json.dumps({"tokens_per_s": rates, "alone": before, "beside a long prompt": during, "limit_s": limit_s}))


if __name__ == "__main__":
    main()
