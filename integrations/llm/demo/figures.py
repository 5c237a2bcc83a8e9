"""All figures of a run as plain values, for JSON and for the screen."""

from __future__ import annotations

import json
from typing import Any

from hostring.integrations.llm.context.plan import BLOCK_POSITIONS, ContextPlan
from hostring.integrations.llm.demo.controls import Controls
from hostring.integrations.llm.demo.head import Head
from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.demo.rank_model import RankModel
from hostring.integrations.llm.demo.turn import Turn
from hostring.integrations.llm.demo.verdict import faults, prompt_statement, statement
from hostring.integrations.llm.generation import Generation
from hostring.integrations.llm.handover.roles import Roles
from hostring.integrations.llm.pipeline.stages import StagePlan
from hostring.integrations.llm.planning.plan_file import shares_json
from hostring.integrations.llm.rows.plan import RowPlan


def figures(model: RankModel, head: Head, controls: Controls, error: str | None) -> dict[str, Any]:
    """Everything for JSON. Bytes are those of all ranks together; `per_rank` has each rank's own."""
    job, measured = model.job, head.last_measured
    result: dict[str, Any] = {
        "ranks": model.comm.world_size,
        "dtypes": list(job.dtypes),
        "model": "bundled" if job.model == str(BUNDLED.absolute()) else job.model,
        "topology": model.comm.topology,
        "order": model.comm.order,
        "wire": model.comm.wire,
        "plan": _plan(model),
    }
    if measured is not None and measured.generation is not None:
        result |= _of_turn(model, controls, measured, measured.generation)
    else:
        result |= {"temperature": job.temperature, "seed": job.seed, "statement": ""}
        result |= {"per_rank": [], "controls": {}, "faults": []}
    if job.several or error is not None:
        result["turns"] = [turn.as_dict() for turn in head.turns]
    if error is not None:
        result["error"] = error
    return result


def _of_turn(model: RankModel, controls: Controls, turn: Turn, generation: Generation) -> dict[str, Any]:
    stats, job, reports = generation.stats, model.job, turn.reports
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
        "tokens_per_step": stats.tokens_per_step,
        "ttft_s": stats.ttft_s,
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        "collectives_per_token": stats.collectives_per_token,
        "expected_collectives_per_token": stats.expected_collectives_per_token,
        "bytes_per_token": sum(r["bytes_per_token"] for r in reports) if counted else None,
        "expected_bytes_per_token": sum(r["expected_bytes_per_token"] for r in reports),
        "boundary_bytes_per_token": sum(r["boundary_bytes_per_token"] for r in reports) if counted else None,
        "prefill_bytes": sum(r["prefill_bytes"] for r in reports),
        "expected_prefill_bytes": sum(r["expected_prefill_bytes"] for r in reports),
        "compute": _compute([r["dtype"] for r in reports]),
        "bytes_held": [r["bytes_held"] for r in reports],
        "bytes_read": [r["bytes_read"] for r in reports],
        "load_s": max((r["load_s"] for r in reports), default=0.0),
        "activation_sha256": [r["activation_sha256"] for r in reports],
        "logits_sha256": stats.logits_sha256,
        "devices": [r["device"] for r in reports],
        "per_rank": reports,
        "controls": controls.beside(model, generation, reports),
    }
    result |= _of_copies(job, [r["handover"] for r in reports])
    result["faults"] = faults(result)
    if job.roles or job.rows:
        able = [job.roles[1]] if job.roles else range(model.comm.world_size)
        result["statement"] = prompt_statement(result, _split_in_words(job), able)
    else:
        result["statement"] = statement(result | {"ranks": model.comm.world_size}, _split_in_words(job))
    return result


def _plan(model: RankModel) -> dict[str, Any]:
    """Who holds what, by whose wish, and what was predicted of it."""
    told = json.loads(model.job.planned) if model.job.planned else {"left_out": [], "predicted": None}
    found = {"source": model.job.plan, **shares_json(model.plan), **told}
    split = model.job.split
    if isinstance(split, StagePlan):
        found["stages"] = [
            {"layers": [stage.layers.start, stage.layers.stop], "ranks": list(stage.ranks)} for stage in split.stages
        ]
    elif isinstance(split, Roles):
        found["roles"] = {"prefill": split.prefill, "decode": split.decode}
    elif isinstance(split, ContextPlan):
        found["grid"] = {"context": split.context, "heads": split.heads, "block_positions": BLOCK_POSITIONS}
    elif isinstance(split, RowPlan):
        found["rows"] = {"shares": list(split.shares)}
    return found


def _split_in_words(job: Job) -> str:
    if job.stages:
        return "the pipeline"
    if job.roles:
        return "prefill there"
    return "a prompt divided by rows" if job.rows else "tensor parallelism"


def _of_copies(job: Job, told: list[dict[str, Any]]) -> dict[str, Any]:
    """Where every rank holds the whole model: who computed which rows; or bytes of keys and values, hashes included,
    and how much of their way the sender's computing hid."""
    if job.rows:
        return {"rows": [{name: one[name] for name in ("rows", "local_rows")} for one in told]}
    if not job.roles:
        return {}
    sender = told[job.roles[0]]
    overlap = {name: sender[name] for name in ("transfer_s", "hidden_s", "exposed_s", "hash_s")}
    return {"kv_bytes": sender["kv_bytes"], "overlap": overlap}


def _compute(kinds: list[str]) -> str:
    """What all ranks did, or "mixed"."""
    packed = [kind == "packed" for kind in kinds]
    return "packed" if all(packed) else "mixed" if any(packed) else "exact"
