"""`hostring demo` and `hostring generate`: one model on unlike ranks. The core names the integration only here, when asked."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

_LLM = "hostring.integrations.llm"

Model = Annotated[
    str | None, typer.Option(help="A GGUF file or a Hugging Face directory; the bundled model when not given.")
]
Prompts = Annotated[list[str] | None, typer.Option("--prompt", help="What to continue, or to answer; may be repeated.")]
Chat = Annotated[
    bool, typer.Option("--chat", help="Take more prompts from standard input, a line each, until its end.")
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
Json = Annotated[Path | None, typer.Option("--json", help="Also write all figures to this file.", dir_okay=False)]


def add(app: typer.Typer) -> None:
    app.command()(demo)
    app.command()(generate)


def demo(
    ranks: Annotated[
        int | None, typer.Option(min=1, help="How many rank processes; 2, or as many as --dtypes or --device names.")
    ] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(help="What each rank computes in: float16, bfloat16, float32; one for all, or one per rank."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="What each rank computes on: cpu, cuda (also ROCm), cuda:1, mps, xpu, auto; one for all, or one per rank."
        ),
    ] = "cpu",
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
        bool | None,
        typer.Option(
            help="Also run on one rank alone, and with one dtype on all ranks. Done by default, but not with --chat."
        ),
    ] = None,
    rejoin_timeout: RejoinTimeout = 300.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for start-up and for each collective.")] = 120.0,
) -> None:
    """Run a model on unlike rank processes of this machine, over TCP, and account for every byte.

    By default two ranks, one computing in float16 and one in bfloat16, continue a text with the bundled model. A rank
    that dies while more prompts are to come is started again. The exit code is 1 when an answer broke off.
    """
    from hostring.topologies.rules import check_order

    order = _order(topology)
    check_order(topology, order)
    _check_folder(json_file)
    controls = not chat if controls is None else controls
    job = _job(
        model,
        ranks,
        dtypes,
        device,
        prompt,
        max_tokens,
        temperature,
        top_k,
        top_p,
        seed,
        controls,
        chat,
        rejoin_timeout,
    )
    result = _load("demo.demo").demo(job, topology=topology, order=order, timeout=timeout)
    _finish(result, json_file)


def generate(
    dtypes: Annotated[
        str | None, typer.Option(help="What each rank computes in; one for all, or one per rank.")
    ] = "float32",
    device: Annotated[
        str,
        typer.Option(
            help="What this rank computes on: cpu, cuda (also ROCm), cuda:1, mps, xpu; auto: an accelerator, if any."
        ),
    ] = "auto",
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
    rejoin_timeout: RejoinTimeout = 300.0,
) -> None:
    """Do the demo's work as one rank of a group that a launcher started.

    Run it under torchrun, mpirun, srun or `hostring launch -n 2 -m hostring generate`. Only the head rank prints. A rank
    that dies while more prompts are to come is waited for; `hostring launch --rejoin 9` starts it again, elsewhere the
    line to run is printed. The exit code is 1 when an answer broke off.
    """
    import hostring

    _check_folder(json_file)
    with hostring.init(topology=topology, order=_order(topology)) as comm:
        ranks = comm.world_size
        job = _job(
            model,
            ranks,
            dtypes,
            None,
            prompt,
            max_tokens,
            temperature,
            top_k,
            top_p,
            seed,
            controls,
            chat,
            rejoin_timeout,
        )
        result = _load("demo.demo").generate(job, comm, device=device, stats=stats)
    if result is not None:
        _finish(result, json_file)


def _order(topology: str) -> str:
    """The only order that a tree holds; for all others what the environment says, or the default."""
    return "tree" if topology == "tree" else os.environ.get("HOSTRING_ORDER") or "rank"


def _check_folder(json_file: Path | None) -> None:
    """Before the run, and not after it."""
    if json_file is not None and not json_file.parent.is_dir():
        raise FileNotFoundError(f"--json {json_file}: there is no directory {json_file.parent}; make it first")


def _load(name: str) -> Any:
    """A module of the llm integration, which the core must not import by itself.

    Raises:
        ModuleNotFoundError: its requirements are not installed.
    """
    try:
        return importlib.import_module(f"{_LLM}.{name}")
    except ModuleNotFoundError as exc:
        raise ModuleNotFoundError(
            f"no module {exc.name}; this command needs it: pip install 'hostring[llm]'", name=exc.name
        ) from exc


def _job(
    model: str | None, ranks: int | None, dtypes: str | None, devices: str | None, prompts: list[str] | None, max_tokens: int,
    temperature: float, top_k: int, top_p: float, seed: int, controls: bool, chat: bool, patience: float,
) -> Any:  # fmt: skip
    return _load("demo.job").make_job(
        model=model, ranks=ranks, dtypes=dtypes, devices=devices, prompts=prompts or (), max_tokens=max_tokens, temperature=temperature,
        top_k=top_k, top_p=top_p, seed=seed, controls=controls, chat=chat, patience=patience,
    )  # fmt: skip


def _finish(result: dict[str, Any], json_file: Path | None) -> None:
    """Write the figures, and fail when they show that the run was not what it claims to be, or a prompt was not answered."""
    import json

    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if result.get("error") == "interrupted":
        raise typer.Exit(130)
    if result["faults"] or "error" in result or not all(turn["complete"] for turn in result.get("turns", ())):
        raise typer.Exit(1)
