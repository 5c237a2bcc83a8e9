"""Error feedback on lossy wires: what was cut off comes later, in checkpoints too, and not into a rebuilt group."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from oracle import as_library, bits, rank_distinct
from test_mxfp4 import rounded as in_fours

import hostring
from hostring import Feedback

WIRES = ("mxfp4", "mxint8", "bfloat16")


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_residual_is_what_rounding_has_cut_off(run_ranks, world_size, library):
    rows = rank_distinct(world_size, 100)

    def calls(comm):
        state = Feedback()
        results = [
            np.asarray(comm.all_reduce(as_library(rows[comm.rank].copy(), library), feedback=state)) for _ in range(3)
        ]
        return results, state.residual

    expected, residuals = [], [np.zeros(100, np.float32)] * world_size
    for _ in range(3):
        wanted = [row + residual for row, residual in zip(rows, residuals, strict=True)]
        brought = [in_fours(row) for row in wanted]
        residuals = [a - b for a, b in zip(wanted, brought, strict=True)]
        expected.append(_fold(brought))
    for rank, (results, residual) in enumerate(run_ranks(world_size, calls, wire="mxfp4")):
        assert [bits(result) for result in results] == [bits(row) for row in expected]
        assert bits(residual) == bits(residuals[rank])


def _fold(rows):
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


@pytest.mark.parametrize("wire", WIRES)
def test_the_mean_of_many_calls_is_that_of_float32(run_ranks, wire):
    rows = rank_distinct(3, 320)
    exact = np.add.reduce(np.asarray(rows, np.float64))

    def calls(comm):
        state, total, alone = Feedback(), np.zeros(320), np.zeros(320)
        for _ in range(64):
            total += comm.all_reduce(rows[comm.rank].copy(), feedback=state, async_op=True).wait()
            alone += comm.all_reduce(rows[comm.rank].copy())
        return total / 64, alone / 64

    for with_it, without in run_ranks(3, calls, wire=wire):
        assert np.abs(with_it - exact).max() < np.abs(without - exact).max() / 8


def _train(comm, feedback):
    """Least squares by descent: float32 parameters, each rank its own data. The last loss on all data."""
    generator = np.random.default_rng(7)
    data = generator.standard_normal((3, 40, 20)).astype(np.float32)
    data *= np.logspace(-2, 0, 20, dtype=np.float32)  # directions of unlike curvature: small gradients count
    truth = generator.standard_normal(20).astype(np.float32)
    target = data @ truth + generator.standard_normal((3, 40)).astype(np.float32)
    w = np.zeros(20, np.float32)
    for _ in range(300):
        mine = data[comm.rank]
        gradient = 2 * mine.T @ (mine @ w - target[comm.rank]) / 40
        comm.all_reduce(gradient, "avg", feedback=feedback)
        w -= np.float32(0.15) * gradient
    return float(np.mean((data @ w - target) ** 2)), w


@pytest.mark.parametrize("wire", ["mxfp4", "mxint8"])
def test_training_ends_where_float32_ends(run_ranks, wire):
    ((exact, _), *_) = run_ranks(3, lambda comm: _train(comm, None))
    results = run_ranks(3, lambda comm: _train(comm, Feedback()), wire=wire)
    ((without, _), *_) = run_ranks(3, lambda comm: _train(comm, None), wire=wire)
    assert results[0][0] == pytest.approx(exact, rel=0.02)
    assert abs(results[0][0] - exact) < abs(without - exact) / 5
    assert len({bits(w) for _, w in results}) == 1


def test_a_checkpoint_goes_on_where_it_was(run_ranks):
    rows = rank_distinct(2, 70)

    def calls(comm):
        first, second = Feedback(), Feedback()
        comm.all_reduce(rows[comm.rank].copy(), feedback=first)
        second.load_state_dict(first.state_dict())
        return [comm.all_reduce(rows[comm.rank].copy(), feedback=state) for state in (first, second)]

    for one, other in run_ranks(2, calls, wire="mxfp4"):
        assert bits(one) == bits(other)


def test_a_rebuilt_group_begins_with_nothing(run_ranks):
    rows = rank_distinct(3, 70)
    fresh = _fold([in_fours(row) for row in rows])

    def calls(comm):
        state = Feedback()
        comm.all_reduce(rows[comm.rank].copy(), feedback=state)
        with contextlib.suppress(hostring.HostringError):  # another rank may rebuild as soon as it has left this
            comm.barrier()
        with comm.rebuild(3) as again:
            return again.all_reduce(rows[again.rank].copy(), feedback=state)

    for result in run_ranks(3, calls, wire="mxfp4"):
        assert bits(result) == bits(fresh)


def test_what_is_refused(run_ranks):
    def calls(comm):
        state = Feedback()
        with pytest.raises(ValueError, match="op='max' has none"):
            comm.all_reduce(np.ones(3, np.float32), "max", feedback=state)
        comm.all_reduce(np.ones(3, np.float32), feedback=state)
        with pytest.raises(ValueError, match="a tensor of 3 elements, x has 4"):
            comm.all_reduce(np.ones(4, np.float32), feedback=state)
        return comm.all_reduce(np.full(2, 1.5, np.float64), feedback=state).tolist()

    assert run_ranks(2, calls, wire="mxfp4") == [[3.0, 3.0]] * 2


def test_without_a_lossy_wire_nothing_is_added():
    with hostring.init(0, 1) as comm:
        state = Feedback()
        assert comm.all_reduce(np.ones(2, np.float32), feedback=state).tolist() == [1.0, 1.0]
        assert state.residual is None
