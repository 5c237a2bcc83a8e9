"""Time limits of torch groups, and how they end."""

from __future__ import annotations

import datetime
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402

import hostring  # noqa: E402


def _monitored(group):
    pg = dist.group.WORLD
    pg.monitored_barrier(datetime.timedelta(seconds=20))
    short = datetime.timedelta(seconds=0.4)
    if group.rank == 1:
        return None
    with pytest.raises(RuntimeError) as caught:
        pg.monitored_barrier(short if group.rank == 0 else datetime.timedelta(seconds=1.5))
    return str(caught.value)


def test_monitored_barrier_names_who_is_missing():
    words = pool.run(3, _monitored)
    assert words[0] == "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 400 ms"
    assert words[2] == "[Rank 2]: Rank 0 timed out in monitoredBarrier after 1500 ms."


def _all_missing(group):
    if group.rank:
        return None
    with pytest.raises(RuntimeError) as caught:
        dist.group.WORLD.monitored_barrier(datetime.timedelta(seconds=0.3), wait_all_ranks=True)
    return str(caught.value)


def test_monitored_barrier_can_name_all():
    assert pool.run(3, _all_missing)[0] == "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 300 ms"


def _timeouts(group):
    pg = dist.group.WORLD
    pg.set_timeout(datetime.timedelta(seconds=0.5))
    if group.rank == 1:
        time.sleep(1.2)
        return None
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"barrier #0: rank 1 .* in 0\.5 s"):
        dist.barrier()
    return time.monotonic() - started


def test_the_groups_timeout_can_be_changed():
    assert 0.4 < pool.run(2, _timeouts, seconds=60.0)[0] < 10


def _ephemeral(group):
    pg = dist.group.WORLD
    pg.set_timeout(datetime.timedelta(seconds=0.3))
    pg._add_ephemeral_timeout(datetime.timedelta(seconds=20))
    if group.rank == 1:
        time.sleep(1.0)
    dist.barrier()  # gets the extra time
    dist.barrier()
    return True


def test_a_call_can_be_given_extra_time_once():
    assert all(pool.run(2, _ephemeral))


def _aborted(group):
    x = torch.ones(1)
    if group.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.2)
        dist.group.WORLD.abort()
    else:
        time.sleep(1.0)
        dist.all_reduce(x)  # rank 0 has done its part of this one
        work = dist.all_reduce(x, async_op=True)
    with pytest.raises(hostring.HostringError) as caught:
        work.wait()
    return str(caught.value)


def test_abort_ends_calls_on_every_rank():
    words = pool.run(2, _aborted)
    assert all("abort" in w for w in words), words


def _destroyed(group):
    """Destroying waits for what is in flight."""
    xs = [torch.full((1000,), group.rank + 1.0) for _ in range(50)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    dist.destroy_process_group()
    assert all(w.is_completed() for w in works)
    return all(x[0] == 3.0 for x in xs)


def test_destroy_with_works_in_flight():
    assert pool.run(2, _destroyed) == [True, True]


def _again(group):
    seen = []
    store = dist.FileStore(f"{group.folder}/again", group.world_size)
    for k in range(3):
        dist.destroy_process_group()
        dist.init_process_group("hostring", store=store, rank=group.rank, world_size=group.world_size)
        x = torch.full((1,), float(k + group.rank))
        dist.all_reduce(x)
        seen.append(x.item())
    return seen


def test_init_destroy_init_on_one_store():
    assert pool.run(2, _again) == [[1.0, 3.0, 5.0]] * 2
