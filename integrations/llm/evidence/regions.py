"""How long each region of a layer computes, and how long its reduction takes, on a live group."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

from hostring.integrations.llm.generate import Model

REGIONS = ("attention", "MLP")


class _Timed:
    """Stands in for the group: notes when each reduction begins and ends."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.computed: list[float] = []
        self.reduced: list[float] = []
        self.since = perf_counter()

    def all_reduce(self, x: Any, /) -> Any:
        begun = perf_counter()
        self.computed.append(begun - self.since)
        self._comm.all_reduce(x)
        self.since = perf_counter()
        self.reduced.append(self.since - begun)
        return x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def measure_regions(model: Model, ids: list[int], steps: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each region in decode steps, all layers of a step together. A collective.

    Returns:
        by region, "compute" and "reduce", one figure per step.
    """
    sharded = model.sharded
    group = sharded.reducer.comm
    cache, timed = sharded.new_cache(), _Timed(group)
    sharded.step(torch.tensor([ids]), cache)
    token = torch.tensor([[ids[-1]]])
    found: dict[str, dict[str, list[float]]] = {name: {"compute": [], "reduce": []} for name in REGIONS}
    sharded.reducer.comm = timed
    try:
        for _ in range(steps):
            timed.computed, timed.reduced, timed.since = [], [], perf_counter()
            sharded.step(token, cache)
            for n, name in enumerate(REGIONS):
                found[name]["compute"].append(sum(timed.computed[n::2]))
                found[name]["reduce"].append(sum(timed.reduced[n::2]))
    finally:
        sharded.reducer.comm = group
    return found
