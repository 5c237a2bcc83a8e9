"""Every array that reaches the engine or a message link is made flat and base-class, once: no loop can turn without
progress."""

from __future__ import annotations

import numpy as np
import pytest

from hostring.engine.binding import Buffers, flat
from hostring.engine.unsent import Unsent


class Tagged(np.ndarray):
    """A subclass that stays what it is through views and `ravel`, as `np.matrix` stays 2-D."""

    def ravel(self, order="C"):
        return self


def views(n_elements: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """The numbers 0, 1, 2, … in arrays of many kinds, all over contiguous memory."""
    plain = np.arange(n_elements).astype(dtype)
    return {
        "plain": plain,
        "matrix": plain.reshape(2, -1).view(np.matrix),
        "subclass": plain.reshape(2, -1).view(Tagged),
        "two dimensions": plain.reshape(2, -1),
        "three dimensions": plain.reshape(1, -1, 2),
        "record": plain.view(np.recarray),
        "memory map": plain.view(np.memmap),
    }


KINDS = list(views(4))


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_is_made_flat_and_shares_the_memory(kind):
    array = views(12)[kind]
    view = flat(array)
    assert type(view) is np.ndarray
    assert view.shape == (12,)
    assert view.tolist() == list(range(12))
    view[5] = 77
    assert np.asarray(array).reshape(-1)[5] == 77


def test_what_is_not_contiguous_is_refused():
    for array in (np.arange(12.0)[::2], np.arange(12.0).reshape(3, 4).T, np.ones((4, 4)).view(np.matrix)[:, :2]):
        with pytest.raises(TypeError, match="is not contiguous"):
            flat(array)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_messages_from_and_into_any_view(run_ranks, transport, kind):
    """Sent in several pieces, too: more than a link takes at once."""

    def body(comm):
        messenger, found = comm.session.messenger, []
        for n_elements in (12, 400_000):
            array = views(n_elements)[kind]
            if comm.rank == 0:
                messenger.send(array, 1, 5, 20.0).wait()
            else:
                into = np.zeros_like(array)
                messenger.recv(into, 0, 5, 20.0, into, None).wait()
                found.append(np.array_equal(np.asarray(into).reshape(-1), np.arange(n_elements, dtype=np.float32)))
        comm.barrier()
        return found

    assert run_ranks(2, body, transport=transport)[1] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_engine_folds_and_moves_any_view(run_ranks, kind, world_size):
    def body(comm):
        found = []
        for n_elements in (12, 300_000):
            array = np.array(views(n_elements)[kind], subok=True, copy=True)
            program = comm.session.planner.all_reduce(n_elements, array.dtype, "sum", None)
            comm.session.run(program, Buffers(array, np.empty(0, np.float32)), 20.0, 0.0)
            found.append(np.asarray(array).reshape(-1).tolist() == [world_size * float(i) for i in range(n_elements)])
            gathered = np.empty((world_size, n_elements), np.float32)
            counts = (n_elements,) * world_size
            program = comm.session.planner.movement("all_gather", n_elements, array.dtype, counts)
            comm.session.run(program, Buffers(array, gathered), 20.0, 0.0)
            found.append(bool((gathered == gathered[0]).all() and gathered[0, -1] == world_size * (n_elements - 1)))
        return found

    assert run_ranks(world_size, body) == [[True] * 4] * world_size


def test_unsent_bytes_are_dropped_as_they_are_taken():
    left = Unsent((b"header", np.arange(4, dtype=np.uint8).reshape(2, 2).view(np.matrix), b"", np.ones(1, np.uint8)), 3)
    assert [bytes(x) for x in left.buffers] == [b"der", bytes([0, 1, 2, 3]), b"", b"\x01"]
    left.drop(5)
    assert [bytes(x) for x in left.buffers] == [bytes([2, 3]), b"", b"\x01"]
    left.drop(2)
    assert [bytes(x) for x in left.buffers] == [b"\x01"]
    left.drop(1)
    assert left.buffers == []
