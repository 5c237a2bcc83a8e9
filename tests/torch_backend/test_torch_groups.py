"""Sub-groups, split groups and device meshes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch_ranks import pool  # noqa: E402

from hostring.integrations.torch_backend import Options  # noqa: E402


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


def _many_groups(group):
    rank, n = group.rank, group.world_size
    groups = [dist.new_group([r for r in range(n) if r != k % n]) for k in range(6)]
    sums = []
    for pg in reversed(groups):  # in another order than they were made
        if pg is not dist.GroupMember.NON_GROUP_MEMBER:
            x = torch.full((2,), rank + 1.0)
            dist.all_reduce(x, group=pg)
            sums.append(x[0].item())
    dist.destroy_process_group(dist.new_group())  # never used
    return sums


def test_groups_are_used_in_another_order_than_they_were_made():
    for rank, sums in enumerate(pool.run(3, _many_groups)):
        total = 1 + 2 + 3
        assert sums == [float(total - (k % 3 + 1)) for k in reversed(range(6)) if k % 3 != rank]
