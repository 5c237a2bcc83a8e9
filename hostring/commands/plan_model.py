"""`hostring plan model`: who holds what of a model, what that takes, and whether it can be fast enough."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from hostring.command_line import need
from hostring.commands.plan import plan_app

_PLANNING = "hostring.integrations.llm.planning"
_CHECKPOINT = "hostring.integrations.llm.checkpoint"

ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file or a Hugging Face directory.")]
Ranks = Annotated[
    str,
    typer.Option(
        metavar="N|FILE|live",
        help="So many ranks that are alike; a JSON file that describes them; live: the ranks of this group, measured.",
    ),
]
Json = Annotated[str, typer.Option(metavar="FILE", help="Write the plan, for --plan of demo and generate.")]
Compute = Annotated[str, typer.Option(help="packed, exact, or auto: packed where the file can be.")]
Dtype = Annotated[str, typer.Option(help="Of exact ranks: float32, float16, bfloat16.")]
Device = Annotated[str, typer.Option(help="What this rank computes on, with --ranks live: cpu, cuda, mps, auto.")]
Memory = Annotated[
    str, typer.Option(metavar="SIZES", help="What ranks offer, as 300MB,100MB; one for all, or one per rank.")
]
MaxSeq = Annotated[int | None, typer.Option(min=1, help="Positions of the KV cache.")]
TokensPerSecond = Annotated[float | None, typer.Option(min=1e-6, help="Say whether this rate is possible.")]
CollectiveTime = Annotated[float | None, typer.Option(min=0.0, help="Microseconds of one reduction.")]
Phase = Annotated[str, typer.Option(help="decode or prefill: whose time is made short.")]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="Price one node, tensor parallelism, stages and both at so many positions, and pick."),
]
Level = Annotated[
    str, typer.Option(help="regions: each is level; lanes: FFN makes up for attention; auto: the faster one.")
]
KeepAll = Annotated[bool, typer.Option("--keep-all", help="Leave no rank out, even a slow one.")]


def add(app: typer.Typer) -> None:
    plan_app.command("model")(model)


def model(
    path: ModelPath,
    ranks: Ranks = "2",
    json: Json = "",
    compute: Compute = "auto",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    memory: Memory = "",
    max_seq: MaxSeq = None,
    tokens_per_s: TokensPerSecond = None,
    collective_us: CollectiveTime = None,
    phase: Phase = "decode",
    context: Context = None,
    level: Level = "auto",
    keep_all: KeepAll = False,
) -> None:
    """Share a model out over ranks, from its header alone: no weights are read.

    With --ranks live, this is one rank of a launched group (`hostring launch -n 2 -m hostring plan model MODEL --ranks
    live`). Each rank then times a few layers of the model and the links, and rank 0 prints.

    Prints regions, states and boundaries, bytes per rank, and the token budget. Every figure that was not measured says
    "predicted". The exit code is 1 when the wanted rate is infeasible.
    """
    options = dict(locals())
    from hostring.command_line import check_output, console, show_table

    need("gguf", "llm", "hostring plan model")
    _check("--phase", phase, ("decode", "prefill"))
    _check("--level", level, ("auto", "regions", "lanes"))
    if json:
        check_output(json, "--json")
    budgets, told = (importlib.import_module(f"{_PLANNING}.{name}") for name in ("budget", "document"))
    options["path"] = importlib.import_module(f"{_CHECKPOINT}.repository").find_model(options["path"])
    choice = _plan(options)
    said, ways = _prices(options, choice)
    budget = None
    if tokens_per_s is not None:
        known = choice.problem.collective_s or (None if collective_us is None else 1e-6 * collective_us)
        budget = budgets.Budget(tokens_per_s, choice.problem.model.config.num_hidden_layers, known)
    out = console()
    show_table(out, told.table(choice))
    for line in (*told.lines(choice, budget), *said):
        out.print(line, soft_wrap=True)
    if json:
        _write(json, {**told.document(choice, budget), **ways})
    if budget is not None and not budget.feasible:
        raise typer.Exit(1)


def _plan(options: dict[str, Any]) -> Any:
    """The choice for what the command line says."""
    ranks = options["ranks"]
    if ranks == "live":
        return _plan_live(options)
    same = ("compute", "dtype", "memory", "collective_us", "phase", "max_seq", "keep_all")
    return importlib.import_module(f"{_PLANNING}.ask").plan_for(
        options["path"],
        int(ranks) if ranks.isdecimal() else ranks,
        **{name: options[name] for name in same},
        tie=options["level"],
        link_price=_link_price,
    )


def _prices(options: dict[str, Any], choice: Any) -> tuple[list[str], dict[str, Any]]:
    """What other ways would cost, in words and as plain values; nothing without --context."""
    ranks = options["ranks"]
    if options["context"] is None:
        return [], {}
    ask, priced = (importlib.import_module(f"{_PLANNING}.{name}") for name in ("ask", "prices"))
    if ranks == "live":
        asked = ask.asked_after(choice, options["context"])
    else:
        same = {name: options[name] for name in ("compute", "dtype", "memory")}
        known = ask.described(options["path"], int(ranks) if ranks.isdecimal() else ranks, **same)
        how = {"collective_us": options["collective_us"], "link_price": _link_price}
        asked = ask.asked_for(known, options["phase"], options["context"], **how)
    found = priced.ways(asked)
    return list(priced.lines(asked, found)), {"ways": priced.as_json(found)}


def _plan_live(options: dict[str, Any]) -> Any:
    """The choice of this group's ranks, which are probed."""
    import hostring

    for name in ("memory", "collective_us"):
        if options[name]:
            raise ValueError(f"--{name.replace('_', '-')} can't be given with --ranks live, which measures it")
    need("torch", "llm", "hostring plan model --ranks live")
    same = ("compute", "dtype", "device", "phase", "max_seq", "keep_all")
    with hostring.init() as comm:
        choice = importlib.import_module(f"{_PLANNING}.live").plan_live(
            comm, options["path"], **{name: options[name] for name in same}, tie=options["level"]
        )
        if comm.rank:
            raise typer.Exit
    return choice


def _check(option: str, value: str, possible: tuple[str, ...]) -> None:
    if value not in possible:
        raise ValueError(f"{option} {value!r} is not one of {', '.join(possible)}")


def _link_price(links: dict[str, Any], n_ranks: int, nbytes: int) -> float:
    """Seconds of an all-reduce by the model of hosts and links."""
    from hostring.commands.plan import price_point
    from hostring.cost.network import from_links

    return price_point(from_links(links, n_ranks), nbytes, "rank").best.seconds


def _write(path: str, document: dict[str, Any]) -> None:
    import json

    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, ensure_ascii=False)
        file.write("\n")
