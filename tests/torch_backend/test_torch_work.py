"""Works and futures of torch's backend: order, callbacks, failures, threads."""

from __future__ import annotations

import datetime
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_contributions import total  # noqa: E402
from torch_ranks import pool  # noqa: E402

import hostring  # noqa: E402


def _works(group):
    x = torch.full((3,), group.rank + 1.0)
    work = dist.all_reduce(x, async_op=True)
    assert work.wait() is True
    assert x.tolist() == [total(group.world_size)] * 3
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(20)]
    give_up = time.monotonic() + 20
    while not all(w.is_completed() for w in works) and time.monotonic() < give_up:  # progress without wait
        time.sleep(0.001)
    assert all(w.is_completed() for w in works)
    return True


def test_works():
    assert all(pool.run(2, _works))


def _futures(group):
    ys = [torch.full((2,), group.rank + k + 1.0) for k in range(4)]
    seen = []

    def note(k):
        def callback(future):
            seen.append(k)
            extra = torch.ones(1)
            dist.all_reduce(extra)  # a blocking collective inside a callback, as PowerSGD does
            return future.value()[0] * extra

        return callback

    # All are submitted before a callback runs: threads that submit at the same time would have no order on which ranks
    # agree. Those of the callbacks are alike.
    works = [dist.all_reduce(y, async_op=True) for y in ys]
    futures = [work.get_future().then(note(k)) for k, work in enumerate(works)]
    results = [f.wait() for f in futures]
    n = group.world_size
    assert all(torch.equal(r, torch.full((2,), n * (total(n) + n * k))) for k, r in enumerate(results))
    assert sorted(seen) == [0, 1, 2, 3]
    done = dist.all_reduce(torch.ones(1), async_op=True)
    done.wait()
    assert done.get_future().value()[0].item() == n
    assert done.get_future() is done.get_future()
    assert done.get_future_result().wait() == 0
    return True


def test_futures_may_call_collectives_in_their_callbacks():
    assert all(pool.run(2, _futures))


def _chained(group):
    """A callback that waits for the future of a collective of its own."""

    def outer(future):
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    result = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(outer).wait()
    return result.tolist()


def test_a_callback_may_wait_for_another_future():
    assert pool.run(2, _chained) == [[4.0, 4.0]] * 2


def _failed_future(group):
    pg = dist.group.WORLD
    if group.rank == 1:
        time.sleep(1.5)
        return None
    work = pg.allreduce([torch.ones(1)], timeout=datetime.timedelta(seconds=0.3))
    future = work.get_future()
    with pytest.raises(hostring.OperationTimeout, match="rank 1"):
        work.wait()
    assert isinstance(work.exception(), hostring.OperationTimeout)
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(Exception, match="rank 1"):
        future.wait()
    with pytest.raises(hostring.OperationTimeout):  # the group is poisoned: later calls raise the first cause
        dist.all_reduce(torch.ones(1))
    return str(work.exception())


def test_a_failed_call_fails_its_future_and_every_later_call():
    words = pool.run(2, _failed_future, seconds=30.0)[0]
    assert "all_reduce #0: rank 1" in words
    assert " timeout " in words


def _order(group):
    """Queued and blocking calls on several groups, in an order that only works if each group is first in, first out."""
    other = dist.new_group([0, 1])
    a = [torch.full((1,), float(k)) for k in range(10)]
    if group.rank == 0:
        works = [dist.all_reduce(x, async_op=True) for x in a]
        theirs = [dist.all_reduce(torch.full((1,), 100.0), group=other, async_op=True) for _ in range(5)]
    else:
        theirs = [dist.all_reduce(torch.full((1,), 100.0), group=other, async_op=True) for _ in range(5)]
        works = [dist.all_reduce(x, async_op=True) for x in a]
    last = torch.ones(1)
    dist.all_reduce(last)
    for work in theirs + works:
        work.wait()
    return [x.item() for x in a], last.item()


def test_groups_do_not_wait_for_each_other():
    assert pool.run(2, _order) == [([2.0 * k for k in range(10)], 2.0)] * 2


def _threads(group):
    """Each thread uses a group of its own; torch's default group is used by all of them in turn."""
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    results = {}

    def body(k):
        x = torch.full((100,), group.rank + k + 1.0)
        for _ in range(20):
            dist.all_reduce(x, op=dist.ReduceOp.AVG, group=groups[k])
        results[k] = x[0].item()

    threads = [threading.Thread(target=body, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return [results[k] for k in range(3)]


def test_groups_in_threads():
    assert pool.run(2, _threads) == [[1.5, 2.5, 3.5]] * 2


def test_a_world_of_one():
    assert pool.run(1, _works) == [True]
