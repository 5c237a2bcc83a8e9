"""The price of a whole collective in a topology. Small groups are simulated; large ones are priced by formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from hostring.cost import formulas
from hostring.cost.network import Network
from hostring.cost.simulate import Price, price
from hostring.topologies import TOPOLOGIES, collectives
from hostring.topologies.routes import Place
from hostring.topologies.schedule import Schedule

MAX_SIMULATED_RANKS: Final = 8  # with more ranks, building the schedules is slow, and the formulas are as good
_PIECES: Final = 8, 16  # pieces of a long pipeline that are run; the difference gives the cost of each further piece


def all_reduce(
    topology: str,
    variant: str,
    order: str,
    network: Network,
    nbytes: int,
    segment_nbytes: int,
    itemsize: int = 4,
    raw_itemsize: int | None = None,
) -> Price:
    """The price of an all-reduce of `nbytes` as `itemsize`-byte elements."""
    n = network.world_size
    if n > MAX_SIMULATED_RANKS:
        return formulas.all_reduce(variant, network, nbytes, segment_nbytes)
    t = TOPOLOGIES[topology]
    segment = max(1, segment_nbytes // itemsize)
    parts = n if variant in formulas.CHUNKED else 1

    def build(n_elements: int) -> list[Schedule]:
        return [t.variants[variant].build(t.place(rank, n), n_elements, order, segment) for rank in range(n)]

    return _pipelined(build, -(-nbytes // itemsize), segment * parts, network, itemsize, raw_itemsize)


def movement(
    collective: str, topology: str, order: str, network: Network, nbytes: int, segment_nbytes: int, itemsize: int = 4
) -> Price:
    """The price of another collective.

    Args:
        nbytes: of the buffer of reduce, broadcast, reduce_scatter, scatter and all_to_all; of one rank's share of
            all_gather and gather.
    """
    n = network.world_size
    next_hop = TOPOLOGIES[topology].next_hop
    segment = max(1, segment_nbytes // itemsize)

    def build(n_elements: int) -> list[Schedule]:
        return [even_schedule(collective, Place(rank, n, next_hop), n_elements, order, segment) for rank in range(n)]

    return _pipelined(build, -(-nbytes // itemsize), segment, network, itemsize, None)


def even_schedule(collective: str, place: Place, n_elements: int, order: str, segment: int) -> Schedule:
    """The schedule of an even collective with root 0. For `n_elements` see `movement`."""
    n = place.world_size
    even = [(r + 1) * n_elements // n - r * n_elements // n for r in range(n)]
    shares = [n_elements] * n
    details: dict[str, Any] = {
        "reduce": 0, "reduce_scatter": even, "broadcast": 0, "all_gather": shares, "gather": (0, shares),
        "scatter": (0, even), "all_to_all": [even] * n, "barrier": None,
    }  # fmt: skip
    return collectives.schedule_of(collective, place, n_elements, details[collective], order, segment)


def _pipelined(
    build: Callable[[int], Sequence[Schedule]],
    n_elements: int,
    piece: int,
    network: Network,
    itemsize: int,
    raw_itemsize: int | None,
) -> Price:
    few, more = _PIECES
    if n_elements <= (more + few) * piece:
        return price(build(n_elements), network, itemsize, raw_itemsize)
    a = price(build(few * piece), network, itemsize, raw_itemsize)
    b = price(build(more * piece), network, itemsize, raw_itemsize)
    further = (n_elements / piece - more) / (more - few)
    busy = {resource: taken + further * (taken - a.busy.get(resource, 0.0)) for resource, taken in b.busy.items()}
    return Price(b.seconds + further * (b.seconds - a.seconds), (), busy)
