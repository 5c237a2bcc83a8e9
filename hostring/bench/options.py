"""What `hostring-bench` can be asked: the options, and what is refused before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

import typer

from hostring.bench.sizes import parse_sizes
from hostring.command_line import check_output, need

ARRAYS: Final = ("numpy", "torch")
PEERS: Final = ("gloo",)

Collectives = Annotated[
    list[str] | None, typer.Argument(help="all_reduce (default), broadcast, ..., or all.", show_default=False)
]
Ranks = Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Ranks to start here; 2 without a launcher.")]
Sizes = Annotated[str, typer.Option(help="Sizes and ranges: 64K, 4B:32M (times 4 each), 4B:32M:2.")]
Topologies = Annotated[str, typer.Option(help="One or more of auto, mesh, ring, star, tree, mesh/two_shot, ...")]
Order = Annotated[str, typer.Option(help="Fold order: rank, ring or tree.")]
Dtypes = Annotated[str, typer.Option(help="One or more dtypes.")]
Ops = Annotated[str, typer.Option(help="One or more of sum, avg, min, max, prod, band, bor, bxor.")]
Wires = Annotated[str, typer.Option(help="One or more of float32, bfloat16, mxint8, mxfp4, mxint8-both, mxfp4-both.")]
Transports = Annotated[str, typer.Option(help="One or more of auto, tcp, tls, unix, shm.")]
ArrayLibrary = Annotated[str, typer.Option(help="Whose arrays hostring gets: numpy or torch.")]
Peers = Annotated[str, typer.Option(help="Also measure this, in the same rounds: gloo.")]
DecodeLoop = Annotated[
    str, typer.Option(metavar="LAYERS,HIDDEN", help="No sweep: two all-reduces per layer and token.")
]
GapUs = Annotated[float, typer.Option(min=0.0, help="With --decode-loop: computing time before each all-reduce.")]
Tokens = Annotated[int, typer.Option(min=1, help="With --decode-loop: tokens per round.")]
Seconds = Annotated[float, typer.Option(help="Time for one point of one round.")]
Iterations = Annotated[int | None, typer.Option(min=1, help="Calls of one point of one round; not --seconds.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds.")]
Check = Annotated[bool, typer.Option(help="Compare results with an independent fold.")]
Pin = Annotated[bool, typer.Option("--pin", help="Put rank r of this machine on core r.")]
Json = Annotated[str, typer.Option(metavar="FILE", help="Write everything to a file.")]
Plot = Annotated[str, typer.Option(metavar="FILE.png", help="Draw latency and bandwidth.")]


@dataclass(frozen=True)
class Options:
    """One command line. Strings with commas are lists; the first topology is what the others are compared with."""

    collectives: list[str] | None = None
    ranks: int | None = None
    sizes: str = "4B:32M"
    topology: str = "auto"
    order: str = "rank"
    dtype: str = "float32"
    op: str = "sum"
    wire: str = "float32"
    transport: str = "auto"
    array: str = "numpy"
    peers: str = ""
    decode_loop: str = ""
    gap_us: float = 50.0
    tokens: int = 50
    seconds: float = 0.1
    iterations: int | None = None
    rounds: int = 3
    check: bool = True
    pin: bool = False
    json: str = ""
    plot: str = ""

    @property
    def names(self) -> list[str]:
        """The collectives to measure.

        Raises:
            ValueError: one of them is unknown.
        """
        from hostring.bench.cases import COLLECTIVES

        wanted = self.collectives or ["all_reduce"]
        return list(COLLECTIVES) if wanted == ["all"] else choose(",".join(wanted), COLLECTIVES, "collective")

    @property
    def dtypes(self) -> list[str]:
        from hostring.bench.truth import DTYPES

        return choose(self.dtype, DTYPES, "--dtype")

    @property
    def ops(self) -> list[str]:
        from hostring.bench.truth import OPS

        return choose(self.op, tuple(OPS), "--op")

    @property
    def nbytes(self) -> list[int]:
        return parse_sizes(self.sizes)

    @property
    def topologies(self) -> list[str]:
        return listed(self.topology, "--topology")

    @property
    def wires(self) -> list[str]:
        from hostring.arrays.dtypes import WIRES

        return choose(self.wire, tuple(WIRES), "--wire")

    @property
    def transports(self) -> list[str]:
        from hostring.transports.registry import TRANSPORTS

        return choose(self.transport, tuple(name for name in TRANSPORTS if name != "memory"), "--transport")

    def check_all(self) -> None:
        """Refuse what can't be measured, drawn or written, before any rank starts.

        Raises:
            ValueError: names the option, its value and what is accepted.
            ModuleNotFoundError: a package is missing; the message holds the pip command.
            OSError: a file can't be written.
        """
        from hostring.bench.loop import Loop
        from hostring.topologies.rules import read_rules

        for part in (self.names, self.dtypes, self.ops, self.nbytes, self.wires, self.transports):
            assert part
        for name in self.topologies:
            read_rules(as_rules(name), self.order)
        choose(self.array, ARRAYS, "--array", one=True)
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds {self.seconds:g}: must be more than 0")
        if self.decode_loop:
            Loop.parse(self.decode_loop, self.gap_us, self.tokens)
        self._check_packages()
        if self.json:
            check_output(self.json, "--json")
        if self.plot:
            check_output(self.plot, "--plot")

    def _check_packages(self) -> None:
        if self.peers:
            choose(self.peers, PEERS, "--peers")
            need("torch", "torch", "--peers gloo")
        if self.array == "torch":
            need("torch", "torch", "--array torch")
        if self.plot:
            need("matplotlib", "plot", "--plot")
            from hostring.bench.plot import check_format

            check_format(self.plot)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {key: value for key, value in asdict(self).items() if key not in ("json", "plot")}

    def title(self, world_size: int) -> str:
        """What the table and the plot are about."""
        loop = f"decode loop {self.decode_loop}"
        what = loop if self.decode_loop else ", ".join(self.collectives or ["all_reduce"])
        pinned = ", pinned" if self.pin else ""
        arrays = f"{self.array} {self.dtype}"
        return f"{what}: {world_size} ranks, transport {self.transport}, order {self.order}, {arrays}{pinned}"


def as_rules(name: str) -> str:
    """What `mesh/two_shot` is as a topology."""
    return f"{name.partition('/')[0]};all_reduce:{name}" if "/" in name else name


def listed(text: str, option: str) -> list[str]:
    """The items of a list with commas.

    Raises:
        ValueError: there are none.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        raise ValueError(f"{option} {text!r}: name at least one")
    return found


def choose(text: str, known: Sequence[str], option: str, *, one: bool = False) -> list[str]:
    """The items of a list with commas, all of which must be `known`.

    Raises:
        ValueError: one is unknown, or there are none; lists what exists.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or any(name not in known for name in found) or (one and len(found) > 1):
        raise ValueError(f"{option} {text!r}: use {'one' if one else 'one or more'} of {', '.join(known)}")
    return found
