#!/usr/bin/env python3
"""Perplexity of a GGUF model on a page of text: packed, exact, and llama.cpp on the same file.

    python benchmarks/perplexity.py MODEL.gguf --text LICENSE --tokens 400

Packed is measured twice: in steps of a few rows, which multiply by the blocks themselves, and in one step of all rows,
which may dequantise them. llama.cpp is asked for the most likely tokens after each beginning of the text; where the
right one is not among them, the least likely of these counts, for all ways alike.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import hostring
from hostring.integrations.llm import load_model
from hostring.integrations.llm.evidence.llama_cpp import silent

CHUNK = 16  # rows of a short step
TOP = 2000  # tokens that llama.cpp tells of


def log_probabilities(model: Any, ids: Sequence[int], chunk: int) -> npt.NDArray[np.float64]:
    """Of each token after the first, given those before it, by every rank's share of the vocabulary: one rank here."""
    cache, rows = model.sharded.new_cache(), []
    for start in range(0, len(ids) - 1, chunk):
        part = list(ids[start : min(start + chunk, len(ids) - 1)])
        rows.append(model.sharded.step_rows([(cache, part)], every=True).numpy().copy())
    logits = np.concatenate(rows).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    least = -np.sort(-log_p, axis=1)[:, TOP - 1]
    return np.maximum(log_p[np.arange(len(logits)), list(ids[1:])], least)


def of_llama_cpp(path: str, ids: Sequence[int]) -> npt.NDArray[np.float64]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = path, 4096, 1
    found = []
    with silent():
        server = xllamacpp.Server(params)
        for n in range(1, len(ids)):
            request = {"prompt": list(ids[:n]), "n_predict": 1, "temperature": 0, "n_probs": TOP, "cache_prompt": True}
            answer = server.handle_completions(request)
            told = json.loads(answer) if isinstance(answer, str) else answer
            after = told["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            top = {one["id"]: one["logprob"] for one in after}
            found.append(top.get(ids[n], min(top.values())))
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=Path("LICENSE"))
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    with hostring.init(0, 1) as comm:
        packed = load_model(options.model, comm, compute="packed", max_seq=options.tokens)
        ids = packed.tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
        found = {
            f"packed, {CHUNK} rows a step": log_probabilities(packed, ids, CHUNK),
            "packed, all rows": log_probabilities(packed, ids, len(ids)),
        }
        exact = load_model(options.model, comm, compute="exact", max_seq=options.tokens)
        found["exact, float32"] = log_probabilities(exact, ids, len(ids))
        found["llama.cpp"] = of_llama_cpp(options.model, ids)
    base = found["exact, float32"]
    table = Table("way", "perplexity", "to exact", "mean difference of a token's log p")
    for name, log_p in found.items():
        figures = np.exp(-log_p.mean()), np.exp(base.mean() - log_p.mean()), np.abs(log_p - base).mean()
        table.add_row(name, f"{figures[0]:.3f}", f"{figures[1]:.4f}", f"{figures[2]:.4f}")
    Console().print(f"{len(ids)} tokens of {options.text.name}", table)


if __name__ == "__main__":
    main()
