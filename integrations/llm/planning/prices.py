"""What other ways to divide the work would cost at one context length: one node, tensor parallelism, stages, both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hostring.integrations.llm.planning.footprint import Footprint, cache_nbytes, groups_worth
from hostring.integrations.llm.planning.model_file import ModelFile
from hostring.integrations.llm.planning.predicted import Predicted
from hostring.integrations.llm.planning.ranks import RankSpec
from hostring.integrations.llm.planning.shares import Phase, Problem, Solution, solve

CHUNK = 128  # positions of a prompt that pass the stages together

Price = Callable[[int, int], float]
"""Seconds of one reduction of so many bytes among so many ranks."""


@dataclass(frozen=True)
class Asked:
    """What is to be priced.

    Attributes:
        context: positions that a token looks back on, or of the prompt.
        price: see `Price`; a message from one stage to the next counts as half a reduction of two ranks.
    """

    model: ModelFile
    ranks: Sequence[RankSpec]
    phase: Phase
    context: int
    price: Price

    @property
    def rows(self) -> int:
        """Rows of one step."""
        return 1 if self.phase == "decode" else min(CHUNK, self.context)

    @property
    def steps(self) -> int:
        return 1 if self.phase == "decode" else -(-self.context // self.rows)


@dataclass(frozen=True)
class Way:
    """One way, priced.

    Attributes:
        name: as `--plan` has it, or "one node". ranks: numbers of those that take part.
        layers: of each stage. seconds: until the token, or the whole prompt, is computed.
        pace_s: seconds per token while every stage has a text, or per prompt.
        why_not: why it can't be; empty when it can.
    """

    name: str
    ranks: tuple[int, ...]
    layers: tuple[int, ...] = ()
    seconds: float = float("inf")
    pace_s: float = float("inf")
    why_not: str = ""


@dataclass(frozen=True)
class _Group:
    """Ranks that share layers: seconds of a step for one layer and for the head, and layers that fit."""

    layer_s: float
    head_s: float
    most_layers: int


def ways(asked: Asked) -> list[Way]:
    """Every way, over all ranks and over the fastest of them; the fastest of each kind, the best first."""
    order = sorted(range(len(asked.ranks)), key=lambda r: _group(asked, (r,)).layer_s)
    found: dict[str, Way] = {}
    for n in range(1, len(order) + 1):
        kept = tuple(sorted(order[:n]))
        for stages in (s for s in range(1, n + 1) if n % s == 0 and s <= asked.model.config.num_hidden_layers):
            way = _priced(asked, kept, stages)
            kind = _kind(stages, n // stages)
            known = found.get(kind)
            if known is None or (way.why_not == "", -way.seconds) > (known.why_not == "", -known.seconds):
                found[kind] = way
    return sorted(found.values(), key=lambda way: (way.why_not != "", way.seconds))


def _kind(stages: int, each: int) -> str:
    return ("one node" if each == 1 else "tp") if stages == 1 else "pp" if each == 1 else "pp,tp"


def _priced(asked: Asked, kept: tuple[int, ...], stages: int) -> Way:
    each = len(kept) // stages
    name = (
        "one node" if len(kept) == 1 else f"tp={each}" if stages == 1 else f"pp={stages}" + f",tp={each}" * (each > 1)
    )
    try:
        groups = [_group(asked, kept[at : at + each]) for at in range(0, len(kept), each)]
        layers = _level(asked, groups)
    except ValueError as exc:
        return Way(name, kept, why_not=str(exc))
    times = [n * g.layer_s for n, g in zip(layers, groups, strict=True)]
    times[-1] += groups[-1].head_s
    message = asked.price(2, 4 * asked.model.config.hidden_size * asked.rows) / 2 if stages > 1 else 0.0
    decision = asked.price(len(kept), 8) if len(kept) > 1 else 0.0
    pace = max(times) + message
    whole = sum(times) + (stages - 1) * message + (asked.steps - 1) * pace + decision
    return Way(name, kept, layers, whole, asked.steps * pace + decision)


def _group(asked: Asked, kept: tuple[int, ...]) -> _Group:
    """Raises ValueError: these ranks can't share layers."""
    model, n_layers = asked.model, asked.model.config.num_hidden_layers
    ranks = [asked.ranks[r] for r in kept]
    feet = [Footprint.of(model, spec.way, asked.context + 1) for spec in ranks]
    unlimited = [RankSpec(**{**vars(spec), "memory_nbytes": None}) for spec in ranks]  # a stage holds some layers only
    problem = Problem(model, unlimited, feet, asked.phase)
    solution = solve(problem)
    attention = max(
        asked.rows * a / spec.duty + _looking_back(asked, problem, solution, rank) / spec.duty
        for rank, (a, spec) in enumerate(zip(solution.attention, ranks, strict=True))
    )
    mlp = max(asked.rows * m / spec.duty for m, spec in zip(solution.mlp, ranks, strict=True))
    sums = 2 * asked.price(len(kept), 4 * model.config.hidden_size * asked.rows) if len(kept) > 1 else 0.0
    head = max(h / spec.duty for h, spec in zip(solution.head, ranks, strict=True))
    most = n_layers
    for rank, (spec, foot) in enumerate(zip(ranks, feet, strict=True)):
        if spec.memory_nbytes is not None:
            ends = foot.fixed + solution.plan.vocab[rank] * foot.vocab_row
            layer = (foot.need(solution.plan, rank) - ends) / n_layers
            most = min(most, max(0, int((spec.memory_nbytes - ends) / layer)))
    return _Group(attention + mlp + sums, head, most)


def _looking_back(asked: Asked, problem: Problem, solution: Solution, rank: int) -> float:
    """Seconds of a step and layer in which a rank reads its keys and values, or, in a prompt, multiplies by them."""
    config, spec, foot = asked.model.config, problem.ranks[rank], problem.footprints[rank]
    groups, cost = groups_worth(solution.plan, rank, config.group_heads), problem.cost(rank)
    if asked.phase == "decode":
        weights = foot.group / config.num_hidden_layers
        rate = spec.stream_rate or weights / max(cost.attention.each, 1e-12)
        nbytes = cache_nbytes(config, spec.way, asked.context) / config.num_hidden_layers / config.num_key_value_heads
        return groups * nbytes / rate
    elements = asked.model.attention_in.elements + asked.model.attention_out.elements
    per_group = 2 * elements / config.num_hidden_layers / config.num_key_value_heads
    rate = spec.flop_rate or per_group / max(cost.attention.each, 1e-12)
    pairs = asked.rows * asked.context / 2  # on average a row looks back on half of the prompt
    return groups * 4 * pairs * config.head_dim * config.group_heads / rate


def _level(asked: Asked, groups: Sequence[_Group]) -> tuple[int, ...]:
    """Layers of each stage, so that the slowest takes as little time as possible among those that fit."""
    n_layers, last = asked.model.config.num_hidden_layers, len(groups) - 1
    if sum(g.most_layers for g in groups) < n_layers or min(g.most_layers for g in groups) < 1:
        fits = ", ".join(str(g.most_layers) for g in groups)
        raise ValueError(f"it doesn't fit: {fits} of {n_layers} layers fit, with {asked.context} positions")
    counts = [1] * len(groups)
    while sum(counts) < n_layers:
        free = [at for at, g in enumerate(groups) if counts[at] < g.most_layers]
        at = min(free, key=lambda at: (counts[at] + 1) * groups[at].layer_s + groups[at].head_s * (at == last))
        counts[at] += 1
    return tuple(counts)


def lines(asked: Asked, found: Sequence[Way]) -> Iterator[str]:
    """The prices, the pick, and who is left out of it."""
    unit = "a token" if asked.phase == "decode" else "the prompt"
    yield f"{asked.phase} at {asked.context:,} positions, on ranks and links as described; other ways to divide it:"
    for way in found:
        if way.why_not:
            yield f"  {way.name}: can't be: {way.why_not}"
            continue
        cut = f", layers {'/'.join(map(str, way.layers))}" if len(way.layers) > 1 else ""
        busy = ""
        if asked.phase == "decode" and len(way.layers) > 1:
            busy = f"; with a text for every stage, {Predicted(1 / way.pace_s, 'tokens/s')}"
        took = Predicted(1e3 * way.seconds, "ms")
        yield f"  {way.name} on ranks {_listed(way.ranks)}{cut}: {unit} takes {took}{busy}"
    yield from _pick(asked, found)


def _pick(asked: Asked, found: Sequence[Way]) -> Iterator[str]:
    best = found[0]
    if best.why_not:
        yield "none of these can be: add a rank or memory, or shorten the context"
        return
    second = next((way for way in found[1:] if not way.why_not), None)
    than = "" if second is None else f", {second.seconds / best.seconds:.2f} times as fast as {second.name} (predicted)"
    yield f"fastest: {best.name}{than}"
    for rank in sorted(set(range(len(asked.ranks))) - set(best.ranks)):
        yield f"left out of it: rank {rank} ({asked.ranks[rank].name}), which would make it slower"
    busiest = min((way for way in found if not way.why_not), key=lambda way: way.pace_s)
    if asked.phase == "decode" and busiest is not best:
        yield f"most tokens/s with several texts: {busiest.name} (predicted; see `hostring serve --plan`)"


def as_json(found: Sequence[Way]) -> list[dict[str, Any]]:
    return [
        {"plan": w.name, "ranks": w.ranks, "layers": w.layers, "why_not": w.why_not}
        if w.why_not
        else {
            "plan": w.name,
            "ranks": w.ranks,
            "layers": w.layers,
            "time": Predicted(w.seconds, "s").as_json(),
            "time_when_busy": Predicted(w.pace_s, "s").as_json(),
        }
        for w in found
    ]


def _listed(ranks: Sequence[int]) -> str:
    """As people write them: 0-3, or 0, 2, 5."""
    whole = all(b - a == 1 for a, b in pairwise(ranks))
    return f"{ranks[0]}-{ranks[-1]}" if whole and len(ranks) > 2 else ", ".join(map(str, ranks))
