"""Staging memory is page-locked once, until it is freed. The CUDA runtime is simulated; `-m gpu` tests a real one."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hostring.arrays import pinning


class Runtime:
    def __init__(self, result: int = 0) -> None:
        self.result, self.locked, self.calls = result, {}, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if self.result == 0:
            self.locked[address] = nbytes
        return self.result

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_a_block_is_locked_once_and_released_when_it_is_freed():
    runtime, block = Runtime(), np.empty(1 << 17, np.uint8)
    address = block.ctypes.data
    for part in (block[: 1 << 16].view(np.float32), block[4:], block):
        assert pinning.pin(part, runtime)
    assert runtime.calls == 1
    assert runtime.locked == {address: 1 << 17}
    del block, part
    gc.collect()
    assert runtime.locked == {}
    assert address not in pinning._locked


def test_a_block_that_grew_at_the_same_place_is_locked_anew():
    runtime = Runtime()
    for nbytes in (1 << 16, 1 << 18, 1 << 17):
        block = np.empty(nbytes, np.uint8)
        assert pinning.pin(block, runtime)
        assert runtime.locked == {block.ctypes.data: nbytes}
        del block
        gc.collect()


@pytest.mark.parametrize("case", ["small", "not ours", "refused"])
def test_what_is_not_locked_is_only_slower(case):
    runtime = Runtime(result=712 if case == "refused" else 0)
    array = {
        "small": np.empty(100),
        "not ours": np.frombuffer(bytearray(1 << 17), np.uint8),
        "refused": np.empty(1 << 17),
    }[case]
    assert not pinning.pin(array, runtime)
    assert runtime.locked == {}


def test_staging_asks_for_it_with_memory_that_is_reused(run_ranks):
    from hostring.arrays.adapter import Adapter
    from hostring.arrays.staging import register_adapter

    class Remote:
        """An array that has to be staged."""

        def __init__(self, values: np.ndarray) -> None:
            self.values, self.dtype, self.shape = values, values.dtype, values.shape

    rooms: list[int] = []

    class RemoteAdapter(Adapter):
        def stage(self, x, host):
            host[...] = x.values.ravel()

        def unstage(self, host, x, shape=None):
            return Remote(host.astype(x.dtype).reshape(x.shape if shape is None else shape))

        def reuse(self, x, room):
            rooms.append(room.ctypes.data)

    register_adapter(Remote, RemoteAdapter())

    def body(comm):
        x = Remote(np.arange(5.0, dtype=np.float32) + comm.rank)
        first = comm.all_reduce(comm.all_reduce(x)).values
        return first, comm.broadcast(x, root=1).values

    for reduced, received in run_ranks(2, body):
        np.testing.assert_array_equal(reduced, 2 * (2 * np.arange(5.0, dtype=np.float32) + 1))
        np.testing.assert_array_equal(received, np.arange(5.0, dtype=np.float32) + 1)
    assert len(rooms) == 6
    assert len(set(rooms)) <= 4  # reductions of both ranks, and movements of both
