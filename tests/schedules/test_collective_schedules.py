"""Every collective's schedule on symbols, in every topology:
the data lands where it must, whatever the sizes, counts and roots.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import COMBINATIONS

from hostring.arrays.fold import expression
from hostring.topologies import TOPOLOGIES, collectives
from hostring.topologies.proof import simulate
from hostring.topologies.schedule import DATA, OUT, Schedule

NAMES = sorted(TOPOLOGIES)
PAIRS = sorted(
    {(topology, order) for topology, _, order in COMBINATIONS}
)  # the orders that a group of this topology may declare
WORLD_SIZES = st.integers(2, 8)
SEGMENTS = st.integers(1, 9)
quick = settings(max_examples=30)


def places(topology: str, world_size: int):
    return [TOPOLOGIES[topology].place(rank, world_size) for rank in range(world_size)]


def symbols(name: str, n_elements: int) -> list[str]:
    return [f"{name}[{i}]" for i in range(n_elements)]


def run(topology: str, schedules: list[Schedule], data: list[list[str]]) -> list[dict]:
    """Simulate, after checking that only links which are there are used, and that the schedule's lengths are those of
    the buffers.
    """
    n = len(schedules)
    for rank, schedule in enumerate(schedules):
        peers = {m.peer for r in schedule.rounds for messages in (r.sends, r.recvs) for m in messages}
        assert peers <= TOPOLOGIES[topology].neighbours(rank, n)
        assert schedule.data == len(data[rank])
    memories = [{DATA: list(data[r]), OUT: [None] * schedules[r].out} for r in range(n)]
    simulate(schedules, memories)
    return memories


def counts_for(world_size: int):
    return st.lists(st.integers(0, 12), min_size=world_size, max_size=world_size)


@pytest.mark.parametrize("topology", NAMES)
@quick
@given(data=st.data(), n=WORLD_SIZES, n_elements=st.integers(0, 30), segment=SEGMENTS)
def test_broadcast(topology, data, n, n_elements, segment):
    root = data.draw(st.integers(0, n - 1))
    given = [symbols(f"x{r}", n_elements) for r in range(n)]
    memories = run(topology, [collectives.broadcast(p, n_elements, segment, root) for p in places(topology, n)], given)
    assert all(m[DATA] == given[root] for m in memories)


@pytest.mark.parametrize("topology", NAMES)
@quick
@given(data=st.data(), n=WORLD_SIZES, segment=SEGMENTS)
def test_all_gather_and_gather(topology, data, n, segment):
    counts, root = data.draw(counts_for(n)), data.draw(st.integers(0, n - 1))
    given = [symbols(f"x{r}", counts[r]) for r in range(n)]
    joined = [x for row in given for x in row]
    for m in run(topology, [collectives.all_gather(p, counts, segment) for p in places(topology, n)], given):
        assert m[OUT] == joined
    for r, m in enumerate(
        run(topology, [collectives.gather(p, counts, segment, root) for p in places(topology, n)], given)
    ):
        assert m[OUT] == (joined if r == root else [])
        assert m[DATA] == given[r]


@pytest.mark.parametrize("topology", NAMES)
@quick
@given(data=st.data(), n=WORLD_SIZES, segment=SEGMENTS)
def test_scatter(topology, data, n, segment):
    counts, root = data.draw(counts_for(n)), data.draw(st.integers(0, n - 1))
    whole = symbols("x", sum(counts))
    memories = run(
        topology,
        [collectives.scatter(p, counts, segment, root) for p in places(topology, n)],
        [whole if r == root else [] for r in range(n)],
    )
    assert [x for m in memories for x in m[OUT]] == whole
    assert [len(m[OUT]) for m in memories] == counts


@pytest.mark.parametrize("topology", NAMES)
@quick
@given(data=st.data(), n=st.integers(2, 6), segment=SEGMENTS)
def test_all_to_all(topology, data, n, segment):
    counts = [data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)) for _ in range(n)]
    part = [[symbols(f"x{r}to{q}.", counts[r][q]) for q in range(n)] for r in range(n)]
    memories = run(
        topology,
        [collectives.all_to_all(p, counts, segment) for p in places(topology, n)],
        [[x for piece in part[r] for x in piece] for r in range(n)],
    )
    for q, m in enumerate(memories):
        assert m[OUT] == [x for r in range(n) for x in part[r][q]]


@pytest.mark.parametrize(("topology", "order"), PAIRS)
@quick
@given(data=st.data(), n=WORLD_SIZES, n_elements=st.integers(0, 30), segment=SEGMENTS)
def test_reduce(topology, order, data, n, n_elements, segment):
    root = data.draw(st.integers(0, n - 1))
    given = [symbols(f"x{r}", n_elements) for r in range(n)]
    memories = run(
        topology, [collectives.reduce(p, n_elements, order, segment, root) for p in places(topology, n)], given
    )
    base, extra = divmod(n_elements, n)
    chunk_of = [c for c in range(n) for _ in range(base + (c < extra))]
    for i in range(n_elements):
        assert memories[root][DATA][i] == expression(order, [row[i] for row in given], chunk_of[i] + 1)
    for r in set(range(n)) - {root}:
        assert memories[r][DATA] == given[r], "a rank that is not root keeps what it has"


@pytest.mark.parametrize(("topology", "order"), PAIRS)
@quick
@given(data=st.data(), n=WORLD_SIZES, segment=SEGMENTS)
def test_reduce_scatter(topology, order, data, n, segment):
    counts = data.draw(counts_for(n))
    given = [symbols(f"x{r}", sum(counts)) for r in range(n)]
    memories = run(
        topology, [collectives.reduce_scatter(p, counts, order, segment) for p in places(topology, n)], given
    )
    starts = [sum(counts[:c]) for c in range(n)]
    for c, m in enumerate(memories):
        at = range(starts[c], starts[c] + counts[c])
        assert m[OUT] == [expression(order, [row[i] for row in given], c + 1) for i in at]
        assert m[DATA] == given[c]


@pytest.mark.parametrize(("topology", "variant", "order"), COMBINATIONS)
@quick
@given(n=WORLD_SIZES, n_elements=st.integers(0, 60), segment=st.integers(1, 12))
def test_all_reduce(topology, variant, order, n, n_elements, segment):
    build = TOPOLOGIES[topology].variants[variant].build
    given = [symbols(f"x{r}", n_elements) for r in range(n)]
    memories = run(topology, [build(p, n_elements, order, segment) for p in places(topology, n)], given)
    base, extra = divmod(n_elements, n)
    chunk_of = [c for c in range(n) for _ in range(base + (c < extra))]
    wanted = [expression(order, [row[i] for row in given], chunk_of[i] + 1) for i in range(n_elements)]
    assert all(m[DATA] == wanted for m in memories)


@pytest.mark.parametrize("topology", NAMES)
@pytest.mark.parametrize("n", range(2, 9))
def test_a_barrier_hears_from_every_rank(topology, n):
    """Nobody's schedule ends before word of everybody has come, directly or along the way:
    messages are empty but they are there.
    """
    schedules = [collectives.all_gather(p, [0] * n, 1) for p in places(topology, n)]
    known = [{r} for r in range(n)]
    for k in range(max(len(s.rounds) for s in schedules)):
        before = [set(knows) for knows in known]
        for rank, schedule in enumerate(schedules):
            for recv in schedule.rounds[k].recvs if k < len(schedule.rounds) else ():
                known[rank] |= before[recv.peer]
    assert known == [set(range(n))] * n


@pytest.mark.parametrize("topology", NAMES)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_the_next_hop_always_is_a_neighbour_and_always_arrives(topology, world_size):
    t = TOPOLOGIES[topology]
    for src in range(world_size):
        assert src not in t.neighbours(src, world_size)
        for dst in range(world_size):
            path = t.place(src, world_size).path(src, dst)
            assert path[0] == src
            assert path[-1] == dst
            assert len(set(path)) == len(path)
            assert all(b in t.neighbours(a, world_size) for a, b in itertools.pairwise(path))
