"""What the processes of decode.py do: load a model, say so, then generate once for every line on standard input."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def rank(options: argparse.Namespace) -> None:
    """One rank of hostring, on one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    import hostring
    from hostring.integrations.llm import Sampling, load_model

    torch.set_num_threads(1)
    with hostring.init(topology=options.topology, transport=options.transport) as comm:
        dtypes = options.dtypes.split(",")
        dtype = dtypes[comm.rank % len(dtypes)]
        model = load_model(options.model, comm, dtype=dtype, compute=options.compute)
        ids = _prompt(model.prompt_ids(options.prompt), options.prompt_tokens)
        _say({"ready": comm.rank, "ids": ids, "compute": model.sharded.forward.compute})
        for line in sys.stdin:
            _move_to(json.loads(line)["cores"])
            done = model.generate(ids, Sampling(), max_tokens=options.tokens)
            _say({"tokens": done.tokens, **done.stats.as_dict()})


def llama_cpp(options: argparse.Namespace) -> None:
    """llama.cpp on the same file, on as many threads as `options.threads`."""
    import xllamacpp

    from hostring.integrations.llm.evidence.llama_cpp import silent

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = options.model, 4096, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    with silent():
        server = xllamacpp.Server(params)
    _say({"ready": 0})
    for line in sys.stdin:
        asked = json.loads(line)
        _move_to(asked["cores"])
        request = {"prompt": asked["ids"], "n_predict": options.tokens, "temperature": 0, "cache_prompt": False}
        with silent():
            answer = server.handle_completions(request)
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        prefill_s = timings["prompt_ms"] / 1e3
        _say(
            {
                "decode_tokens_per_s": timings["predicted_per_second"],
                "prefill_tokens_per_s": timings["prompt_per_second"],
                "generated_tokens": timings["predicted_n"],
                "ttft_s": prefill_s,
            }
        )


def _prompt(ids: list[int], n_tokens: int) -> list[int]:
    """`ids`, again and again, until there are `n_tokens`; as they are where that is 0."""
    return (ids * (n_tokens // len(ids) + 1))[:n_tokens] if n_tokens else ids


def _move_to(cores: list[int] | None) -> None:
    """Every thread of this process on these cores."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), cores)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)
