"""Works, futures, messages, sub-groups, time limits and ends of the torch process group."""

from __future__ import annotations

import datetime
import threading
import time

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402

import hostring  # noqa: E402
from hostring.integrations.torch_backend import Options  # noqa: E402


def total(n: int) -> float:
    return float(sum(range(1, n + 1)))


# ---------------------------------------------------------------------- works and futures


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

    futures = [dist.all_reduce(y, async_op=True).get_future().then(note(k)) for k, y in enumerate(ys)]
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
    """Queued calls and blocking ones, on several groups, in an order that only works when each group is first in, first out."""
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


# ---------------------------------------------------------------------- messages


def _messages(group):
    rank, n = group.rank, group.world_size
    right, left = (rank + 1) % n, (rank - 1) % n
    big = torch.full((300_000,), float(rank))
    got = torch.empty(300_000)
    sent = dist.isend(big, right)  # more than the links hold: everybody sends first
    dist.recv(got, left)
    sent.wait()
    assert got[0] == got[-1] == left
    first, second = torch.zeros(1), torch.zeros(1)
    works = [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)]
    for tag in (1, 2):
        dist.send(torch.full((1,), 10.0 * tag + rank), right, tag=tag)
    for work in works:
        work.wait()
    assert (first.item(), second.item()) == (10 + left, 20 + left)
    polled = torch.zeros(2)
    work = dist.irecv(polled, left, tag=3)
    dist.isend(torch.full((2,), float(rank)), right, tag=3)
    give_up = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < give_up:
        time.sleep(0.001)
    assert polled.tolist() == [left, left]
    dist.barrier()
    if rank == 0:
        sources = []
        for _ in range(n - 1):
            x = torch.zeros(1)
            sources.append((dist.recv(x, tag=9), x.item()))
        assert sorted(sources) == [(r, 7.0 * r) for r in range(1, n)]
    else:
        dist.send(torch.full((1,), 7.0 * rank), 0, tag=9)
    out, inc = torch.full((4,), float(rank)), torch.zeros(4)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, inc, left)]):
        request.wait()
    assert inc.tolist() == [left] * 4
    columns = torch.zeros(3, 2).t()
    send = dist.isend(torch.full((3, 2), float(rank)).t(), right)
    dist.recv(columns, left)
    send.wait()
    assert torch.equal(columns, torch.full((2, 3), float(left)))
    return True


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(world_size):
    assert all(pool.run(world_size, _messages))


def _unattended(group):
    """A large send that nobody waits for goes on while this rank computes, or sits in a collective."""
    if group.rank == 0:
        dist.isend(torch.ones(2_000_000), 1)
        dist.barrier()
        return True
    got = torch.zeros(2_000_000)
    dist.recv(got, 0)
    dist.barrier()
    return bool(got.min() == 1)


def test_a_send_that_nobody_waits_for_goes_on():
    assert pool.run(2, _unattended) == [True, True]


# ---------------------------------------------------------------------- sub-groups


def _subgroups(group):
    rank, n = group.rank, group.world_size
    pairs = [dist.new_group([a, b]) for a in range(n) for b in range(a + 1, n)]
    names = [[a, b] for a in range(n) for b in range(a + 1, n)]
    seen = {}
    for members, pg in zip(names, pairs, strict=True):
        if rank not in members:
            assert pg is dist.GroupMember.NON_GROUP_MEMBER
            continue
        x = torch.full((2,), rank + 1.0)
        dist.all_reduce(x, group=pg)
        seen[tuple(members)] = x[0].item()
        dist.broadcast(x, src=members[1], group=pg)  # by the rank in the world
        y = torch.full((1,), float(rank))
        dist.broadcast(y, group_src=0, group=pg)
        assert y.item() == members[0]
    alone = [dist.new_group([r]) for r in range(n)][rank]
    z = torch.full((2,), 5.0)
    dist.all_reduce(z, group=alone)
    assert z.tolist() == [5.0, 5.0]
    reordered = dist.new_group(list(reversed(range(n))), pg_options=Options(topology="ring", order="ring"))
    assert reordered.comm.order == "ring"
    dist.destroy_process_group(reordered)
    local = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
    if local is not None:
        dist.barrier(group=local)
    dist.barrier()
    return seen


def test_sub_groups():
    for rank, seen in enumerate(pool.run(3, _subgroups)):
        assert seen == {pair: float(sum(pair) + 2) for pair in ((0, 1), (0, 2), (1, 2)) if rank in pair}


def _split(group):
    pg = dist.group.WORLD
    mine = [0, 1] if group.rank < 2 else [2]
    child = pg.split_group(mine, group_name=f"part of {mine}")
    assert (child.size(), child.group_name) == (len(mine), f"part of {mine}")
    x = torch.full((2,), group.rank + 1.0)
    child.allreduce([x]).wait()
    child.shutdown()
    none = pg.split_group([1, 2] if group.rank == 0 else [0, 2], group_name="others") if group.rank == 1 else None
    return x[0].item(), none


def test_split_group():
    assert pool.run(3, _split) == [(3.0, None), (3.0, None), (3.0, None)]


def _mesh(group):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    results = []
    for name in ("rows", "columns"):
        x = torch.full((1,), float(group.rank))
        dist.all_reduce(x, group=mesh[name].get_group())
        results.append(x.item())
    return results


def test_device_mesh():
    assert pool.run(4, _mesh) == [[0 + 2, 0 + 1], [1 + 3, 0 + 1], [0 + 2, 2 + 3], [1 + 3, 2 + 3]]


# ---------------------------------------------------------------------- time limits and ends


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


def test_a_world_of_one():
    assert pool.run(1, _works) == [True]
