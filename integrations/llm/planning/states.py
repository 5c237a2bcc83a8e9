"""What a tensor on one rank is, of the tensor that the model means: the whole, a slice, or a term of a sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Replicated:
    """The whole tensor, with the same bits on every rank."""

    def __str__(self) -> str:
        return "Replicated"


@dataclass(frozen=True)
class Sharded:
    """This rank's slice along `dim`; the slices of all ranks make up the whole."""

    dim: int

    def __str__(self) -> str:
        return f"Sharded({self.dim})"


@dataclass(frozen=True)
class PartialSum:
    """One term: the sum over all ranks is the tensor."""

    def __str__(self) -> str:
        return "PartialSum"


State: TypeAlias = Replicated | Sharded | PartialSum


class StateError(TypeError):
    """An operation whose result would be wrong: its operands are not what it takes them for."""


def read_complete(state: State, who: str) -> Replicated:
    """The state of what is read as the whole tensor.

    Raises:
        StateError: it is not whole here.
    """
    if isinstance(state, PartialSum):
        raise StateError(f"{who} reads a partial sum as if it were complete; reduce it first")
    if isinstance(state, Sharded):
        raise StateError(f"{who} reads {state} as if it were the whole tensor; gather it first")
    return state


def add(a: State, b: State, who: str = "an addition") -> State:
    """The state of a + b.

    Raises:
        StateError: the two are not alike.
    """
    if a != b:
        raise StateError(f"{who} adds {a} to {b}; reduce or gather one of them first")
    return a


def reduce_over_ranks(state: State, who: str = "an all-reduce") -> Replicated:
    """The state after an all-reduce.

    Raises:
        StateError: there is nothing to be reduced.
    """
    if isinstance(state, Replicated):
        raise StateError(f"{who} would count a complete tensor once for each rank: it was reduced already")
    if isinstance(state, Sharded):
        raise StateError(f"{who} would add slices of different rows: {state} is to be gathered")
    return Replicated()


def column_parallel(x: State, who: str) -> Sharded:
    """The state of x Wᵀ when each rank holds some rows of W: it takes the whole x, and makes some of the columns."""
    read_complete(x, who)
    return Sharded(-1)


def row_parallel(x: State, who: str) -> PartialSum:
    """The state of x Wᵀ when each rank holds the columns of W that belong to its slice of x.

    Raises:
        StateError: x is not sliced along its last dimension.
    """
    if x != Sharded(-1):
        raise StateError(f"{who} multiplies a slice of the last dimension, and was given {x}")
    return PartialSum()


def each_element(x: State, who: str) -> State:
    """The state of f(x) for an f that is no sum: norms, activations, attention over the heads that are here.

    Raises:
        StateError: f of a term is no term of f.
    """
    if isinstance(x, PartialSum):
        raise StateError(f"{who} of a partial sum is not the partial sum of {who}; reduce it first")
    return x
