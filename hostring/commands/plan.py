"""`hostring plan topology`: what each topology would cost, and from how many ranks on the hub limits a star."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from hostring.cost.network import Network
    from hostring.cost.simulate import Price

_NAMES = ("mesh", "ring", "star", "tree", "dissemination")
_SEGMENTS = (1 << 16, 1 << 18, 1 << 20)  # bytes
ACTIVE = 1.1  # the hub is the constraint when a hub without limits would make the star this much faster
BETTER = 1.05  # another topology must be this much faster to be worth a change

_PARTS = {"out": "sending", "in": "receiving", "cpu": "computing", "": "-"}

plan_app = typer.Typer(no_args_is_help=True, help="Plan a group before there is one.", rich_markup_mode=None)


def add(app: typer.Typer) -> None:
    app.add_typer(plan_app, name="plan")


@dataclass
class Offer:
    """The best that one topology can do for one size and world size."""

    topology: str
    variant: str
    order: str
    segment_nbytes: int
    seconds: float


@dataclass
class Point:
    """One size and world size.

    Attributes:
        offers: by topology, where it has one.
        free: seconds of the star with a hub that costs nothing.
        hub: the part of the hub that is busy longest ("cpu", "out", "in"), and for what share of the time.
    """

    nbytes: int
    world_size: int
    offers: dict[str, Offer] = field(default_factory=dict)
    free: float = 0.0
    hub: tuple[str, float] = ("", 0.0)

    @property
    def best(self) -> Offer:
        return min(self.offers.values(), key=lambda o: o.seconds)

    @property
    def hub_active(self) -> bool:
        """Whether the hub is what limits the star."""
        star = self.offers.get("star")
        return star is not None and star.seconds > ACTIVE * self.free

    @property
    def change_to(self) -> Offer | None:
        """The better topology, where the star has one."""
        star, best = self.offers.get("star"), self.best
        return best if star is not None and best.topology != "star" and star.seconds > BETTER * best.seconds else None


@plan_app.callback()
def options() -> None:
    """Plan a group before there is one."""


@plan_app.command()
def topology(
    ranks: Annotated[str, typer.Option(metavar="MIN..MAX", help="World sizes to price.")] = "2..32",
    links: Annotated[
        str, typer.Option(metavar="FILE", help="Hosts and links as JSON; 1 Gbit/s and 30 us without.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Message sizes and ranges.")] = "4K:64M:16",
    order: Annotated[
        str, typer.Option(help="rank, ring, tree, or any: each topology with an order that it can hold.")
    ] = "any",
    json: Annotated[str, typer.Option(metavar="FILE", help="Write all prices to a file.")] = "",
) -> None:
    """Price an all-reduce on each topology, and say where the hub of a star has become the constraint."""
    from hostring.bench.sizes import parse_sizes
    from hostring.command_line import check_output, console, show_table
    from hostring.cost.network import ethernet, from_links, in_words, read_links

    low, high = parse_ranks(ranks)
    found = read_links(links) if links else None
    nbytes = parse_sizes(sizes)
    out = console()
    if json:
        check_output(json, "--json")
    known = from_links(found, high) if found is not None else ethernet(high)
    source = f"the links in {links}" if links else "links that are assumed (describe yours by --links FILE)"
    out.print(f"all prices are predicted, for {source}: {in_words(known)}", soft_wrap=True)
    points = []
    for size in nbytes:
        with out.status(f"pricing {size} bytes"):
            row = [
                price_point(from_links(found, n) if found is not None else ethernet(n), size, order)
                for n in range(low, high + 1)
            ]
        points += row
        show_table(out, points_table(row))
        for text in verdict(row):
            out.print(text, soft_wrap=True)
    if json:
        _write(json, points)


def parse_ranks(text: str) -> tuple[int, int]:
    """(lowest, highest) of "2..32", or of a single number.

    Raises:
        ValueError: not that.
    """
    low, dots, high = text.partition("..")
    try:
        ends = int(low), int(high if dots else low)
    except ValueError:
        raise ValueError(f"--ranks {text!r}: expected MIN..MAX, such as 2..32") from None
    if not 2 <= ends[0] <= ends[1] <= 100_000:
        raise ValueError(f"--ranks {text!r}: expected 2 <= MIN <= MAX <= 100000")
    return ends


def price_point(network: Network, nbytes: int, order: str = "any", segments: Sequence[int] = _SEGMENTS) -> Point:
    """Price all topologies for one size, each with the best of its variants and of `segments`, in bytes.

    Raises:
        ValueError: `order` is unknown.
    """
    from hostring.arrays.fold import ORDERS

    if order not in (*ORDERS, "any"):
        raise ValueError(f"--order {order!r}: use any, {', '.join(ORDERS)}")
    point = Point(nbytes, network.world_size)
    prices: dict[str, Price] = {}
    for offer, price in _offers(network, nbytes, order, segments):
        known = point.offers.get(offer.topology)
        if known is None or offer.seconds < known.seconds:
            point.offers[offer.topology], prices[offer.topology] = offer, price
    star = point.offers.get("star")
    if star is not None:
        point.free = min(
            o.seconds for o, _ in _offers(network.without_limit_at(0), nbytes, order, segments) if o.topology == "star"
        )
        busy = {
            r[0]: s
            for r, s in prices["star"].busy.items()
            if r in (("cpu", 0), ("out", network.home[0]), ("in", network.home[0]))
        }
        part = max(busy, key=busy.__getitem__)
        point.hub = part, min(1.0, busy[part] / star.seconds)
    return point


def _offers(network: Network, nbytes: int, order: str, segments: Sequence[int]) -> Iterator[tuple[Offer, Price]]:
    from hostring.cost import estimate
    from hostring.topologies import TOPOLOGIES

    for name in _NAMES:
        for variant, v in TOPOLOGIES[name].variants.items():
            held = v.orders[0] if order == "any" else order
            if held not in v.orders:
                continue
            for segment in segments:
                if segment == segments[0] or segment < 2 * nbytes:
                    price = estimate.all_reduce(name, variant, held, network, nbytes, segment)
                    yield Offer(name, variant, held, segment, price.seconds), price


def points_table(row: list[Point]) -> Table:
    """One size over all world sizes; long lists are thinned out where nothing changes."""
    from rich.table import Table

    from hostring.bench.sizes import show

    title = f"all_reduce of {show(row[0].nbytes)} bytes, predicted milliseconds"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("ranks", *_NAMES, "best", "hub is", "limit"):
        table.add_column(heading, justify="right" if heading in ("ranks", *_NAMES) else "left")
    for point in _telling(row):
        cells = [f"{point.offers[n].seconds * 1e3:.3f}" if n in point.offers else "-" for n in _NAMES]
        part, share = point.hub
        hub = (f"{_PARTS[part]} {100 * share:.0f} %" if part else "-", "hub" if point.hub_active else "-")
        table.add_row(str(point.world_size), *cells, f"{point.best.topology}/{point.best.variant}", *hub)
    return table


def _telling(row: list[Point]) -> list[Point]:
    """All points of a short list; of a long one, those where something changes, and a few between."""
    if len(row) <= 12:
        return row
    kept = []
    for n, point in enumerate(row):
        before = row[n - 1] if n else None
        changed = before is None or (before.best.topology, before.hub_active) != (point.best.topology, point.hub_active)
        if changed or n == len(row) - 1 or point.world_size <= 8 or point.world_size & (point.world_size - 1) == 0:
            kept.append(point)
    return kept


def verdict(row: list[Point]) -> list[str]:
    """In words: from where on the hub limits, and what to change to."""
    from hostring.bench.sizes import show

    size, last = show(row[0].nbytes), row[-1]
    if all("star" not in p.offers for p in row):
        return [f"{size}: a star can't hold this order"]
    lines = [f"{size}: the hub of a star is not the constraint up to {last.world_size} ranks"]
    active = next((p for p in row if p.hub_active), None)
    if active is not None:
        part, share = active.hub
        gain = active.offers["star"].seconds / active.free
        lines = [
            f"{size}: the hub is the active constraint of a star from {active.world_size} ranks on: it is "
            f"{_PARTS[part]} {100 * share:.0f} % of the time, and without its limits the star would be "
            f"{gain:.1f}x as fast"
        ]
    change = change_from(row)
    if change is None:
        lines.append(
            f"{size}: no topology is more than {100 * (BETTER - 1):.0f} % better than the star "
            "for all of the larger groups"
        )
        return lines
    first, then = (f"{p.best.topology}/{p.best.variant}" for p in (change, last))
    gain = last.offers["star"].seconds / last.best.seconds
    by_then = "" if first == then else f" ({then} by then)"
    much = f"with {last.world_size} it is {gain:.1f}x as fast{by_then}"
    lines.append(f"{size}: change topology to {first} from {change.world_size} ranks on; {much}")
    return lines


def change_from(row: list[Point]) -> Point | None:
    """The smallest group from which on another topology always beats the star."""
    found = None
    for point in reversed(row):
        if point.change_to is None:
            break
        found = point
    return found


def _write(path: str, points: list[Point]) -> None:
    import json
    from dataclasses import asdict

    rows: list[dict[str, Any]] = []
    for p in points:
        change = p.change_to
        rows.append(
            {
                "nbytes": p.nbytes,
                "ranks": p.world_size,
                "offers": {name: asdict(o) for name, o in p.offers.items()},
                "best": p.best.topology,
                "hub_active": p.hub_active,
                "hub": {"part": p.hub[0], "share": p.hub[1]},
                "change_to": None if change is None else change.topology,
            }
        )
    with open(path, "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)
        file.write("\n")
