"""What torch's profiler shows of calls: the caller's rows under c10d's names, and the backend's own."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from torch_ranks import pool  # noqa: E402


def _calls(group):
    x, n = torch.ones(4), group.world_size
    many = lambda: [torch.ones(4) for _ in range(n)]  # noqa: E731
    mine = lambda: many() if group.rank == 0 else None  # noqa: E731
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather(many(), x)
    dist.all_gather_single(torch.ones(4 * n), x)
    dist.reduce_scatter(x, many())
    dist.reduce_scatter_single(torch.ones(4), torch.ones(4 * n))
    dist.gather(x, mine())
    dist.scatter(x, mine())
    dist.all_to_all_single(torch.ones(2 * n), torch.ones(2 * n))
    dist.barrier()
    if group.rank < 2:
        dist.send(x, 1) if group.rank == 0 else dist.recv(x, 0)
        peer = 1 - group.rank
        ops = [dist.P2POp(dist.isend, x.clone(), peer), dist.P2POp(dist.irecv, x, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


ROWS = {
    "all_reduce": "c10d::allreduce_",
    "broadcast": "c10d::broadcast_",
    "reduce": "c10d::reduce_",
    "gather": "c10d::gather_",
    "scatter": "c10d::scatter_",
    "barrier": "c10d::barrier",
    "all_to_all": "c10d::alltoall_base_",
}


def _profiled(group):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _calls(group)
    rows = {e.key: e.count for e in seen.key_averages()}
    return {key: n for key, n in rows.items() if key.startswith(("c10d::", "hostring:", "gloo:"))}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_of_blocking_calls_and_messages_have_gloos_names():
    ours, theirs = pool.run(2, _profiled), pool.run(2, _profiled, backend="gloo")
    for mine, gloos in zip(ours, theirs, strict=True):
        callers = {key: n for key, n in mine.items() if key.startswith("c10d::")}
        assert callers == {key: n for key, n in gloos.items() if key.startswith("c10d::")}
        backend = {key.removeprefix("hostring:") for key in mine if key.startswith("hostring:")}
        assert backend >= {*ROWS, "all_gather", "reduce_scatter", "send" if "c10d::send" in mine else "recv"}


def _asynchronous(group, folder):
    x = torch.ones(1 << 16)
    dist.all_reduce(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        dist.barrier()
    trace = f"{folder}/{group.rank}.json"
    seen.export_chrome_trace(trace)
    with open(trace, encoding="utf-8") as file:
        names = [e.get("name", "") for e in json.load(file)["traceEvents"] if e.get("ph") == "X"]
    return {e.key: e.count for e in seen.key_averages()}, [n for n in names if n.startswith(("c10d::", "hostring:"))]


def test_rows_of_asynchronous_calls_and_in_kineto_traces(tmp_path):
    for rows, trace in pool.run(2, _asynchronous, str(tmp_path)):
        assert rows["c10d::allreduce_"] == 3
        assert rows["hostring:all_reduce"] == 3
        assert trace.count("c10d::allreduce_") == 3
        assert trace.count("hostring:all_reduce") == 3
        assert trace.count("c10d::barrier") == 1


def _all_threads(group):
    from torch._C._profiler import _ExperimentalConfig

    config = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as seen:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        work.wait()
    return {e.key: e.count for e in seen.key_averages()}.get("hostring:all_reduce carried out")


def test_whoever_carries_a_queued_call_out_has_a_row_where_all_threads_are_profiled():
    assert pool.run(2, _all_threads) == [1, 1]


def _without(group):
    entered = []
    before = torch.autograd.profiler.record_function.__enter__
    torch.autograd.profiler.record_function.__enter__ = lambda self: entered.append(self) or before(self)
    try:
        _calls(group)
    finally:
        torch.autograd.profiler.record_function.__enter__ = before
    return len(entered)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_without_a_profiler_nothing_is_recorded():
    assert pool.run(2, _without) == [0, 0]
