"""What HTTP costs one stream: tokens per second of `hostring serve` beside those of `hostring demo` on the same plan.

    python benchmarks/serve_overhead.py MODEL.gguf --rounds 5

Both run in turn, on as many rank processes of this machine, and write the same greedy answer. Someone looks at the page
meanwhile: /cluster is asked for once a second. Shown are medians, the best of each, their ratios, and the CPU time that
each token costs in the head's other threads than that of the steps. Believe the ratios only on an idle machine; the CPU
times bear some company.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

PROMPT = "Write a long story about a lighthouse keeper, a storm and a ship."
WAIT_S = 300.0


def written(port: int, tokens: int) -> tuple[float, int]:
    """Tokens per second of one stream after its first token, and how many came."""
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "temperature": 0, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    times, text = [], b""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
        connection.sendall(head.encode() + body)
        while b"data: [DONE]" not in text[-64:]:
            piece = connection.recv(1 << 16)
            if not piece:
                raise RuntimeError(f"the server ended the stream: {text[-300:]!r}")
            text += piece
            times += [time.perf_counter()] * piece.count(b'{"content":')
    usage = json.loads(text.rpartition(b'"usage":')[2].partition(b"}}")[0] + b"}}")
    return (usage["completion_tokens"] - 1) / (times[-1] - times[1]), usage["completion_tokens"]


def look(port: int, end: threading.Event) -> None:
    """As an open page does."""
    while not end.wait(1.0):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/cluster", timeout=WAIT_S).read()


def head_of(server: int) -> int:
    """The process of rank 0."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text(encoding="ascii").split()
    return next(int(c) for c in children if b"\0RANK=0\0" in b"\0" + Path(f"/proc/{c}/environ").read_bytes())


def cpu_of_others(process: int) -> float:
    """CPU seconds of all its threads but the first."""
    total = 0
    for thread in os.listdir(f"/proc/{process}/task"):
        if int(thread) != process:
            stat = Path(f"/proc/{process}/task/{thread}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            total += int(stat[11]) + int(stat[12])
    return total / os.sysconf("SC_CLK_TCK")


def demo(options: argparse.Namespace) -> float:
    """Tokens per second without HTTP."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        what = ["--model", options.model, "--ranks", str(options.local), "--prompt", PROMPT, "--temperature", "0"]
        more = ["--max-tokens", str(options.tokens), "--no-controls", "--json", str(found)]
        argv = [sys.executable, "-m", "hostring", "demo", *what, *more]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=WAIT_S)
        return float(json.loads(found.read_text(encoding="utf-8"))["decode_tokens_per_s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--local", type=int, default=2, help="rank processes")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    argv = [sys.executable, "-m", "hostring", "serve", options.model, "--local", str(options.local), "--port", "0"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    end = threading.Event()
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().rpartition(":")[2])
        threading.Thread(target=look, args=(port, end), daemon=True).start()
        written(port, 16)
        head, over, alone, cpu, count = head_of(server.pid), list[float](), list[float](), 0.0, 0
        for _ in range(options.rounds):
            before = cpu_of_others(head)
            rate, n = written(port, options.tokens)
            cpu, count = cpu + cpu_of_others(head) - before, count + n
            over.append(rate)
            alone.append(demo(options))
            print(f"over HTTP {over[-1]:.1f} tokens/s, without {alone[-1]:.1f}", flush=True)
    finally:
        end.set()
        server.send_signal(signal.SIGINT)
        server.wait(10)
    middle = statistics.median(over) / statistics.median(alone)
    print(f"medians {statistics.median(over):.1f} and {statistics.median(alone):.1f} tokens/s, ratio {middle:.3f}")
    print(f"best    {max(over):.1f} and {max(alone):.1f} tokens/s, ratio {max(over) / max(alone):.3f}")
    print(f"CPU of the head's other threads: {1e3 * cpu / count:.3f} ms per token")


if __name__ == "__main__":
    main()
