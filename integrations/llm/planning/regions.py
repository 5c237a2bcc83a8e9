"""A decoder layer as the plan sees it: two regions without communication, and the boundary after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.planning.states import (
    Replicated,
    State,
    add,
    column_parallel,
    each_element,
    read_complete,
    reduce_over_ranks,
    row_parallel,
)


@dataclass(frozen=True)
class Operation:
    """One operation of a region, and the state of its result."""

    name: str
    state: State


@dataclass(frozen=True)
class Region:
    """A stretch between two reductions.

    Attributes:
        name: "attention" or "mlp".
        operations: in order; the last one's result is what is reduced.
    """

    name: str
    operations: tuple[Operation, ...]

    @property
    def unresolved(self) -> tuple[Operation, ...]:
        """The operations whose result is not the whole tensor: the longer this span, the rarer the waiting."""
        return tuple(op for op in self.operations if not isinstance(op.state, Replicated))


@dataclass(frozen=True)
class Boundary:
    """Where the ranks meet: a partial sum becomes whole."""

    after: str
    before: State
    then: State


@dataclass(frozen=True)
class Layer:
    """The regions and boundaries of one layer, in order. Every layer has the same."""

    regions: tuple[Region, ...]
    boundaries: tuple[Boundary, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "regions": [
                {
                    "name": region.name,
                    "operations": [{"name": op.name, "state": str(op.state)} for op in region.operations],
                    "unresolved_operations": len(region.unresolved),
                }
                for region in self.regions
            ],
            "boundaries_per_layer": [
                {"after": b.after, "from": str(b.before), "to": str(b.then), "by": "all_reduce"}
                for b in self.boundaries
            ],
        }


class _Tracing:
    """Notes the operations of one region while their states are derived."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def __call__(self, rule: Callable[[State, str], State], x: State, name: str) -> State:
        state = rule(x, name)
        self.operations.append(Operation(name, state))
        return state


def trace_layer(config: ModelConfig) -> Layer:
    """Run the states of one decoder layer through the rules.

    Raises:
        StateError: the layer would use a tensor for what it is not.
    """
    regions, boundaries = [], []
    stream: State = Replicated()
    for name, operations in (("attention", _attention), ("mlp", _mlp)):
        trace = _Tracing()
        partial = operations(config, trace, stream)
        regions.append(Region(name, tuple(trace.operations)))
        whole = reduce_over_ranks(partial, f"the reduction after {name}")
        boundaries.append(Boundary(name, partial, whole))
        stream = add(stream, whole, f"the residual stream after {name}")
    return Layer(tuple(regions), tuple(boundaries))


def _attention(config: ModelConfig, trace: _Tracing, stream: State) -> State:
    h = trace(read_complete, stream, "norm")
    qkv = trace(column_parallel, h, "q, k, v projections")
    if config.qk_norm:
        qkv = trace(each_element, qkv, "norms of q and k")
    qkv = trace(each_element, qkv, "rotary positions")
    mixed = trace(each_element, qkv, "attention over the heads that are here")
    return trace(row_parallel, mixed, "output projection")


def _mlp(config: ModelConfig, trace: _Tracing, stream: State) -> State:
    h = trace(read_complete, stream, "norm")
    gate_up = trace(column_parallel, h, "gate and up projections")
    product = trace(each_element, gate_up, "silu(gate) * up")
    return trace(row_parallel, product, "down projection")
