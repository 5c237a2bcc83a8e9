"""A chosen plan as a JSON object and as text: who holds what, what it takes, and what it should cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.table import Table

from hostring.integrations.llm.planning.budget import (
    COLLECTIVES_PER_LAYER,
    Budget,
    boundary_nbytes,
    lower_bound,
    token_nbytes,
)
from hostring.integrations.llm.planning.choose import Choice
from hostring.integrations.llm.planning.placing import placement
from hostring.integrations.llm.planning.plan_file import KIND, VERSION, shares_json
from hostring.integrations.llm.planning.predicted import LowerBound, Predicted
from hostring.integrations.llm.planning.regions import Layer, trace_layer
from hostring.integrations.llm.planning.shares import need_of


def document(choice: Choice, budget: Budget | None = None) -> dict[str, Any]:
    """The plan as plain values; what nobody measured says "predicted"."""
    model, plan = choice.problem.model, choice.solution.plan
    config = model.config
    bound = bound_of(choice)
    return {
        "kind": KIND,
        "version": VERSION,
        "model": {"file": model.path.name, "nbytes": model.nbytes, **asdict(config)},
        "shares": shares_json(plan),
        "ranks": [_rank(choice, rank) for rank in range(plan.world_size)],
        "left_out": [asdict(one) for one in choice.left_out],
        "collective_us": 1e6 * choice.problem.collective_s or None,
        "layers": config.num_hidden_layers,
        **_layer_json(choice),
        "boundaries": COLLECTIVES_PER_LAYER * config.num_hidden_layers,
        "boundary_bytes": boundary_nbytes(config.hidden_size),
        "bytes_per_token": token_nbytes(config.hidden_size, config.num_hidden_layers),
        "predicted": predictions(choice),
        "lower_bound": None if bound is None else bound.as_json(),
        "statement": statement(choice),
        "experts_placed": None if (placed := placement(choice)) is None else placed.as_json(),
        "budget": None if budget is None else budget.as_json(),
        "feasible": budget is None or budget.feasible,
    }


def _layer_json(choice: Choice) -> dict[str, Any]:
    """Regions and boundaries; a region's time is that of its slowest rank, in one layer, as the probes measured it."""
    found = trace_layer(choice.problem.model.config).as_json()
    if choice.timed:
        for region in found["regions"]:
            region["unresolved"] = Predicted(_slowest(choice, region["name"]), "s").as_json()
    return found


def _slowest(choice: Choice, region: str) -> float:
    """Seconds of the slowest rank in a region of one layer."""
    lanes: tuple[float, ...] = getattr(choice.solution, region)
    return max(lanes)


def _rank(choice: Choice, rank: int) -> dict[str, Any]:
    problem, plan, solution = choice.problem, choice.solution.plan, choice.solution
    spec, foot = problem.ranks[rank], problem.footprints[rank]
    lanes = {"attention": solution.attention[rank], "mlp": solution.mlp[rank], "head": solution.head[rank]}
    weights = foot.weights(plan, rank)
    return {
        "rank": rank,
        "was": choice.kept[rank],
        "name": spec.name,
        **asdict(spec.way),
        "kv_groups": plan.kv_groups[rank],
        "columns": plan.columns[rank],
        "vocab": plan.vocab[rank],
        "weight_bytes": weights,
        "kv_cache_bytes": need_of(problem, plan, rank) - weights,
        "need_bytes": need_of(problem, plan, rank),
        "offer_bytes": spec.memory_nbytes,
        "pool": spec.pool,
        "lanes": {name: Predicted(s, "s").as_json() for name, s in lanes.items()} if choice.timed else None,
        **({"probed": spec.as_json()} if choice.timed else {}),
    }


def predictions(choice: Choice) -> dict[str, Any] | None:
    """Rates of both phases with these shares; None where speeds are not known."""
    if not choice.timed:
        return None
    decode, prefill = (choice.other_phase(phase) for phase in ("decode", "prefill"))
    layers = choice.problem.model.config.num_hidden_layers
    known = all(spec.prefill is not None for spec in choice.problem.ranks)
    lanes = [Predicted(seconds, "s").as_json() for seconds in decode.lanes(layers)]
    return {
        "decode_tokens_per_s": Predicted(1 / decode.step_s, "tokens/s").as_json(),
        "prefill_tokens_per_s": Predicted(1 / prefill.step_s, "tokens/s").as_json() if known else None,
        "collective": Predicted(choice.problem.collective_s, "s").as_json(),
        "lanes": lanes,
        "levelled": choice.solution.tie,
    }


def statement(choice: Choice) -> str:
    """Whether the ranks together are faster than the fastest of them alone."""
    if not choice.timed or choice.alone is None:
        return ""
    rank, alone_s = choice.alone
    alone, together = Predicted(1 / alone_s, "tokens/s"), Predicted(1 / choice.solution.step_s, "tokens/s")
    n = len(choice.kept)
    if n == 1 and not choice.left_out:
        return ""
    if n == 1:
        return f"one node is faster: rank {rank} alone makes {alone}"
    if alone_s <= choice.solution.step_s:
        return f"one node is faster: rank {rank} alone makes {alone}, {n} ranks together {together}"
    return f"{n} ranks together are faster: {together}; the fastest of them alone makes {alone}"


def bound_of(choice: Choice, batch: int = 1) -> LowerBound | None:
    """Of one forward pass of `batch` tokens: no rank can be done sooner; None where no rank's limits are known."""
    problem, plan = choice.problem, choice.solution.plan
    model, n_layers = problem.model, problem.model.config.num_hidden_layers
    bounds = []
    for rank, spec in enumerate(problem.ranks):
        if spec.stream_rate is None and spec.flop_rate is None:
            return None
        foot = problem.footprints[rank]
        fresh = foot.read(plan, rank)
        flops = 2 * batch * plan.n_elements(model.config, rank)
        warm = spec.warm_rate is not None and fresh <= spec.cache_nbytes
        bounds.append(lower_bound(fresh, flops, spec.warm_rate if warm else spec.stream_rate, spec.flop_rate).seconds)
    calls = COLLECTIVES_PER_LAYER * n_layers + 1 if plan.world_size > 1 else 0
    return LowerBound(max(bounds) + calls * problem.collective_s)


def lines(choice: Choice, budget: Budget | None = None) -> Iterator[str]:
    """What is said beside the table."""
    model, solution = choice.problem.model, choice.solution
    config = model.config
    yield from _layer_lines(choice, trace_layer(config))
    nbytes = token_nbytes(config.hidden_size, config.num_hidden_layers)
    if config.experts is not None:
        used, count, of_all = config.experts.used, config.experts.count, 100 * model.read_share
        yield f"experts: a token uses {used} of {count} per layer, and reads {of_all:.1f} % of their weights"
        if (placed := placement(choice)) is not None:
            yield placed.in_words()
    yield f"hidden states that become whole: {nbytes:,} bytes per token"
    if choice.timed:
        yield f"levelled: {solution.tie}; decode: {Predicted(1 / choice.other_phase('decode').step_s, 'tokens/s')}"
        if all(spec.prefill is not None for spec in choice.problem.ranks):
            yield f"prefill: {Predicted(1 / choice.other_phase('prefill').step_s, 'tokens/s')}"
    bound = bound_of(choice)
    if bound is not None:
        yield f"one token: {bound}"
    yield from advice(choice)
    if budget is not None:
        yield budget.in_words()
    yield f"plan {solution.plan.sha256[:12]}"


def advice(choice: Choice) -> Iterator[str]:
    """Who is left out and why, and whether one rank alone is faster."""
    for one in choice.left_out:
        yield f"left out: rank {one.rank} ({one.name}): {one.why}"
    if said := statement(choice):
        yield said


def _layer_lines(choice: Choice, layer: Layer) -> Iterator[str]:
    yield f"{choice.problem.model.config.num_hidden_layers} layers, each with {len(layer.boundaries)} boundaries:"
    for region, boundary in zip(layer.regions, layer.boundaries, strict=True):
        names = ", ".join(f"{op.name} -> {op.state}" for op in region.operations)
        span = f"{len(region.unresolved)} operations unresolved"
        if choice.timed:
            span += f", {Predicted(1e6 * _slowest(choice, region.name), 'us')} on the slowest rank"
        yield f"  {region.name}: {names}; {span}"
        yield f"  boundary: {boundary.before} -> {boundary.then} by all_reduce"


def table(choice: Choice) -> Table:
    """One line per rank."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    headings = (
        "rank",
        "name",
        "compute",
        "KV groups",
        "FFN columns",
        "vocabulary",
        "weights MB",
        "cache MB",
        "offers MB",
    )
    for n, heading in enumerate((*headings, "lane") if choice.timed else headings):
        found.add_column(heading, justify="left" if n in (1, 2) else "right")
    lanes = choice.solution.lanes(choice.problem.model.config.num_hidden_layers)
    for rank in range(choice.solution.plan.world_size):
        row = _rank(choice, rank)
        way = "packed" if row["compute"] == "packed" else f"{row['dtype']} {row['device']}"
        offer = "-" if row["offer_bytes"] is None else f"{row['offer_bytes'] / 1e6:,.1f}"
        cells = [str(row["rank"]), row["name"], way, *(str(row[k]) for k in ("kv_groups", "columns", "vocab"))]
        cells += [f"{row['weight_bytes'] / 1e6:,.1f}", f"{row['kv_cache_bytes'] / 1e6:,.1f}", offer]
        found.add_row(*cells, *([str(Predicted(1e3 * lanes[rank], "ms"))] if choice.timed else []))
    return found
