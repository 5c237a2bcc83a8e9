"""Prompts answered and measured on every rank of a group, and the controls that say what the figures are worth."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Sequence
from typing import Any

import hostring
from hostring import Comm
from hostring.integrations.llm.demo.conversation import Head, Part
from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.demo.prompts import Prompts
from hostring.integrations.llm.demo.turns import Turn
from hostring.integrations.llm.demo.verdict import faults, statement
from hostring.integrations.llm.generate import HEAD_RANK, Generation, Model, load_model
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.model.sampling import Sampling

Tell = Callable[[str, Any], None]
"""Called with what happens: ("stage", name), ("ask", None), ("prompt", what is shown of it), ("text", piece),
("answered", None), ("refused", why), ("lost", who and how), ("whole", None), ("result", figures)."""

Report = dict[str, Any]

_STDIN = 0
_WARM_UP_TOKENS = 4  # the first steps allocate, build their messages and wake the kernels
_PATIENCE = 3600.0  # seconds that ranks wait while another one runs its control alone


def measure(job: Job, comm: Comm, tell: Tell, device: str = "cpu") -> dict[str, Any] | None:
    """Answer all prompts, run the controls, and compare. A collective: every rank calls it, and names its own device.

    Returns:
        all figures on the head rank, None elsewhere. They are those of the last prompt that was answered to the end.

    Raises:
        HostringError: this rank can't go on. The head rank raises it only before the first prompt; after that the figures
            hold what there is, and "error".
    """
    tell("stage", "loading")
    run = Run(job, comm, tell, device)
    with contextlib.ExitStack() as groups:
        if comm.rank != HEAD_RANK:
            Part(run, tell, groups).hold()
            return None
        head = Head(run, tell, groups, Prompts(job.prompts or run.default_prompts, _STDIN if job.chat else None))
        head.hold()
        result = _result(run, head)
    tell("result", result)
    return result


class Run:
    """What all generations on one rank share.

    Attributes:
        continued: the model continues a prompt rather than answer it.
        found: of the controls, on the head rank.
    """

    def __init__(self, job: Job, comm: Comm, tell: Tell, device: str = "cpu") -> None:
        self.job, self.comm, self.tell = job, comm, tell
        self.device = find_device(device)
        self.sampling = Sampling(job.temperature, job.top_k, job.top_p, job.seed)
        self.found: dict[str, Any] = {}
        self._loaded: tuple[tuple[str, ...], Model] | None = None
        self.continued = self.model(comm, job.dtypes).tokenizer.template is None

    @property
    def default_prompts(self) -> tuple[str, ...]:
        if self.job.chat:
            return ()
        return ("In the beginning" if self.continued else "Why is the sky blue? Answer in two sentences.",)

    def ids(self, prompt: str) -> list[int]:
        return self.model(self.comm, self.job.dtypes).prompt_ids(prompt)

    def model(self, comm: Comm, dtypes: tuple[str, ...]) -> Model:
        """This rank's part of the model; the last one asked for is kept, others are given up first."""
        if self._loaded is None or self._loaded[0] != dtypes or self._loaded[1].comm is not comm:
            self._loaded = None
            gc.collect()
            model = load_model(self.job.model, comm, dtype=dtypes[comm.rank], device=self.device, hash_activations=True)
            self._loaded = dtypes, model
        return self._loaded[1]

    def move_to(self, comm: Comm) -> None:
        """Go on in a group that was made whole again; the weights stay where this rank is still the same."""
        if self._loaded is not None and (comm.rank, comm.world_size) == (self.comm.rank, self.comm.world_size):
            self._loaded[1].sharded.move_to(comm)
        self.comm = comm
        self.model(comm, self.job.dtypes)

    def generation(
        self,
        ids: Sequence[int],
        dtypes: tuple[str, ...] | None = None,
        comm: Comm | None = None,
        *,
        warm_up: bool = True,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> tuple[Generation, list[Report]]:
        """Generate on all ranks of `comm`. Reports come by rank, on the head rank only."""
        comm, dtypes = comm or self.comm, dtypes or self.job.dtypes
        model = self.model(comm, dtypes)
        if warm_up:
            model.generate(ids, self.sampling, max_tokens=_WARM_UP_TOKENS)
        found = model.generate(ids, self.sampling, max_tokens=self.job.max_tokens, on_text=on_text, on_token=on_token)
        report = {
            "rank": comm.rank,
            "dtype": dtypes[comm.rank],
            "device": str(model.sharded.device),
            **found.stats.as_dict(),
        }
        return found, _gather(comm, report)

    def controls(self, ids: Sequence[int]) -> None:
        """Generate the same again, otherwise. A collective: every rank calls it; `found` is the head rank's."""
        self.tell("stage", "controls")
        self.found["one_rank"] = _one_rank_each(self, ids)
        alike = (self.job.dtypes[0],) * self.comm.world_size
        if alike != self.job.dtypes:
            generation, reports = self.generation(ids, alike)
            self.found["same_dtype"] = _control(generation, reports)


def _gather(comm: Comm, report: Report) -> list[Report]:
    """The reports of all ranks, by rank, on the head rank; nothing elsewhere."""
    reports = comm.gather_bytes(json.dumps(report).encode())
    return [json.loads(words) for words in reports] if comm.rank == HEAD_RANK else []


def _devices(run: Run) -> list[str]:
    """What every rank computes on."""
    return [name.decode() for name in run.comm.gather_bytes(str(run.device).encode())]


def _one_rank_each(run: Run, ids: Sequence[int]) -> list[dict[str, Any]]:
    """The whole model on one rank alone, once for each dtype and device, one after the other. On the head rank."""
    found: list[dict[str, Any]] = []
    kinds = list(zip(run.job.dtypes, _devices(run), strict=True))
    for kind in dict.fromkeys(kinds):
        owner, (dtype, device) = kinds.index(kind), kind
        control: dict[str, Any] = {}
        if run.comm.rank == owner:
            with hostring.init(0, 1, rejoin=False) as alone:
                generation, reports = run.generation(ids, (dtype,), alone)
            control = _control(generation, reports) | {"rank": owner, "dtype": dtype, "device": device}
        run.comm.barrier(timeout=_PATIENCE)
        everyone = _gather(run.comm, control)
        found += everyone[owner : owner + 1]
    return found


def _control(generation: Generation, reports: list[Report]) -> dict[str, Any]:
    names = ("decode_tokens_per_s", "ttft_s", "prefill_tokens_per_s")
    figures = {name: getattr(generation.stats, name) for name in names}
    return {**figures, "tokens": generation.tokens, "activation_sha256": [r["activation_sha256"] for r in reports]}


def _controls(run: Run, generation: Generation, reports: list[Report]) -> dict[str, Any]:
    """What the controls found, beside the run. When all ranks have the dtype of rank 0, the run is its own control."""
    if not run.found:
        return {}
    dtype = run.job.dtypes[0]
    itself = "same_dtype" not in run.found
    same = _control(generation, reports) if itself else run.found["same_dtype"]
    controls = {"one_rank": run.found["one_rank"], "same_dtype": same | {"dtype": dtype, "is_the_run_itself": itself}}
    for control in (*controls["one_rank"], controls["same_dtype"]):
        control["tokens_in_common"] = _common(control["tokens"], generation.tokens)
    return controls


def _result(run: Run, head: Head) -> dict[str, Any]:
    """Everything for JSON. Bytes are those of all ranks together; `per_rank` has each rank's own."""
    job, measured = run.job, head.last_complete
    result: dict[str, Any] = {
        "ranks": run.comm.world_size,
        "dtypes": list(job.dtypes),
        "model": "bundled" if job.model == str(BUNDLED.absolute()) else job.model,
        "topology": run.comm.topology,
        "order": run.comm.order,
        "wire": run.comm.wire,
    }
    if measured is not None and measured.generation is not None:
        result |= _figures(run, measured, measured.generation)
    else:
        result |= {
            "temperature": job.temperature,
            "seed": job.seed,
            "per_rank": [],
            "controls": {},
            "faults": [],
            "statement": "",
        }
    if job.several or head.error is not None:
        result["turns"] = [turn.as_dict() for turn in head.turns]
    if head.error is not None:
        result["error"] = head.error
    return result


def _figures(run: Run, turn: Turn, generation: Generation) -> dict[str, Any]:
    stats, job, reports = generation.stats, run.job, turn.reports
    counted = stats.generated_tokens > 1
    result: dict[str, Any] = {
        "prompt": turn.prompt,
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
        "devices": [r["device"] for r in reports],
        "per_rank": reports,
        "controls": _controls(run, generation, reports),
    }
    result["faults"] = faults(result)
    result["statement"] = statement(result | {"ranks": run.comm.world_size})
    return result


def _common(ours: list[int], theirs: list[int]) -> int:
    """How many tokens agree before the first that differs."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
