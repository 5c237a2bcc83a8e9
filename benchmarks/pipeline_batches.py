#!/usr/bin/env python3
"""Does a pipeline keep its stages busy? Texts per second with one group of texts, and with one group per stage.

    hostring launch -n 2 benchmarks/pipeline_batches.py MODEL --rows 1,2,4,8

Rank 0 measures one process first, while the others wait. Then all ranks are stages. With one group, a step of so many
rows passes all stages before the next begins; with N groups of as many rows, each stage computes another group. The
gain is at most (sum of the stages' times) / (time of the slowest). Set OMP_NUM_THREADS=1 for one thread per rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import hostring
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.pipeline.stages import stage_plan
from hostring.integrations.llm.planning.model_file import read_model_file
from hostring.integrations.llm.serve.loop import Follower, StepLoop
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.rank_part import RankPart
from hostring.integrations.llm.serve.scheduler import Scheduler
from hostring.integrations.llm.serve.text_request import Ended, Event, TextRequest

_SETTLED, _ENDING = 0.2, 0.8  # between these parts of all tokens the rate is taken


@dataclass
class Feeder:
    """The head's role: all texts are there from the start, and the run ends with the last."""

    scheduler: Scheduler
    texts: int
    tokens: int
    marks: list[tuple[float, int]] = field(default_factory=list)
    ended: int = 0

    def whole(self) -> None:
        self.scheduler.set_state("")
        requests = [TextRequest((5 + n, 17, 3, 250), self.tokens, ignore_eos=True) for n in range(self.texts)]
        self.scheduler.submit(requests, [self.came] * self.texts)

    def came(self, event: Event) -> None:
        self.ended += isinstance(event, Ended)
        if self.ended == self.texts:
            self.scheduler.end()

    def decide(self, stacked: Any, brought: Any) -> Any:
        plan = self.scheduler.decide(stacked, brought)
        self.marks.append((perf_counter(), self.scheduler.totals.generated_tokens))
        return plan

    def wait_for_work(self) -> None:
        self.scheduler.wait_for_work()

    def admissions(self) -> Any:
        return self.scheduler.admissions()

    def reported(self, reports: Any) -> None:
        pass

    def lost(self, exc: hostring.HostringError) -> None:
        raise exc

    @property
    def rate(self) -> float:
        """Tokens per second, while all texts are written."""
        total = self.texts * self.tokens
        (begun, first), *_ = [mark for mark in self.marks if mark[1] >= _SETTLED * total]
        *_, (stopped, last) = [mark for mark in self.marks if mark[1] <= _ENDING * total]
        return (last - first) / (stopped - begun)


def measure(part: RankPart, options: ServeOptions, texts: int, tokens: int) -> tuple[float, list[float]]:
    """Tokens per second at the head, and the seconds that each rank computes per step. A collective."""
    model, comm = part.model, part.comm
    role: Any = Follower()
    if comm.rank == 0:
        shard = max(model.sharded.plan.vocab)
        scheduler = Scheduler(options, model.tokenizer, shard, model.sharded.max_seq, part.groups)
        role = Feeder(scheduler, texts, tokens)
    before = model.sharded.reducer.clock.seconds
    with contextlib.ExitStack() as groups:
        StepLoop(part, role, 0.0, groups).run()
    computed = model.sharded.reducer.clock.seconds - before
    steps = role.scheduler.totals.steps if comm.rank == 0 else 0
    told = [json.loads(one) for one in comm.gather_bytes(json.dumps([computed, steps]).encode())]
    return role.rate if comm.rank == 0 else 0.0, [seconds / told[0][1] for seconds, _ in told]


def best(part: RankPart, options: ServeOptions, texts: int, wanted: argparse.Namespace) -> tuple[float, list[float]]:
    """Of several tries the fastest."""
    return max(measure(part, options, texts, wanted.tokens) for _ in range(wanted.tries))


def loaded(wanted: argparse.Namespace, comm: hostring.Comm, groups: int) -> tuple[RankPart, ServeOptions]:
    stages: Any = ()
    if comm.world_size > 1:
        plan = stage_plan(wanted.plan or f"pp={comm.world_size}", read_model_file(wanted.model).config, comm.world_size)
        stages = (plan.layers, plan.ranks)
    dtypes = (wanted.dtype,) * comm.world_size
    job = Job(wanted.model, dtypes, (), 1, 0.0, 0, 1.0, 0, False, compute=wanted.compute, stages=stages)
    options = ServeOptions(job, streams=wanted.most, context=256, groups=groups)
    return RankPart(options, comm, "cpu"), options


def one_process(wanted: argparse.Namespace, texts: list[int]) -> dict[int, float]:
    with hostring.init(0, 1) as alone:
        part, options = loaded(wanted, alone, 1)
        return {n: best(part, options, n, wanted)[0] for n in texts}


def show(rows: list[dict[str, Any]], stages: int) -> None:
    print(
        f"{'rows per':>8} {'one process, tokens/s':>22} {'pipeline, tokens/s':>21} {'':>6} {'sum t':>7} {'gain by':>8}"
    )
    print(f"{'group':>8} {'rows':>10} {f'{stages}x rows':>11} {'1 group':>10} {f'{stages} groups':>10} {'gain':>6} "
          f"{'/ max t':>7} {'that':>8}")  # fmt: skip
    for row in rows:
        share = row["gain"] / row["most"]
        print(f"{row['rows']:8d} {row['alone']:10.1f} {row['alone_all']:11.1f} {row['one_group']:10.1f} "
              f"{row['groups']:10.1f} {row['gain']:6.2f} {row['most']:7.2f} {share:8.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", default="1,2,4,8", help="rows per group")
    parser.add_argument("--tokens", type=int, default=40, help="of each text")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--plan", default="", help="such as pp=2,layers=16/14")
    parser.add_argument("--compute", choices=("packed", "exact"), default="exact")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", default="")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(word) for word in wanted.rows.split(",")]
    with hostring.init(timeout=600.0) as comm:
        stages = comm.world_size
        wanted.most = stages * max(counts)
        texts = sorted({*counts, *(stages * n for n in counts)})
        alone = one_process(wanted, texts) if comm.rank == 0 else {}
        comm.barrier()
        one, one_options = loaded(wanted, comm, 1)
        single = {n: best(one, one_options, n, wanted) for n in counts}
        several, options = loaded(wanted, comm, stages)
        rates = {n: best(several, options, stages * n, wanted)[0] for n in counts}
        if comm.rank:
            sys.exit(0)
    rows = []
    for n in counts:
        rate, times = single[n]
        figures = {"alone": alone[n], "alone_all": alone[stages * n], "one_group": rate, "groups": rates[n]}
        rows.append({"rows": n, **figures, "gain": rates[n] / rate, "most": sum(times) / max(times), "times": times})
    show(rows, stages)
    if wanted.json:
        Path(wanted.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
