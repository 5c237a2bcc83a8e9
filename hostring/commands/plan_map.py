"""`hostring plan map`: the fastest way to divide a model, over contexts, ranks and links."""

from __future__ import annotations

import importlib
from functools import cache, partial
from typing import Annotated, Any

import typer

from hostring.command_line import need
from hostring.commands.plan import plan_app, price_point

_PLANNING = "hostring.integrations.llm.planning"

ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file or a Hugging Face directory.")]
Ranks = Annotated[
    str, typer.Option(metavar="FILE", help="Ranks with their speeds, as for `hostring plan model`; the first 1, 2, ...")
]
Contexts = Annotated[str, typer.Option(help="Positions, separated by commas.")]
Gbit = Annotated[str, typer.Option(help="Rates of the links in Gbit/s, separated by commas.")]
Latency = Annotated[float, typer.Option(min=0.0, help="Microseconds that a message takes besides.")]
Phase = Annotated[str, typer.Option(help="decode or prefill.")]
Json = Annotated[str, typer.Option(metavar="FILE", help="Write all prices to a file.")]
Plot = Annotated[str, typer.Option(metavar="FILE", help="Draw the map: .svg, .png or .pdf.")]


def add(app: typer.Typer) -> None:
    plan_app.command("map")(context_map)


def context_map(
    path: ModelPath,
    ranks: Ranks,
    contexts: Contexts = "512,4096,32768",
    gbit: Gbit = "1,10",
    latency_us: Latency = 30.0,
    phase: Phase = "decode",
    json: Json = "",
    plot: Plot = "",
) -> None:
    """Sweep context x ranks x links, and name the fastest of one node, tensor parallelism, stages and both.

    Each rank is taken to be on a machine of its own, on one switch. Every figure is predicted from the speeds in the
    file; nothing is run.
    """
    from hostring.command_line import check_output, console, show_table

    need("gguf", "llm", "hostring plan map")
    if phase not in ("decode", "prefill"):
        raise ValueError(f"--phase {phase!r} is not one of decode, prefill")
    if plot:
        need("matplotlib", "plot", "--plot")
    for file, option in ((json, "--json"), (plot, "--plot")):
        if file:
            check_output(file, option)
    ask, sweep = (importlib.import_module(f"{_PLANNING}.{name}") for name in ("ask", "sweep"))
    lengths, rates = _numbers("--contexts", contexts), _numbers("--gbit", gbit)
    links = {rate: cache(partial(_price, rate, latency_us)) for rate in rates}
    cells = sweep.swept(ask.described(path, ranks), phase, [int(n) for n in lengths], links)
    out = console()
    out.print(f"{phase}, fastest way and its rate; every figure is predicted", soft_wrap=True)
    show_table(out, sweep.table(cells))
    if json:
        _write(json, [cell.as_json() for cell in cells])
    if plot:
        sweep.draw(cells, plot)


def _price(gbit: float, latency_us: float, n_ranks: int, nbytes: int) -> float:
    from hostring.cost.network import ethernet

    return price_point(ethernet(n_ranks, gbit, 1e-6 * latency_us), nbytes, "rank").best.seconds


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ValueError(f"{option} {text!r}: expected numbers above 0, separated by commas")
    return found


def _write(path: str, rows: list[dict[str, Any]]) -> None:
    import json

    with open(path, "w", encoding="utf-8") as file:
        json.dump({"label": "predicted", "cells": rows}, file, indent=1)
        file.write("\n")
