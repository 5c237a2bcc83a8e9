"""pytest benchmarks/test_planning.py: what a new shape costs once: building its schedule, proving it, pricing it."""

from __future__ import annotations

from typing import Any

import pytest

from hostring.cost import estimate, formulas
from hostring.cost.network import ethernet
from hostring.engine.choice import SEGMENT_NBYTES, Tuner
from hostring.topologies import TOPOLOGIES
from hostring.topologies.proof import certify_all_reduce, combinations

WAYS = list(combinations())
NAMES = ["/".join(way) for way in WAYS]


@pytest.mark.parametrize("nbytes", [16 << 10, 32 << 20])
@pytest.mark.parametrize(("topology", "variant", "order"), WAYS, ids=NAMES)
def test_building_a_schedule(benchmark: Any, topology: str, variant: str, order: str, nbytes: int) -> None:
    t = TOPOLOGIES[topology]
    schedule = benchmark(t.variants[variant].build, t.place(1, 8), nbytes // 4, order, SEGMENT_NBYTES // 4)
    assert schedule.rounds


@pytest.mark.parametrize(("topology", "variant", "order"), WAYS, ids=NAMES)
def test_certifying(benchmark: Any, topology: str, variant: str, order: str) -> None:
    assert benchmark(certify_all_reduce, topology, variant, order, 8, 64, 8).world_size == 8


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_pricing_by_running(benchmark: Any, world_size: int) -> None:
    net = ethernet(world_size)
    assert benchmark(estimate.all_reduce, "mesh", "two_shot", "rank", net, 32 << 20, SEGMENT_NBYTES).seconds > 0


def test_pricing_by_formula(benchmark: Any) -> None:
    assert benchmark(formulas.all_reduce, "two_shot", ethernet(1024), 32 << 20, SEGMENT_NBYTES).seconds > 0


def test_choosing(benchmark: Any) -> None:
    assert benchmark(Tuner("auto", "rank", 4).all_reduce, 4096, 4).name == "mesh/one_shot"
