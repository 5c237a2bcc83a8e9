"""Graphs of ggml, planned once and computed many times by one backend."""

from __future__ import annotations

from collections.abc import Sequence

from hostring.integrations.llm.packed.library import Pointer
from hostring.integrations.llm.packed.memory import Arena


class Graph:
    """One graph under construction. `nodes` bounds its operations."""

    def __init__(self, arena: Arena, nodes: int, context: Pointer | None = None) -> None:
        self._ggml = arena.ggml
        self.context = arena.context(2 * nodes, 1, nodes) if context is None else context
        self.pointer = self._ggml.new_graph_custom(self.context, nodes, False)

    def expand(self, tensor: Pointer) -> None:
        """Compute `tensor`, and before it what it needs. What is expanded first is computed first."""
        self._ggml.build_forward_expand(self.pointer, tensor)


class Backend:
    """ggml's CPU backend: how many threads compute, and with which kernels.

    Args:
        reference: kernels don't choose another order of additions for many rows. So a chunk of any length gives the
            bits of its rows one by one, and attention takes longer: half the time of a prompt of 512 tokens.
    """

    def __init__(self, arena: Arena, threads: int, reference: bool = True) -> None:
        ggml = arena.ggml
        self.pointer = arena.own(ggml.backend_free, ggml.backend_cpu_init())
        ggml.backend_cpu_set_n_threads(self.pointer, threads)
        ggml.backend_cpu_set_use_ref(self.pointer, reference)  # plans keep what they were made with

    def plan(self, arena: Arena, graphs: Sequence[Graph]) -> list[Pointer]:
        """Place what the graphs compute in one arena of scratch, which they use one after another, and plan each."""
        ggml = arena.ggml
        scratch = arena.own(ggml.gallocr_free, ggml.gallocr_new(ggml.backend_cpu_buffer_type()))
        for graph in graphs:  # the largest first: scratch that grows would leave earlier graphs dangling
            if not ggml.gallocr_reserve(scratch, graph.pointer):
                raise MemoryError("ggml has no memory for the activations; use a shorter prompt chunk")
        size = ggml.gallocr_get_buffer_size(scratch, 0)
        for graph in graphs:
            if not ggml.gallocr_alloc_graph(scratch, graph.pointer):
                raise MemoryError("ggml has no memory for the activations; use a shorter prompt chunk")
        assert ggml.gallocr_get_buffer_size(scratch, 0) == size
        backend = self.pointer
        plans = []
        for graph in graphs:
            plan = ggml.backend_graph_plan_create(backend, graph.pointer)
            plans.append(plan)
            arena.own(lambda p: ggml.backend_graph_plan_free(backend, p), plan)
        return plans


def compute_once(arena: Arena, graph: Graph) -> None:
    """Compute a single small graph."""
    backend = Backend(arena, 1)
    (plan,) = backend.plan(arena, [graph])
    arena.ggml.backend_graph_plan_compute(backend.pointer, plan)
