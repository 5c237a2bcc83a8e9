"""`hostring serve`: a model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hostring.command_line import need
from hostring.commands.cluster import TokenFile
from hostring.launch.silence import wanted_silence

_SERVE = "hostring.integrations.llm.serve"
_LLM_PACKAGES = ("torch", "safetensors", "tokenizers", "jinja2", "gguf")  # what the extra `llm` brings
_SERVE_PACKAGES = (
    "starlette",
    "uvicorn",
    "prometheus_client",
    "llguidance",
)  # what the extra `serve` brings beside them
_SAME = (
    "host",
    "port",
    "name",
    "streams",
    "queue",
    "groups",
    "replay",
    "context",
)  # options that `ServeOptions` has too

Model = Annotated[
    str | None,
    typer.Argument(help="A GGUF file, a Hugging Face directory or repository; the bundled model when not given."),
]
Local = Annotated[int | None, typer.Option(min=1, help="How many rank processes on this machine; 2 by default.")]
Machines = Annotated[
    int | None,
    typer.Option(min=2, help="Be the head of so many machines, one rank on each: prints the line that the others run."),
]
Host = Annotated[str, typer.Option(help="Where to listen. Other addresses than loopback need keys.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free port.")]
Keys = Annotated[Path | None, typer.Option(help="Clients must bring one of the keys in this file, one per line.")]
Name = Annotated[str, typer.Option(help="The model's id for clients; that of its file by default.")]
Streams = Annotated[int, typer.Option(min=1, help="How many texts are written at a time.")]
Queue = Annotated[int, typer.Option(min=0, help="How many more may wait; others are told to try later.")]
Groups = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="In a pipeline (--plan pp=N): groups into which the texts are divided, each in another stage at a time; "
        "one for each stage by default. 1 lets a step pass all stages before the next begins.",
    ),
]
Replay = Annotated[
    bool,
    typer.Option("--replay", help="Texts that a lost rank breaks off go on when it is back, instead of ending there."),
]
Context = Annotated[
    int | None, typer.Option(min=2, help="Positions of each text, prompt included; at most 4096 by default.")
]
AllowHost = Annotated[list[str] | None, typer.Option(help="A name by which clients call this server; may be repeated.")]
AllowOrigin = Annotated[
    list[str] | None, typer.Option(help="Web pages of this origin may call it, too; may be repeated.")
]
Dtypes = Annotated[str | None, typer.Option(help="What each rank computes in; one for all, or one per rank.")]
Device = Annotated[
    str | None,
    typer.Option(
        help="What each rank computes on; one for all, or one per rank. The CPU, or for one rank alone: auto."
    ),
]
Compute = Annotated[str, typer.Option(help="packed, exact or auto, as in `hostring demo`.")]
SharePlan = Annotated[
    str,
    typer.Option(
        help="Who holds what: a plan of `hostring plan model`; even shares; as many bytes for every rank; stages, such "
        "as pp=2,tp=2; or ranks share the KV cache of a long context: context=3,heads=2; or one rank computes "
        "prompts and another decodes: prefill=0,decode=1; or ranks divide the rows of a prompt: rows, rows=78/22; or "
        "experts=place."
    ),
]
Topology = Annotated[str, typer.Option(help="auto, mesh, ring, star or tree.")]
RejoinTimeout = Annotated[
    float, typer.Option(min=0.0, help="Seconds to wait for a rank that died to come back; then the server ends.")
]
SameBits = Annotated[
    bool, typer.Option("--same-bits", help="Promise the bits of any number of ranks, or refuse at start.")
]
Speculate = Annotated[
    str,
    typer.Option(
        metavar="off|lookup",
        help="lookup: guess tokens that followed the same words before, and check several in one step where that pays.",
    ),
]
Draft = Annotated[
    Path | None, typer.Option(help="Guess with this smaller model of the same vocabulary, on the head rank.")
]
DraftMax = Annotated[int, typer.Option(min=1, help="The most guesses for a text in one step.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds for start-up and for each collective.")]


Minutes = Annotated[float, typer.Option(help="With --machines: how long the token lets others in.")]


def add(app: typer.Typer) -> None:
    app.command()(serve)


def serve(
    model: Model = None,
    local: Local = None,
    machines: Machines = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key_file: Keys = None,
    name: Name = "",
    streams: Streams = 8,
    queue: Queue = 64,
    groups: Groups = None,
    replay: Replay = False,
    context: Context = None,
    allow_host: AllowHost = None,
    allow_origin: AllowOrigin = None,
    dtypes: Dtypes = None,
    device: Device = None,
    compute: Compute = "auto",
    plan: SharePlan = "even",
    topology: Topology = "auto",
    rejoin_timeout: RejoinTimeout = 300.0,
    same_bits: SameBits = False,
    speculate: Speculate = "off",
    draft: Draft = None,
    draft_max: DraftMax = 7,
    timeout: Timeout = 120.0,
    minutes: Minutes = 10.0,
    token_file: TokenFile = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does: chat, completions, streams, and a page to chat on.

    Prints `listening on http://HOST:PORT` once it can answer. A rank that dies is started again. Under a launcher
    (torchrun, mpirun, srun, `hostring launch`, `hostring cluster`) this is one rank of its group, and rank 0 listens.
    """
    _run(dict(locals()))


def _run(options: dict[str, Any]) -> None:
    from hostring.group.environment import launched

    machines, local = options["machines"], options["local"]
    _need_packages()
    if machines is not None and local is not None:
        raise ValueError("--machines is one rank on each of several machines, --local several on this one; give one")
    if machines is not None:
        _open_cluster(machines, options)
    elif local is None and launched(os.environ) is not None:
        _serve_member(options)
    else:
        options["device"] = options["device"] or "cpu"
        raise typer.Exit(_load("start").serve_local(_options(options)))


def _need_packages() -> None:
    """Before any process starts or waits for another."""
    for package in _LLM_PACKAGES:
        need(package, "llm", "hostring serve")
    for package in _SERVE_PACKAGES:
        need(package, "serve", "hostring serve")


def _open_cluster(machines: int, options: dict[str, Any]) -> None:
    """Wait for the other machines, then be rank 0."""
    from hostring.commands.cluster import open_cluster

    chosen = _options({**options, "local": machines, "dtypes": options["dtypes"] or "float32", "device": None})
    own = [argument for argument in sys.argv[1:] if not argument.startswith("--machines=")]
    if "--machines" in own:
        at = own.index("--machines")
        del own[at : at + 2]
    job = replace(chosen, api_keys=(), host="127.0.0.1").to_json().encode()  # what the others need not know stays here
    wanted = {"minutes": options["minutes"], "token_file": options["token_file"]}
    open_cluster(machines, ["hostring", *own], module=True, job=job, **wanted)


def _serve_member(options: dict[str, Any]) -> None:
    """Be one rank of the group that a launcher started."""
    import hostring

    order = "tree" if options["topology"] == "tree" else os.environ.get("HOSTRING_ORDER") or "rank"
    chosen = {"topology": options["topology"], "order": order, "timeout": options["timeout"]}
    with hostring.init(**chosen, silence=wanted_silence()) as comm:
        here = {"local": comm.world_size, "dtypes": options["dtypes"] or "float32", "device": None}
        try:
            _load("start").serve_member(_options({**options, **here}), comm, options["device"] or "auto")
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _load(name: str) -> Any:
    """A module of the llm integration, which the core must not import by itself."""
    return importlib.import_module(f"{_SERVE}.{name}")


def _options(given: dict[str, Any]) -> Any:
    """What the command line says, as `ServeOptions`."""
    options = _load("options")
    return options.ServeOptions(
        _job(given),
        **{name: given[name] for name in _SAME},
        api_keys=options.read_keys(given["api_key_file"]),
        allow_hosts=tuple(given["allow_host"] or ()),
        allow_origins=tuple(given["allow_origin"] or ()),
    )


def _job(given: dict[str, Any]) -> Any:
    """What the command line says of the model and the ranks, as `Job`."""
    from hostring.topologies.rules import check_order

    topology = given["topology"]
    order = "tree" if topology == "tree" else os.environ.get("HOSTRING_ORDER") or "rank"
    check_order(topology, order)
    same = ("model", "dtypes", "compute", "plan", "same_bits", "speculate", "draft_max", "topology", "timeout")
    return importlib.import_module("hostring.integrations.llm.demo.job").make_job(
        **{name: given[name] for name in same},
        ranks=given["local"],
        devices=given["device"],
        prompts=(),
        max_tokens=1,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        seed=0,
        controls=False,
        patience=given["rejoin_timeout"],
        draft="" if given["draft"] is None else str(given["draft"].absolute()),
        order=order,
    )
