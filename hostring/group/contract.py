"""What the ranks of a group must agree on before the first byte, and which of them the topology links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostring.arrays.dtypes import WIRES
from hostring.topologies import TOPOLOGIES
from hostring.topologies.rules import read_rules


def contract(topology: str, order: str, wire: str = "float32") -> dict[str, Any]:
    """What all ranks must have agreed on: compared in the hello.

    Raises:
        ValueError: no such wire.
    """
    if wire not in WIRES:
        raise ValueError(f"wire={wire!r} is unknown; use {' or '.join(WIRES)}")
    return {"order": order, "topology": topology, "wire": wire}


def neighbours(topology: str, order: str) -> Callable[[int, int], set[int]]:
    """Between which ranks the topology needs links."""
    return TOPOLOGIES[read_rules(topology, order).links].neighbours
