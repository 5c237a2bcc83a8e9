"""`hostring demo` and `hostring generate`: one model on unlike ranks. The core names the integration only here, when
asked."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hostring.command_line import check_output, need
from hostring.launch.silence import wanted_silence

_TIMEOUT_HELP = "Seconds for start-up and for each collective."
_LLM = "hostring.integrations.llm"
_PACKAGES = ("torch", "safetensors", "tokenizers", "jinja2", "gguf")  # what the extra `llm` brings

Model = Annotated[
    str | None,
    typer.Option(help="A GGUF file, a Hugging Face directory or repository; the bundled model when not given."),
]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="What to continue, or to answer; may be repeated.")]
Chat = Annotated[
    bool,
    typer.Option("--chat", help="Hold a conversation: prompts from standard input, a line each; /new forgets it."),
]
RejoinTimeout = Annotated[
    float,
    typer.Option(
        min=0.0, help="Seconds to wait for a rank that died to come back, when more prompts come; 0 ends the run."
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="The most tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token every time.")]
TopK = Annotated[int, typer.Option(min=0, help="Choose among this many of the most likely tokens; 0 for all.")]
TopP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, help="Choose among the most likely tokens that together have this probability."),
]
Seed = Annotated[int, typer.Option(help="Of the head rank's random numbers.")]
TopologyName = Annotated[str, typer.Option(help="auto, mesh, ring, star or tree; a tree folds in its own order.")]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="How many rank processes; 2, or as many as --dtypes or --device names.")
]
Controls = Annotated[
    bool | None,
    typer.Option(
        help="Also run on one rank alone, and with one dtype on all ranks. Done by default, but not with --chat."
    ),
]
Compile = Annotated[
    str | None, typer.Option(help="Let torch compile the layers: on, off, or a backend; one for all, or one per rank.")
]
Compute = Annotated[
    str,
    typer.Option(
        help="packed: multiply by a GGUF file's own blocks; exact: dequantise them; auto: packed where possible."
    ),
]
Plan = Annotated[
    str,
    typer.Option(
        metavar="FILE|auto|even|bytes|pp=N|context=N|prefill=R,decode=R|rows|experts=place",
        help="Who holds what: a plan of `hostring plan model`; measured now; even; as many bytes for every rank; "
        "stages of layers, such as pp=2 or pp=2,tp=2; ranks that share the KV cache of a long context, such as "
        "context=3,heads=2; one rank computes prompts and another decodes: prefill=0,decode=1; ranks that all hold the "
        "model divide the rows of a prompt: rows or rows=78/22; or whole experts on every rank: experts=place.",
    ),
]
SameBits = Annotated[
    bool,
    typer.Option(
        "--same-bits", help="Promise the logits of any number of ranks, bit for bit, and hash them; or refuse at start."
    ),
]
Xray = Annotated[
    Path | None,
    typer.Option(help="Record the first answer stage by stage to this file, for `hostring xray`.", dir_okay=False),
]
Speculate = Annotated[
    str,
    typer.Option(
        metavar="off|lookup",
        help="lookup: guess tokens that followed the same words before, and check several in one step where that pays.",
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option(help="Guess with this smaller model of the same vocabulary, on the head rank."),
]
DraftMax = Annotated[int, typer.Option(min=1, help="The most guesses of a step; fewer are checked where fewer pay.")]
Devices = Annotated[
    str,
    typer.Option(
        help="What each rank computes on: cpu, cuda (also ROCm), cuda:1, mps, xpu, auto; one for all, or one per rank."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="What this rank computes on: cpu, cuda (also ROCm), cuda:1, mps, xpu; auto: an accelerator, if any."
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.", dir_okay=False)]


def add(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(generate)


def demo(
    ranks: Ranks = None,
    dtypes: Annotated[
        str | None,
        typer.Option(help="What each rank computes in: float16, bfloat16, float32; one for all, or one per rank."),
    ] = None,
    device: Devices = "cpu",
    topology: TopologyName = "auto",
    model: Model = None,
    prompt: Prompts = None,
    chat: Chat = False,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 0.7,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    json_file: Json = None,
    controls: Controls = None,
    compile: Compile = None,
    compute: Compute = "auto",
    plan: Plan = "even",
    same_bits: SameBits = False,
    speculate: Speculate = "off",
    draft: Draft = None,
    draft_max: DraftMax = 7,
    xray: Xray = None,
    rejoin_timeout: RejoinTimeout = 300.0,
    timeout: Annotated[float, typer.Option(min=0.1, help=_TIMEOUT_HELP)] = 120.0,
) -> None:
    """Run a model on unlike rank processes of this machine, over TCP, and account for every byte.

    By default two ranks, one computing in float16 and one in bfloat16, continue a text with the bundled model. A rank
    that dies while more prompts are to come is started again. The exit code is 1 when an answer broke off.
    """
    options = dict(locals())
    from hostring.topologies.rules import check_order

    _prepare("demo", json_file)
    check_order(topology, _order(topology))
    result = _load("demo.start").demo(_job(options, controls=not chat if controls is None else controls))
    _finish(result, json_file)


def generate(
    dtypes: Annotated[
        str | None, typer.Option(help="What each rank computes in; one for all, or one per rank.")
    ] = "float32",
    device: Device = "auto",
    topology: TopologyName = "auto",
    model: Model = None,
    prompt: Prompts = None,
    chat: Chat = False,
    max_tokens: MaxTokens = 96,
    temperature: Temperature = 0.7,
    top_k: TopK = 40,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    json_file: Json = None,
    controls: Annotated[
        bool, typer.Option(help="Also run on one rank alone, and with one dtype on all ranks.")
    ] = False,
    stats: Annotated[bool, typer.Option(help="Print what it cost after the text.")] = True,
    compile: Compile = None,
    compute: Compute = "auto",
    plan: Plan = "even",
    same_bits: SameBits = False,
    speculate: Speculate = "off",
    draft: Draft = None,
    draft_max: DraftMax = 7,
    xray: Xray = None,
    rejoin_timeout: RejoinTimeout = 300.0,
    timeout: Annotated[float | None, typer.Option(min=0.1, help=f"{_TIMEOUT_HELP} 120 by default.")] = None,
) -> None:
    """Do the demo's work as one rank of a group that a launcher started.

    Run it under torchrun, mpirun, srun or `hostring launch -n 2 -m hostring generate`. Only the head rank prints. A
    rank that dies while more prompts are to come is waited for; `hostring launch --rejoin 9` starts it again, elsewhere
    the line to run is printed. The exit code is 1 when an answer broke off.
    """
    options = dict(locals())
    import hostring

    _prepare("generate", json_file)
    with hostring.init(topology=topology, order=_order(topology), timeout=timeout, silence=wanted_silence()) as comm:
        job = _job(options, ranks=comm.world_size, device=None, timeout=comm.timeout)
        result = _load("demo.start").generate(job, comm, device=device, stats=stats)
    if result is not None:
        _finish(result, json_file)


def _order(topology: str) -> str:
    """The only order that a tree holds; for all others what the environment says, or the default."""
    return "tree" if topology == "tree" else os.environ.get("HOSTRING_ORDER") or "rank"


def _prepare(command: str, json_file: Path | None) -> None:
    """Before any process starts or waits for another."""
    for package in _PACKAGES:
        need(package, "llm", f"hostring {command}")
    if json_file is not None:
        check_output(json_file, "--json")


def _load(name: str) -> Any:
    """A module of the llm integration, which the core must not import by itself."""
    return importlib.import_module(f"{_LLM}.{name}")


def _job(options: dict[str, Any], **decided: Any) -> Any:
    """The job that the command line describes, under the names of `Job`.

    Args:
        options: the command's parameters by name.
        decided: those that the command has decided itself.
    """
    given = {**options, **decided}
    for name in ("json_file", "stats"):
        given.pop(name, None)
    for name, ours in (("prompt", "prompts"), ("device", "devices"), ("rejoin_timeout", "patience")):
        given[ours] = given.pop(name)
    given["prompts"] = given["prompts"] or ()
    given["draft"] = "" if given["draft"] is None else str(given["draft"].absolute())
    given["xray"] = "" if given["xray"] is None else str(given["xray"].absolute())
    return _load("demo.job").make_job(order=_order(given["topology"]), **given)


def _finish(result: dict[str, Any], json_file: Path | None) -> None:
    """Write the figures, and fail when they show that the run was not what it claims to be, or a prompt was not
    answered."""
    import json

    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if result.get("error") == "interrupted":
        raise typer.Exit(130)
    if result["faults"] or "error" in result or not all(turn["complete"] for turn in result.get("turns", ())):
        raise typer.Exit(1)
