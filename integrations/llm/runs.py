"""One measured generation on every rank of a group, and the controls that say what it is worth."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import numpy as np

import hostring
from hostring import Comm
from hostring.integrations.llm.generate import HEAD_RANK, Generation, Model, load_model
from hostring.integrations.llm.job import BUNDLED, Job
from hostring.integrations.llm.sampling import Sampling
from hostring.integrations.llm.verdict import faults, statement

Tell = Callable[[str, Any], None]
"""Called with what happens: ("stage", name), ("prompt", text), ("text", piece), ("result", figures)."""

Report = dict[str, Any]

_WARM_UP_TOKENS = 4  # the first steps allocate, build their messages and wake the kernels
_PATIENCE = 3600.0  # seconds that ranks wait while another one runs its control alone


def measure(job: Job, comm: Comm, tell: Tell) -> dict[str, Any] | None:
    """Generate, run the controls, and compare. A collective: every rank calls it.

    Returns:
        all figures on the head rank, None elsewhere.
    """
    tell("stage", "loading")
    run = _Run(job, comm, tell)
    tell("stage", "ready")
    comm.barrier()
    tell("prompt", {"text": run.prompt, "continued": run.continued})
    generation, reports = run.generation(job.dtypes, streamed=True)
    controls: dict[str, Any] = {}
    if job.controls:
        tell("stage", "controls")
        controls = {"one_rank": _one_rank_each(run), "same_dtype": _same_dtype(run, generation, reports)}
    result = _figures(run, generation, reports, controls) if comm.rank == HEAD_RANK else None
    comm.barrier()
    if result is not None:
        tell("result", result)
    return result


class _Run:
    """What all generations of one measurement share. `continued`: the model continues the prompt rather than answer it."""

    def __init__(self, job: Job, comm: Comm, tell: Tell) -> None:
        self.job, self.comm, self.tell = job, comm, tell
        self.sampling = Sampling(job.temperature, job.top_k, job.top_p, job.seed)
        self._loaded: tuple[tuple[str, ...], Model] | None = None
        model = self.model(comm, job.dtypes)
        self.continued = model.tokenizer.template is None
        self.prompt = job.prompt or ("In the beginning" if self.continued else "Why is the sky blue? Answer in two sentences.")
        self.ids = model.prompt_ids(self.prompt)

    def model(self, comm: Comm, dtypes: tuple[str, ...]) -> Model:
        """This rank's part of the model; the last one asked for is kept, others are given up first."""
        if self._loaded is None or self._loaded[0] != dtypes or self._loaded[1].comm is not comm:
            self._loaded = None
            gc.collect()
            self._loaded = dtypes, load_model(self.job.model, comm, dtype=dtypes[comm.rank], hash_activations=True)
        return self._loaded[1]

    def generation(self, dtypes: tuple[str, ...], comm: Comm | None = None, streamed: bool = False) -> tuple[Generation, list[Report]]:
        """Generate on all ranks of `comm`, after a short warm-up. Reports come by rank, on the head rank only."""
        comm = self.comm if comm is None else comm
        model = self.model(comm, dtypes)
        model.generate(self.ids, self.sampling, max_tokens=_WARM_UP_TOKENS)
        on_text: Callable[[str], None] = (lambda piece: self.tell("text", piece)) if streamed else (lambda piece: None)
        found = model.generate(self.ids, self.sampling, max_tokens=self.job.max_tokens, on_text=on_text)
        report = {"rank": comm.rank, "dtype": dtypes[comm.rank], **found.stats.as_dict()}
        return found, _gather(comm, report)


def _gather(comm: Comm, report: Report) -> list[Report]:
    """The reports of all ranks, by rank, on the head rank; nothing elsewhere."""
    payload = np.frombuffer(json.dumps(report).encode(), np.uint8)
    sizes = comm.all_gather(np.array([payload.size], np.int64)).ravel().tolist()  # (world_size,)
    joined = comm.gather(payload, root=HEAD_RANK, counts=sizes)
    if joined is None:
        return []
    ends = np.cumsum(sizes)
    return [json.loads(joined[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def _one_rank_each(run: _Run) -> list[dict[str, Any]]:
    """The whole model on one rank alone, once for each dtype of the job, one after the other. On the head rank."""
    found: list[dict[str, Any]] = []
    for dtype in dict.fromkeys(run.job.dtypes):
        owner = run.job.dtypes.index(dtype)
        control: dict[str, Any] = {}
        if run.comm.rank == owner:
            with hostring.init(0, 1) as alone:
                generation, reports = run.generation((dtype,), alone)
            control = _control(generation, reports) | {"rank": owner, "dtype": dtype}
        run.comm.barrier(timeout=_PATIENCE)
        everyone = _gather(run.comm, control)
        found += everyone[owner : owner + 1]
    return found


def _same_dtype(run: _Run, generation: Generation, reports: list[Report]) -> dict[str, Any]:
    """All ranks with the dtype of rank 0. When the job is just that, it is its own control."""
    dtype = run.job.dtypes[0]
    alike = (dtype,) * run.comm.world_size
    if alike != run.job.dtypes:
        generation, reports = run.generation(alike)
    return _control(generation, reports) | {"dtype": dtype, "is_the_run_itself": alike == run.job.dtypes}


def _control(generation: Generation, reports: list[Report]) -> dict[str, Any]:
    names = ("decode_tokens_per_s", "ttft_s", "prefill_tokens_per_s")
    figures = {name: getattr(generation.stats, name) for name in names}
    return {**figures, "tokens": generation.tokens, "activation_sha256": [r["activation_sha256"] for r in reports]}


def _figures(run: _Run, generation: Generation, reports: list[Report], controls: dict[str, Any]) -> dict[str, Any]:
    """Everything for JSON. Bytes are those of all ranks together; `per_rank` has each rank's own."""
    stats, job = generation.stats, run.job
    counted = stats.generated_tokens > 1
    for control in (*controls.get("one_rank", ()), *filter(None, [controls.get("same_dtype")])):
        control["tokens_in_common"] = _common(control["tokens"], generation.tokens)
    result: dict[str, Any] = {
        "ranks": run.comm.world_size,
        "dtypes": list(job.dtypes),
        "model": "bundled" if job.model == str(BUNDLED.absolute()) else job.model,
        "topology": run.comm.topology,
        "order": run.comm.order,
        "prompt": run.prompt,
        "prompt_tokens": stats.prompt_tokens,
        "temperature": job.temperature,
        "seed": job.seed,
        "tokens": generation.tokens,
        "text": generation.text,
        "stop_reason": generation.stop_reason,
        "decode_tokens_per_s": stats.decode_tokens_per_s,
        "ttft_s": stats.ttft_s,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "collectives_per_token": stats.collectives_per_token,
        "expected_collectives_per_token": stats.expected_collectives_per_token,
        "bytes_per_token": sum(r["bytes_per_token"] for r in reports) if counted else None,
        "expected_bytes_per_token": sum(r["expected_bytes_per_token"] for r in reports),
        "activation_sha256": [r["activation_sha256"] for r in reports],
        "per_rank": reports,
        "controls": controls,
    }
    result["faults"] = faults(result)
    result["statement"] = statement(result)
    return result


def _common(ours: list[int], theirs: list[int]) -> int:
    """How many tokens agree before the first that differs."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
