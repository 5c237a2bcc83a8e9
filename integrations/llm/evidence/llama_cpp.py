"""llama.cpp on the same GGUF file and the same ids, in a process of its own, for comparison with one node."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

PROGRAM = "hostring.integrations.llm.evidence.llama_cpp"
MAX_S = 1200.0  # for all prompts on one number of threads


def why_absent(model: str) -> str:
    """Why llama.cpp can't take part; empty when it can."""
    if not model.lower().endswith(".gguf"):
        return "llama.cpp reads GGUF files, and the model is none"
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp is not installed"
    return ""


def measure(
    model: str, prompts: Sequence[Sequence[int]], n_tokens: int, rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Rates of llama.cpp by prompt: "length", "decode" and "prefill", with a sample per round."""
    asked = {"model": model, "prompts": prompts, "tokens": n_tokens, "rounds": rounds, "threads": threads}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=MAX_S,
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp ended with exit code {done.returncode}: {done.stderr[-400:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The process: a request on standard input, rates on standard output."""
    asked = json.loads(sys.stdin.read())
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = asked["model"], 4096, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    found = []
    with silent():
        server = xllamacpp.Server(params)
        for ids in asked["prompts"]:
            request = {"prompt": ids, "n_predict": asked["tokens"], "temperature": 0, "cache_prompt": False}
            rounds = []
            for _ in range(1 + asked["rounds"]):  # the first is cold, and not counted
                answer = server.handle_completions(request | {"ignore_eos": True})
                rounds.append((json.loads(answer) if isinstance(answer, str) else answer)["timings"])
            rates = {"decode": "predicted_per_second", "prefill": "prompt_per_second"}
            found.append({"length": len(ids), **{ours: [t[name] for t in rounds[1:]] for ours, name in rates.items()}})
    print(json.dumps(found), flush=True)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Standard error to nowhere: the library logs every request."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


if __name__ == "__main__":
    main()
