"""Outer steps: the declared formula, the same bits on every rank, over any wire, and after a rank was lost."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from oracle import bits

from hostring.errors import HostringError
from hostring.training import LocalSGD, digest, share_state

EVERY, OUTER = 3, 4
SHAPES = ((5, 7), (11,), ())


def parameters(library="numpy"):
    generator = np.random.default_rng(3)
    arrays = [np.asarray(generator.standard_normal(shape), np.float32) for shape in SHAPES]
    if library == "numpy":
        return arrays
    torch = pytest.importorskip("torch")
    return [torch.nn.Parameter(torch.from_numpy(x)) for x in arrays]


def inner_step(held, rank, step):
    """Something that differs by rank and step, and depends on what the parameters were."""
    for k, x in enumerate(held):
        array = x if isinstance(x, np.ndarray) else x.detach().numpy()
        noise = np.random.default_rng((rank, step, k)).standard_normal(array.shape)
        array[...] = array * np.float32(0.9) + np.asarray(noise, np.float32) * np.float32(0.1)


def by_hand(world_size, rate, momentum):
    """All ranks in one place, in plain numpy: the paper's algorithm 1 with torch's Nesterov momentum."""
    anchor = [x.copy() for x in parameters()]
    velocity = [np.zeros_like(x) for x in anchor]
    for outer in range(OUTER):
        moved = []
        for rank in range(world_size):
            held = [x.copy() for x in anchor]
            for step in range(EVERY):
                inner_step(held, rank, outer * EVERY + step)
            moved.append([a - x for a, x in zip(anchor, held, strict=True)])
        for k in range(len(anchor)):
            total = moved[0][k]
            for others in moved[1:]:
                total = total + others[k]
            mean = total / np.float32(world_size)
            velocity[k] = np.float32(momentum) * velocity[k] + mean
            anchor[k] = np.asarray(anchor[k] - np.float32(rate) * (mean + np.float32(momentum) * velocity[k]))
    return anchor


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
def test_outer_steps_are_those_of_the_formula(run_ranks, world_size, rate, momentum, library):
    def calls(comm):
        held = parameters(library)
        outer = LocalSGD(comm, held, every=EVERY, rate=rate, momentum=momentum)
        taken = []
        for step in range(EVERY * OUTER):
            inner_step(held, comm.rank, step)
            taken.append(outer.step())
        assert taken == [step % EVERY == EVERY - 1 for step in range(EVERY * OUTER)]
        return [np.array(x if library == "numpy" else x.detach().numpy()) for x in held], comm.counters.calls[
            "all_reduce"
        ]

    expected = by_hand(world_size, rate, momentum)
    for held, reductions in run_ranks(world_size, calls):
        assert [bits(x) for x in held] == [bits(x) for x in expected]
        assert reductions == OUTER


@pytest.mark.parametrize("wire", ["mxint8", "mxfp4"])
def test_all_ranks_have_the_same_bits_over_a_lossy_wire(run_ranks, wire):
    def calls(comm):
        held = parameters()
        outer = LocalSGD(comm, held, every=EVERY, rate=0.7, momentum=0.9)
        for step in range(EVERY * OUTER):
            inner_step(held, comm.rank, step)
            outer.step()
        return [bits(x) for x in held], digest(outer.state_dict())

    results = run_ranks(3, calls, wire=wire)
    assert results == [results[0]] * 3


def test_a_checkpoint_goes_on_with_the_same_bits(run_ranks):
    def calls(comm):
        held, other = parameters(), parameters()
        first = LocalSGD(comm, held, every=1, momentum=0.9)
        inner_step(held, comm.rank, 0)
        first.step()
        second = LocalSGD(comm, other, every=1, momentum=0.9)
        second.load_state_dict(first.state_dict())
        second.load_feedback_state(first.feedback_state())
        assert [bits(x) for x in other] == [bits(x) for x in held]
        for outer, parts in ((first, held), (second, other)):
            inner_step(parts, comm.rank, 1)
            outer.step()
        assert first.outer_steps == second.outer_steps == 2
        return [bits(x) for x in held] == [bits(x) for x in other]

    assert run_ranks(3, calls, wire="mxfp4") == [True] * 3


def test_a_rank_that_lost_everything_gets_what_the_others_have(run_ranks):
    """Rank 1 forgets all it had; the group is rebuilt; all go on, and have the same bits, feedback included."""

    def calls(comm):
        held = parameters()
        outer = LocalSGD(comm, held, every=2, rate=0.7, momentum=0.9)
        for step in range(5):  # two outer steps, and one inner step that is lost
            inner_step(held, comm.rank, step)
            outer.step()
        with contextlib.suppress(HostringError):  # another rank may rebuild as soon as it has left this
            comm.barrier()
        with comm.rebuild(3) as again:
            fresh = comm.rank == 1
            if fresh:
                held = parameters()
                outer = LocalSGD(again, held, every=2, rate=0.7, momentum=0.9)
            outer.comm = again
            state = share_state(again, None if fresh else outer.state_dict(), outer.outer_steps)
            assert (state is not None) == fresh
            if state is None:
                outer.reset()
            else:
                outer.load_state_dict(state)
            assert (outer.steps, outer.outer_steps) == (4, 2)
            for step in range(4, 8):
                inner_step(held, again.rank, step)
                outer.step()
            assert share_state(again, outer.state_dict(), outer.outer_steps) is None
            return [bits(x) for x in held]

    results = run_ranks(3, calls, wire="mxfp4")
    assert results == [results[0]] * 3


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": 1, "rate": 0.0}, {"every": 1, "momentum": 1.0}, {"every": 1, "rate": np.nan}]
)
def test_what_is_refused(run_ranks, wrong):
    def calls(comm):
        with pytest.raises(ValueError, match="use every >= 1, rate > 0"):
            LocalSGD(comm, parameters(), **wrong)
        read_only = np.ones(3, np.float32)
        read_only.flags.writeable = False
        with pytest.raises(TypeError, match="can't be changed"):
            LocalSGD(comm, [read_only], every=1)
        outer = LocalSGD(comm, [np.ones(3, np.float32)], every=1)
        with pytest.raises(ValueError, match="the state is of 4 parameters, these are 3"):
            outer.load_state_dict({"anchor": np.ones(4), "velocity": np.ones(4), "outer_steps": 1})

    run_ranks(1, calls)
