"""`hostring serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from hostring.command_line import need

_SERVE = "hostring.integrations.llm.serve"
_LLM_PACKAGES = ("torch", "safetensors", "tokenizers", "jinja2", "gguf")  # what the extra `llm` brings
_SERVE_PACKAGES = ("starlette", "uvicorn")  # what the extra `serve` brings beside them


Model = Annotated[
    str | None, typer.Argument(help="A GGUF file or a Hugging Face directory; the bundled model when not given.")
]
Local = Annotated[int | None, typer.Option(min=1, help="How many rank processes on this machine; 2 by default.")]
Host = Annotated[str, typer.Option(help="Where to listen. Other addresses than loopback need keys.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")]
Keys = Annotated[Path | None, typer.Option(help="Clients must bring one of the keys in this file, one per line.")]
Name = Annotated[str, typer.Option(help="The model's id for clients; that of its file by default.")]
Streams = Annotated[int, typer.Option(min=1, help="How many texts are written at a time.")]
Queue = Annotated[int, typer.Option(min=0, help="How many more may wait; others are told to try later.")]
Context = Annotated[
    int | None, typer.Option(min=2, help="Positions of each text, prompt included; at most 4096 by default.")
]
AllowHost = Annotated[list[str] | None, typer.Option(help="A name by which clients call this server; may be repeated.")]
AllowOrigin = Annotated[
    list[str] | None, typer.Option(help="Web pages of this origin may call it, too; may be repeated.")
]
Dtypes = Annotated[str | None, typer.Option(help="What each rank computes in; one for all, or one per rank.")]
Device = Annotated[str, typer.Option(help="What each rank computes on; one for all, or one per rank.")]
Compute = Annotated[str, typer.Option(help="packed, exact or auto, as in `hostring demo`.")]
SharePlan = Annotated[
    str,
    typer.Option(help="Who holds what: a plan of `hostring plan model`; even shares; or as many bytes for every rank."),
]
Topology = Annotated[str, typer.Option(help="auto, mesh, ring, star or tree.")]
RejoinTimeout = Annotated[
    float, typer.Option(min=0.0, help="Seconds to wait for a rank that died to come back; then the server ends.")
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds for start-up and for each collective.")]


def add(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    model: Model = None,
    local: Local = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: Keys = None,
    name: Name = "",
    streams: Streams = 8,
    queue: Queue = 64,
    context: Context = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    dtypes: Dtypes = None,
    device: Device = "cpu",
    compute: Compute = "auto",
    plan: SharePlan = "even",
    topology: Topology = "auto",
    rejoin_timeout: RejoinTimeout = 300.0,
    timeout: Timeout = 120.0,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: chat, completions, streams, and a page to chat on.

    Prints `listening on http://HOST:PORT` once it can answer. A rank that dies is started again.
    """
    options = dict(locals())
    for package in _LLM_PACKAGES:
        need(package, "llm", "hostring serve")
    for package in _SERVE_PACKAGES:
        need(package, "serve", "hostring serve")
    raise typer.Exit(_load("start").serve_local(_options(options)))


def _load(name: str) -> Any:
    """A module of the llm integration, which the core must not import by itself."""
    return importlib.import_module(f"{_SERVE}.{name}")


def _options(given: dict[str, Any]) -> Any:
    """What the command line says, as `ServeOptions`."""
    from hostring.topologies.rules import check_order

    topology = given["topology"]
    order = "tree" if topology == "tree" else os.environ.get("HOSTRING_ORDER") or "rank"
    check_order(topology, order)
    job = importlib.import_module("hostring.integrations.llm.demo.job").make_job(
        model=given["model"],
        ranks=given["local"],
        dtypes=given["dtypes"],
        devices=given["device"],
        prompts=(),
        max_tokens=1,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        controls=False,
        patience=given["rejoin_timeout"],
        compute=given["compute"],
        plan=given["plan"],
        topology=topology,
        order=order,
        timeout=given["timeout"],
    )
    options = _load("options")
    return options.ServeOptions(
        job,
        host=given["host"],
        port=given["port"],
        name=given["name"],
        api_keys=options.read_keys(given["api_key_file"]),
        streams=given["streams"],
        queue=given["queue"],
        context=given["context"],
        allow_hosts=tuple(given["allow_host"] or ()),
        allow_origins=tuple(given["allow_origin"] or ()),
    )
