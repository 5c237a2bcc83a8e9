"""A decoder layer as the plan sees it: two regions without communication, and the boundary after each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.regions import Attention, Experts, GatedMlp, layers_of
from hostring.integrations.llm.model.regions import Region as LayerRegion
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


class StateOperations:
    """Runs the layers' own description on states instead of tensors: see `model.regions.Operations`.

    Attributes:
        regions, boundaries: what was run so far.
    """

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.boundaries: list[Boundary] = []
        self._operations: list[Operation] = []

    def norm(self, h: State, region: LayerRegion) -> State:
        return self._note("norm", read_complete(h, f"the norm before {region.side}"))

    def project(self, x: State, region: LayerRegion) -> State:
        return self._note(region.first, column_parallel(x, region.first))

    def norm_heads(self, heads: State, region: Attention) -> State:
        return self._note("norms of queries and keys", each_element(heads, "a norm"))

    def norm_across(self, heads: State, x: State, region: Attention) -> State:
        read_complete(x, "the norm over all heads")  # of which it computes the squares of all
        return self._note("norms over all queries and over all keys", each_element(heads, "a norm"))

    def turn(self, heads: State, region: Attention) -> State:
        return self._note("rotary positions", each_element(heads, "a rotation"))

    def attend(self, heads: State, region: Attention) -> State:
        return self._note("attention over the heads that are here", each_element(heads, "attention"))

    def gate(self, gate_up: State, region: GatedMlp) -> State:
        return self._note("silu(gate) * up", each_element(gate_up, "silu"))

    def route(self, h: State, x: State, region: Experts) -> State:
        read_complete(h, "the router")
        return self._note("router", read_complete(x, "the router"))

    def gate_experts(self, x: State, routes: State, region: Experts) -> State:
        read_complete(routes, "the choice of experts")
        gate_up = self._note(f"{region.first} of the experts", column_parallel(x, region.first))
        return self._note("silu(gate) * up", each_element(gate_up, "silu"))

    def add_sum(self, h: State, x: State, region: LayerRegion) -> State:
        partial = self._note(region.last, row_parallel(x, region.last))
        whole = reduce_over_ranks(partial, f"the reduction after {region.side}")
        self.regions.append(Region(region.side, tuple(self._operations)))
        self.boundaries.append(Boundary(region.side, partial, whole))
        self._operations = []
        return add(h, whole, f"the residual stream after {region.side}")

    def _note(self, name: str, state: State) -> State:
        self._operations.append(Operation(name, state))
        return state


def trace_layer(config: ModelConfig) -> Layer:
    """Run the states of one decoder layer through the rules. Every layer of a model is alike.

    Raises:
        StateError: the layer would use a tensor for what it is not, or ends with something else than the whole stream.
    """
    operations = StateOperations()
    stream: State = Replicated()
    for region in layers_of(config)[0]:
        stream = region.run(operations, stream)
    read_complete(stream, "the next layer")
    return Layer(tuple(operations.regions), tuple(operations.boundaries))
