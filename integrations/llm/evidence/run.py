"""Runs a model for evidence: the ranks, then llama.cpp, then the pack and its page."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostring import HostringError
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.evidence import about, llama_cpp
from hostring.integrations.llm.evidence.cells import absent
from hostring.integrations.llm.evidence.pack import build
from hostring.integrations.llm.evidence.page import page
from hostring.integrations.llm.evidence.rank import PROGRAM, REGION_STEPS, TOLD, Task
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.launch.ranks import launch

MAX_DEFAULT_SEQ = 4096  # positions of a cache, as `load_model` makes it
TEXT = "Tell me about the sea, the ships that sail on it and the fish that live in it."


def evidence(
    job: Job, out: Path, lengths: Sequence[int], rounds: int, command: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure `job`, and write evidence.json and index.html into `out`.

    Raises:
        ValueError: the prompts don't fit the model, or the ranks are to be a pipeline or a grid; no rank was started.
        HostringError: a rank failed; what it said is on stderr.
    """
    _check(job, lengths)
    job = replace(job, devices=job.devices or ("cpu",) * job.ranks)
    out.mkdir(parents=True, exist_ok=True)
    energy, host = about.Energy(), about.of_host()
    say(f"{job.ranks} ranks answer prompts of {', '.join(map(str, lengths))} tokens, {rounds} times each")
    found = _ranks(job, lengths, rounds)
    watts = energy.watts()
    peers: dict[int, list[dict[str, Any]]] | str = llama_cpp.why_absent(job.model)
    if not peers:
        peers = {}
        for threads in sorted({1, job.ranks}):
            say(f"llama.cpp answers the same on {threads} thread{'s' * (threads > 1)}")
            peers[threads] = llama_cpp.measure(job.model, found["prompts"], job.max_tokens, rounds, threads)
    pack = build(
        found,
        peers,
        {
            "command": command,
            "dtypes": list(job.dtypes),
            "model": about.of_model(Path(job.model)),
            "host": host,
            "versions": about.versions(),
            "watts": watts,
            "cost": absent("the platform gives no price"),
        },
    )
    (out / "evidence.json").write_text(json.dumps(pack, indent=1) + "\n", encoding="utf-8")
    (out / "index.html").write_text(page(pack), encoding="utf-8")
    return pack


def _check(job: Job, lengths: Sequence[int]) -> None:
    if job.stages or job.roles or job.grid or job.rows:
        raise ValueError(
            f"evidence of a run with --plan {job.plan} is not built; run hostring demo --plan {job.plan}, which "
            "checks its counts and hashes"
        )
    room = min(read_model_file(job.model).config.max_position_embeddings, MAX_DEFAULT_SEQ)
    more = max(job.max_tokens, REGION_STEPS)
    if max(lengths) + more > room:
        raise ValueError(
            f"a prompt of {max(lengths)} tokens and {more} more don't fit the {room} positions of this model; give "
            f"--lengths of at most {room - more}"
        )


def _ranks(job: Job, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """What the head rank of the processes wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        task = Task(job.to_json(), tuple(lengths), rounds, TEXT, str(file))
        env = {
            TOLD: task.to_json(),
            "HOSTRING_TOPOLOGY": job.topology,
            "HOSTRING_ORDER": job.order,
            "HOSTRING_TRANSPORT": "tcp",
            "HOSTRING_TIMEOUT": str(job.timeout),
            "OMP_NUM_THREADS": "1",
        }
        code = launch(["-m", PROGRAM], job.ranks, env=env)
        if code or not file.exists():
            raise HostringError(f"the ranks ended with exit code {code} before there was a result; see above")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
