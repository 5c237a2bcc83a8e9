"""From what a person asks for to a chosen plan. Reads the model's header only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from hostring.integrations.llm.planning.choose import Choice, choose
from hostring.integrations.llm.planning.footprint import Way
from hostring.integrations.llm.planning.model_file import ModelFile, read_model_file
from hostring.integrations.llm.planning.prices import Asked
from hostring.integrations.llm.planning.ranks import COMPUTES, RankSpec, alike, read_ranks
from hostring.integrations.llm.planning.shares import Phase, Tie

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

LinkPrice = Callable[[dict[str, Any], int, int], float]
"""Seconds of an all-reduce, given "links" of a RANKS file, the number of ranks, and bytes."""


@dataclass(frozen=True)
class Described:
    """A model, the ranks that are offered, and what else a RANKS file says."""

    model: ModelFile
    ranks: list[RankSpec]
    told: dict[str, Any]


def plan_for(
    path: str | Path,
    ranks: int | str | Path,
    *,
    compute: str = "auto",
    dtype: str = "float32",
    memory: str = "",
    collective_us: float | None = None,
    link_price: LinkPrice | None = None,
    phase: Phase = "decode",
    tie: Tie = "auto",
    max_seq: int | None = None,
    keep_all: bool = False,
) -> Choice:
    """The plan for a model on so many like ranks, or on those of a RANKS file.

    Raises:
        ValueError: nothing legal, nothing that fits, or an option that makes no sense.
        FileNotFoundError: no such model or file.
    """
    known = described(path, ranks, compute=compute, dtype=dtype, memory=memory)
    price = _collective_price(known.model, known.told, collective_us, link_price)
    return choose(known.model, known.ranks, price, phase=phase, tie=tie, max_seq=max_seq, leave_out=not keep_all)


def described(
    path: str | Path, ranks: int | str | Path, *, compute: str = "auto", dtype: str = "float32", memory: str = ""
) -> Described:
    """See `plan_for`."""
    model = read_model_file(path)
    way = Way(_compute(model, compute), dtype)
    budgets = parse_memory(memory)
    told: dict[str, Any] = {}
    if isinstance(ranks, int):
        specs = alike(ranks, way, budgets)
    else:
        specs, told = read_ranks(ranks, model, way)
        if budgets:
            offers = alike(len(specs), way, budgets)
            specs = [replace(s, memory_nbytes=o.memory_nbytes, pool=o.pool) for s, o in zip(specs, offers, strict=True)]
    return Described(model, specs, told)


def asked_for(
    known: Described, phase: Phase, context: int, *, collective_us: float | None, link_price: LinkPrice
) -> Asked:
    """What `prices.ways` prices.

    Raises:
        ValueError: nobody knows how fast a rank is in this phase.
    """
    unknown = [spec.name for spec in known.ranks if getattr(spec, phase) is None]
    if unknown:
        key = "decode_gb_per_s" if phase == "decode" else "prefill_gflop_per_s"
        raise ValueError(f"--context needs the speed of {unknown[0]} in {phase}: give --ranks FILE with {key}")
    links, told = known.told.get("links"), known.told.get("collective_us")
    if collective_us is None and told is None and links is not None:
        return Asked(known.model, known.ranks, phase, context, cache(partial(link_price, links)))
    seconds = 1e-6 * float(collective_us if collective_us is not None else told or 0.0)
    return Asked(known.model, known.ranks, phase, context, lambda n_ranks, nbytes: seconds)


def asked_after(choice: Choice, context: int) -> Asked:
    """The same of ranks that were probed, and whose reductions of one row were measured.

    Raises:
        ValueError: a prompt is asked for, whose reductions have many rows.
    """
    problem = choice.problem
    if problem.phase != "decode":
        raise ValueError(
            "--context with --ranks live measures reductions of one row: ask for --phase decode, or write --json FILE, "
            'give it "links", and give --ranks FILE'
        )
    price = cache(lambda n_ranks, nbytes: choice.collective_s(tuple(range(n_ranks))))
    return Asked(problem.model, choice.offered, problem.phase, context, price)


def _compute(model: ModelFile, compute: str) -> str:
    if compute == "auto":
        return "packed" if model.units is not None else "exact"
    if compute not in COMPUTES:
        raise ValueError(f"compute {compute!r} is not one of auto, {', '.join(COMPUTES)}")
    if compute == "packed" and model.units is None:
        raise ValueError(f"{model.path} can't be computed packed: {model.why_not_packed}")
    return compute


def parse_memory(text: str) -> list[int]:
    """Bytes of "300MB,1.5GB".

    Raises:
        ValueError: not that.
    """
    found = []
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]?)i?B?\s*", word, re.IGNORECASE)
        if match is None or not float(match[1]) > 0:
            raise ValueError(f"memory {word!r}: expected sizes such as 300MB or 1.5GB, one for all ranks, or one each")
        found.append(round(float(match[1]) * _UNITS[match[2].upper()]))
    return found


def _collective_price(
    model: ModelFile, told: dict[str, Any], collective_us: float | None, link_price: LinkPrice | None
) -> Callable[[Sequence[int]], float]:
    """What one reduction costs: as the user says, else as measured, else by the links, else nothing."""
    known = told.get("collective_us") if collective_us is None else collective_us
    if known is not None:
        return lambda kept: 1e-6 * float(known)
    links = told.get("links")
    if links is not None and link_price is not None:
        return lambda kept: link_price(links, len(kept), 4 * model.config.hidden_size)
    return lambda kept: 0.0
