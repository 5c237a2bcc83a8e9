"""The table of thresholds that a group uses as long as nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from hostring.arrays.dtypes import FLOAT32, WIRES, nbytes_of, rounds_results
from hostring.engine.choice import SEGMENT_NBYTES, WHOLE, Table, Threshold
from hostring.topologies.rules import Way

ONE_HOST_SEGMENT_NBYTES: Final = 1 << 20  # on one machine a switch between processes costs more than a cache miss
ONE_HOST_NBYTES: Final = {3: 1 << 17, 4: 1 << 17}  # up to which one round beats two on one machine, by world size
ONE_HOST_MANY_NBYTES: Final = 1 << 15  # the same for more ranks
ONE_HOST_DOUBLING = 8, 1 << 15
"""From so many ranks on, and up to so many bytes, few long messages beat many short ones on one machine."""
_DOUBLING: Final = ("dissemination", "doubling")
_SMALL: Final = {"mesh": "one_shot", "ring": "relay"}  # the variants with the fewest rounds
_SIZES: Final = tuple(1 << k for k in range(6, 21))
_LARGE: Final = tuple(1 << k for k in range(21, 27))


def default_table(
    allowed: Mapping[str, Sequence[Way]], world_size: int, *, one_host: bool, wire: str = "float32"
) -> Table:
    """The links' own schedules, with fewer rounds for small messages.

    Args:
        allowed: what may be used, by collective, the links' own first: see `Tuner`.
        one_host: all ranks are on one machine.
        wire: the group's: on a network, contributions that travel in fewer bytes make other variants the quickest.
    """
    table: dict[str, list[Threshold]] = {}
    for collective, ways in allowed.items():
        topology = ways[0][0]
        variants = [v for t, v in ways if t == topology]
        small = _SMALL.get(topology) if collective == "all_reduce" else None
        large = next((v for v in variants if v != small), variants[0])
        segment = ONE_HOST_SEGMENT_NBYTES if one_host and large == "two_shot" else 0
        table[collective] = [Threshold(WHOLE, topology, large, segment)]
        if small in variants and small != large:
            upto = _few_rounds_nbytes(small, large, world_size, one_host, wire)
            others = table[collective] if upto < WHOLE else []
            table[collective] = [Threshold(upto, topology, small, segment), *others]
        if _DOUBLING in ways and topology == "mesh":
            upto = _doubling_nbytes(world_size, one_host, wire)
            later = [threshold for threshold in table[collective] if threshold.upto > upto]
            table[collective] = [*([Threshold(upto, *_DOUBLING)] if upto else []), *later]
    return table


@lru_cache(maxsize=256)
def _doubling_nbytes(world_size: int, one_host: bool, wire: str) -> int:
    """Up to which size the fewest messages of each rank are the quickest way; 0 where they never are."""
    if one_host:
        ranks, nbytes = ONE_HOST_DOUBLING
        return nbytes if world_size >= ranks else 0
    from hostring.cost import formulas
    from hostring.cost.network import ethernet

    network = ethernet(max(2, world_size))

    def quickest(nbytes: int) -> bool:
        ways = ("doubling", "one_shot", "two_shot")
        first, *others = (
            formulas.all_reduce(v, network, _travelling(v, nbytes, wire), SEGMENT_NBYTES).seconds for v in ways
        )
        return first < min(others)

    return max((n for n in _SIZES if quickest(n)), default=0)


@lru_cache(maxsize=256)
def _few_rounds_nbytes(small: str, large: str, world_size: int, one_host: bool, wire: str) -> int:
    """Up to which size the variant with fewer rounds is the quicker one."""
    if (
        world_size == 2
    ):  # both send the same bytes, one shot in one round, and it needn't widen what it folds in 16 bits
        return WHOLE
    if one_host:
        return ONE_HOST_NBYTES.get(world_size, ONE_HOST_MANY_NBYTES)
    from hostring.cost import formulas  # with decimal and statistics: a group on one host doesn't need it
    from hostring.cost.network import ethernet

    network = ethernet(max(2, world_size))

    def cost(variant: str, nbytes: int) -> float:
        return formulas.all_reduce(variant, network, _travelling(variant, nbytes, wire), SEGMENT_NBYTES).seconds

    sizes = [n for n in (*_SIZES, *_LARGE) if cost(small, n) <= cost(large, n)]
    return WHOLE if _LARGE[-1] in sizes else max(sizes, default=0)


def _travelling(variant: str, nbytes: int, wire: str) -> int:
    """The bytes that a message of `nbytes` of float32 has on average, in an all-reduce over this wire."""
    payload = WIRES[wire]
    narrow = nbytes_of(-(-nbytes // 4), payload) if payload != FLOAT32 else nbytes
    if variant in ("one_shot", "relay", "doubling") or rounds_results(wire):
        return narrow
    return (narrow + nbytes) // 2 if variant == "two_shot" else nbytes
