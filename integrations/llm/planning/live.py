"""A group that plans for itself: every rank is probed, the links are measured, and all get the same answer."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

from hostring import Comm
from hostring.integrations.llm.model.devices import find_device
from hostring.integrations.llm.planning.choose import Choice, choose
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.planning.probe import probe
from hostring.integrations.llm.planning.ranks import RankSpec
from hostring.integrations.llm.planning.shares import Phase, Tie

PROBE_WAIT_S = 300.0  # how long ranks wait for one whose probe takes longer

_ROUNDS = 40  # of a reduction
_PING_ROUNDS = 8


@dataclass(frozen=True)
class Links:
    """What a reduction takes.

    Attributes:
        all_s: seconds among all ranks. cpu_s: of each rank's processor.
        pairs: of a message there and back, by pair.
    """

    all_s: float
    cpu_s: list[float]
    pairs: dict[tuple[int, int], float]

    def collective_s(self, kept: Sequence[int]) -> float:
        """Among some of the ranks: in proportion to their slowest pair."""
        worst = max(self.pairs.values(), default=0.0)
        ours = max((self.pairs[pair] for pair in combinations(sorted(kept), 2)), default=0.0)
        return self.all_s * ours / worst if worst else 0.0


def plan_live(
    comm: Comm,
    path: str | Path,
    *,
    compute: str = "auto",
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    phase: Phase = "decode",
    tie: Tie = "auto",
    max_seq: int | None = None,
    keep_all: bool = False,
) -> Choice:
    """Probe all ranks at once and the links between them, and plan. A collective; every rank gets the same plan.

    Args:
        compute, dtype, device: of this rank. The others: see `ask.plan_for`. All ranks give the same.

    Raises:
        DoesNotFit: no legal plan fits. ValueError: more ranks than units.
    """
    found = find_device(device)
    comm.barrier(timeout=PROBE_WAIT_S)
    mine = probe(path, compute, dtype, found, f"{platform.node()} {found}", comm.world_size)
    told = comm.gather_bytes(json.dumps(mine.as_json()).encode(), timeout=PROBE_WAIT_S)
    model = read_model_file(path)
    links = measure_links(comm, model.config.hidden_size)
    specs = [
        replace(RankSpec.from_json(json.loads(one)), collective_cpu_s=links.cpu_s[n]) for n, one in enumerate(told)
    ]
    return choose(model, specs, links.collective_s, phase=phase, tie=tie, max_seq=max_seq, leave_out=not keep_all)


def measure_links(comm: Comm, n_elements: int) -> Links:
    """Time reductions of one hidden state, and messages between every pair. A collective; all get the same."""
    row = np.zeros(n_elements, np.float32)
    if comm.world_size == 1:
        return Links(0.0, [0.0], {})
    comm.barrier(timeout=PROBE_WAIT_S)
    busy = process_time()
    all_s = median(_times(lambda: comm.all_reduce(row), _ROUNDS))
    cpu_s = (process_time() - busy) / _ROUNDS
    mine = []
    for a, b in combinations(range(comm.world_size), 2):
        comm.barrier()
        if comm.rank == a:
            mine.append([a, b, min(_times(partial(_ping, comm, row, b), _PING_ROUNDS))])
        elif comm.rank == b:
            for _ in range(_PING_ROUNDS):
                comm.recv(row, a)
                comm.send(row, a)
    rows = [json.loads(one) for one in comm.gather_bytes(json.dumps([all_s, cpu_s, mine]).encode())]
    pairs = {(a, b): s for one in rows for a, b, s in one[2]}
    return Links(max(one[0] for one in rows), [one[1] for one in rows], pairs)


def _ping(comm: Comm, row: Any, peer: int) -> None:
    comm.send(row, peer)
    comm.recv(row, peer)


def _times(run: Callable[[], Any], n: int) -> list[float]:
    found = []
    for _ in range(n):
        begun = perf_counter()
        run()
        found.append(perf_counter() - begun)
    return found
