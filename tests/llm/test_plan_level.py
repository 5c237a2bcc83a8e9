"""Sharing out: against all shares that there are, and the golden cases."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostring.integrations.llm.planning.level import Lane, level, overflow
from hostring.integrations.llm.planning.ranks import Line


def ends(lanes: list[Lane], shares: tuple[int, ...]) -> list[float]:
    return [lane.seconds(n) for lane, n in zip(lanes, shares, strict=True)]


def all_shares(borders: list[int], n_ranks: int, least: int) -> list[tuple[int, ...]]:
    last = len(borders) - 1
    found = []
    for cuts in itertools.combinations_with_replacement(range(last + 1), n_ranks - 1):
        stops = (0, *cuts, last)
        if all(b - a >= least for a, b in itertools.pairwise(stops)):
            found.append(tuple(borders[b] - borders[a] for a, b in itertools.pairwise(stops)))
    return found


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Lane], int]:
    n_ranks = draw(st.integers(1, 4))
    least = draw(st.integers(0, 1))
    n_units = draw(st.integers(max(1, n_ranks * least), 9))
    width = draw(st.sampled_from([1, 32]))
    speeds = st.sampled_from([1.0, 1.7, 3.0, 8.0])
    lanes = [Lane(draw(st.sampled_from([0.0, 5.0, 40.0])), Line(draw(st.sampled_from([0.0, 2.0])), draw(speeds)))
             for _ in range(n_ranks)]  # fmt: skip
    return [width * n for n in range(n_units + 1)], lanes, least


@given(problems())
def test_the_longest_lane_is_within_one_unit_of_the_shortest_possible(
    problem: tuple[list[int], list[Lane], int],
) -> None:
    borders, lanes, least = problem
    found = level(borders, lanes, least=least)
    assert sum(found) == borders[-1]
    possible = all_shares(borders, len(lanes), least)
    assert found in possible
    best = min(max(ends(lanes, shares)) for shares in possible)
    unit = borders[1] * max(lane.line.each for lane in lanes)
    assert max(ends(lanes, found)) <= best + unit


@given(problems())
def test_no_single_unit_would_better_be_elsewhere(problem: tuple[list[int], list[Lane], int]) -> None:
    borders, lanes, least = problem
    found = level(borders, lanes, least=least)
    for a, b in itertools.permutations(range(len(lanes)), 2):
        moved = list(found)
        moved[a] -= borders[1]
        moved[b] += borders[1]
        if moved[a] >= least * borders[1]:
            assert max(ends(lanes, tuple(moved))) >= max(ends(lanes, found)) - 1e-9


def test_columns_make_up_for_attention_until_the_lanes_tie() -> None:
    """Four lanes of 180, 182, 179 and 95 us: 60 of each are MLP, the last rank has fewer heads."""
    attention, columns = (120.0, 122.0, 119.0, 35.0), 4 * 1024
    each = 4 * 60.0 / columns
    before = [held + 60.0 for held in attention]
    assert before == [180, 182, 179, 95]
    assert max(before) - min(before) == 87
    lanes = [Lane(held, Line(0.0, each)) for held in attention]
    after = ends(lanes, level(range(columns + 1), lanes))
    assert max(after) - min(after) <= each
    assert max(after) == pytest.approx(159, abs=each)


def test_shares_follow_speed_to_the_nearest_unit() -> None:
    lanes = [Lane(0.0, Line(0.0, 1 / speed)) for speed in (30, 70)]
    assert level(range(101), lanes) == (30, 70)
    assert level([0, 25, 50, 75, 100], lanes) == (25, 75)


def test_a_rank_that_is_short_of_memory_gets_less() -> None:
    lanes = [Lane(0.0, Line(0.0, 1.0), nbytes=10.0, pool=name) for name in "ab"]
    assert level(range(101), lanes, {"a": 300.0}) == (30, 70)


def test_ranks_of_one_pool_share_its_room() -> None:
    lanes = [Lane(0.0, Line(0.0, 1.0), nbytes=10.0, pool=name) for name in "aab"]
    assert level(range(91), lanes, {"a": 400.0}) == (20, 20, 50)


def test_what_does_not_fit_is_counted() -> None:
    lanes = [Lane(0.0, Line(0.0, 1.0), nbytes=10.0, pool=name) for name in "ab"]
    room = {"a": 300.0, "b": 300.0}
    assert overflow(lanes, level(range(101), lanes, room), room) == pytest.approx(400)
