"""Tensor states: what is no whole tensor is never read as one, and a layer has exactly two boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from model_headers import sparse_gguf

from hostring.integrations.llm.model.regions import GatedMlp
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.regions import StateOperations, trace_layer
from hostring.integrations.llm.planning.states import (
    PartialSum,
    Replicated,
    Sharded,
    StateError,
    add,
    column_parallel,
    each_element,
    read_complete,
    reduce_over_ranks,
    row_parallel,
)


def test_a_partial_sum_is_not_read_as_complete() -> None:
    for reads in (read_complete, column_parallel, each_element):
        with pytest.raises(StateError, match="partial sum"):
            reads(PartialSum(), "norm")


def test_a_slice_is_not_read_as_the_whole() -> None:
    with pytest.raises(StateError, match=r"norm reads Sharded\(-1\) as if it were the whole tensor"):
        read_complete(Sharded(-1), "norm")


@pytest.mark.parametrize(
    ("a", "b"), [(Replicated(), PartialSum()), (Sharded(0), Sharded(1)), (Sharded(-1), Replicated())]
)
def test_unlike_states_are_not_added(a: object, b: object) -> None:
    with pytest.raises(StateError, match="adds"):
        add(a, b)  # type: ignore[arg-type]
    assert add(PartialSum(), PartialSum()) == PartialSum()


def test_nothing_is_reduced_twice() -> None:
    whole = reduce_over_ranks(PartialSum())
    assert whole == Replicated()
    with pytest.raises(StateError, match="reduced already"):
        reduce_over_ranks(whole)
    with pytest.raises(StateError, match="slices"):
        reduce_over_ranks(Sharded(0))


def test_a_row_parallel_product_takes_what_a_column_parallel_one_made() -> None:
    assert row_parallel(column_parallel(Replicated(), "up"), "down") == PartialSum()
    with pytest.raises(StateError, match="was given Replicated"):
        row_parallel(Replicated(), "down")


def test_a_layer_has_two_regions_and_two_boundaries(tmp_path) -> None:
    layer = trace_layer(read_model_file(sparse_gguf(tmp_path / "m.gguf")).config)
    assert [region.name for region in layer.regions] == ["attention", "mlp"]
    assert [(b.after, b.before, b.then) for b in layer.boundaries] == [
        ("attention", PartialSum(), Replicated()),
        ("mlp", PartialSum(), Replicated()),
    ]
    assert [len(region.unresolved) for region in layer.regions] == [4, 3]


@dataclass(frozen=True)
class Broken(GatedMlp):
    """An MLP whose description does what it must not."""

    how: str = ""

    def run(self, ops: Any, h: Any) -> Any:
        if self.how == "unlike":
            return add(h, ops.project(h, self))
        if self.how == "not reduced":
            x = ops.gate(ops.project(ops.norm(h, self), self), self)
            return ops.norm(row_parallel(x, "down"), self)
        return ops.add_sum(h, ops.norm(h, self), self)


@pytest.mark.parametrize(
    ("how", "words"),
    [("unlike", "adds"), ("not reduced", "reads a partial sum"), ("not sliced", "was given Replicated")],
)
def test_a_layer_that_misuses_a_tensor_is_refused_when_its_states_are_traced(how: str, words: str) -> None:
    """What is checked is the description that the layers themselves are made from."""
    with pytest.raises(StateError, match=words):
        Broken(8, how=how).run(StateOperations(), Replicated())
