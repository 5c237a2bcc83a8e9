"""`broadcast_bytes` and `gather_bytes`: bytes of any length, which may differ between ranks."""

from __future__ import annotations

import pytest

WORLD_SIZES = [1, 2, 3, 5]


def words(rank: int, n: int) -> bytes:
    return bytes((7 * rank + k) % 251 for k in range(n))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("n", [0, 1, 100, 300_000])
def test_every_rank_gets_the_bytes_of_root(run_ranks, world_size, n):
    root = world_size - 1

    def body(comm):
        return comm.broadcast_bytes(words(comm.rank, n if comm.rank == root else 13), root)

    assert run_ranks(world_size, body) == [words(root, n)] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_others_need_not_bring_anything(run_ranks, world_size):
    assert run_ranks(world_size, lambda comm: comm.broadcast_bytes(*[b"x"] * (comm.rank == 0))) == [b"x"] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0, 0], [3, 0, 1, 70_000, 2], [300_000, 1, 0, 5, 300_000]], ids=str)
def test_every_rank_gets_the_bytes_of_all(run_ranks, world_size, lengths):
    expected = [words(rank, lengths[rank]) for rank in range(world_size)]
    assert run_ranks(world_size, lambda comm: comm.gather_bytes(expected[comm.rank])) == [expected] * world_size


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_whatever_holds_bytes_will_do(run_ranks, kind):
    def body(comm):
        mine = kind(words(comm.rank, 9))
        return comm.broadcast_bytes(mine, 1), comm.gather_bytes(mine)

    assert run_ranks(2, body) == [(words(1, 9), [words(0, 9), words(1, 9)])] * 2


def test_a_root_that_is_none_is_refused(run_ranks):
    def body(comm):
        with pytest.raises(ValueError, match="root=2"):
            comm.broadcast_bytes(b"", 2)
        return comm.broadcast_bytes(b"x")

    assert run_ranks(2, body) == [b"x"] * 2, "nothing was sent"
