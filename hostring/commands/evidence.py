"""`hostring evidence`: runs a model and writes what it cost, beside what one machine does alone."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

_LLM = "hostring.integrations.llm"


def add(app: typer.Typer) -> None:
    app.command()(evidence)


def evidence(
    model: Annotated[Path, typer.Argument(help="A GGUF file or a Hugging Face directory.", metavar="MODEL")],
    out: Annotated[Path, typer.Option(help="Directory for evidence.json and index.html.", file_okay=False)],
    ranks: Annotated[int | None, typer.Option(min=2, help="How many ranks; 2, or as many as --dtypes names.")] = None,
    dtypes: Annotated[
        str | None, typer.Option(help="What exact ranks compute in; one for all, or one per rank.")
    ] = None,
    topology: Annotated[str, typer.Option(help="auto, mesh, ring, star or tree.")] = "auto",
    compute: Annotated[str, typer.Option(help="packed, exact or auto, as in `hostring demo`.")] = "auto",
    plan: Annotated[str, typer.Option(help="Who holds what, as in `hostring demo`.")] = "even",
    same_bits: Annotated[
        bool, typer.Option("--same-bits", help="Also hash all logits, as in `hostring demo`.")
    ] = False,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "16,128,512",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate after each prompt.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each prompt is answered; medians are shown.")] = 3,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for start-up and for each collective.")] = 120.0,
) -> None:
    """Measure a model on ranks of this machine, and write a pack of evidence: JSON with a schema, and a page.

    The pack holds rates at several prompt lengths, the time of every region, what is exposed of the transfer, one rank
    alone, all ranks in one dtype, llama.cpp on the same file, and hashes. A run is valid when its collectives, bytes
    and hashes are as expected in prefill and decoding; it is promoted when it is at least as fast as the best single
    node. The exit code is 1 when the run is not valid.
    """
    options = dict(locals())
    from hostring.command_line import console, need

    for package in ("torch", "safetensors", "tokenizers", "jinja2", "gguf"):
        need(package, "llm", "hostring evidence")
    need("jsonschema", "evidence", "hostring evidence")
    job = _job(options)
    say = console().print
    done = importlib.import_module(f"{_LLM}.evidence.run").evidence(
        job, out, _numbers(lengths), rounds, _command(options), lambda text: say(text, markup=False, highlight=False)
    )
    for line in (
        *done["faults"],
        "valid" if done["valid"] else "NOT VALID",
        done["promotion"],
        str(out / "index.html"),
    ):
        say(line, markup=False, highlight=False, soft_wrap=True)
    if not done["valid"]:
        raise typer.Exit(1)


def _job(options: dict[str, Any]) -> Any:
    names = ("ranks", "dtypes", "topology", "compute", "plan", "same_bits", "max_tokens", "timeout")
    fixed = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "controls": True, "prompts": ()}
    fixed["order"] = "tree" if options["topology"] == "tree" else "rank"
    make_job = importlib.import_module(f"{_LLM}.demo.job").make_job
    return make_job(model=str(options["model"]), **{name: options[name] for name in names}, **fixed)


def _numbers(text: str) -> list[int]:
    found = [int(word) if word.strip().isdigit() else 0 for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(f"--lengths {text}: give numbers of tokens, such as 16,128,512")
    return found


def _command(options: dict[str, Any]) -> str:
    """The line that makes this pack again, without folders."""
    words = ["hostring", "evidence", options["model"].name, "--out", options["out"].name]
    for name in ("ranks", "dtypes", "topology", "compute", "plan", "lengths", "max_tokens", "rounds"):
        if options[name] is not None:
            words += [f"--{name.replace('_', '-')}", Path(str(options[name])).name]
    return shlex.join([*words, *["--same-bits"] * options["same_bits"]])
