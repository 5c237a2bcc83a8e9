"""The cost model, on cases that can be worked out by hand."""

from __future__ import annotations

import json

import pytest

from hostring.cost import estimate, formulas
from hostring.cost.network import GBIT, PAYLOAD, Host, Line, Network, ethernet, from_links, one_host, read_links
from hostring.cost.simulate import price
from hostring.engine.frames import HEADER_BYTES
from hostring.topologies import TOPOLOGIES
from hostring.topologies.schedule import DATA, Fold, Range, Recv, Round, Schedule, Send

VARIANTS = [(t.name, v, variant.orders[0]) for t in TOPOLOGIES.values() for v, variant in t.variants.items()]
BIG = 1_000_000 - HEADER_BYTES  # with its header, a message of exactly a megabyte


def network(world_size: int, **host: float) -> Network:
    """A machine for each rank, 1 MB/s each way, 1 s of latency, and no cost of the processor unless asked for."""
    kinds = {"send_rate": 1e6, "recv_rate": 1e6, "per_message": 0.0, "per_byte": 0.0, "fold_rate": float("inf"), **host}
    return Network((Host(**kinds),) * world_size, tuple(range(world_size)), Line(1.0))  # type: ignore[arg-type]


def one_way(nbytes: int) -> list[Schedule]:
    what = Range(DATA, 0, nbytes)
    return [Schedule((Round(sends=(Send(1, what),)),), nbytes), Schedule((Round(recvs=(Recv(0, what),)),), nbytes)]


def test_a_message_takes_latency_and_bytes_over_rate() -> None:
    assert price(one_way(BIG), network(2), 1).seconds == pytest.approx(1.0 + 1.0)


def test_the_slowest_of_sender_line_and_receiver_sets_the_rate() -> None:
    net = network(2)
    for slow in ({"send_rate": 0.5e6}, {"recv_rate": 0.5e6}):
        assert price(one_way(BIG), network(2, **slow), 1).seconds == pytest.approx(1.0 + 2.0)
    narrow = Network(net.hosts, net.home, Line(1.0, 0.25e6))
    assert price(one_way(BIG), narrow, 1).seconds == pytest.approx(1.0 + 4.0)


def test_processor_time_of_both_ends_counts() -> None:
    """The receiver is called with the first byte; the header's others come in meanwhile."""
    assert price(one_way(0), network(2, per_message=0.1), 1).seconds == pytest.approx(0.1 + 1.0 + 0.1)


def test_an_exchange_is_full_duplex() -> None:
    what, inbox = Range(DATA, 0, BIG), Range("in", 0, BIG)
    both = [Schedule((Round((Send(1 - r, what),), (Recv(1 - r, inbox),)),), BIG, 0, {"in": BIG}) for r in range(2)]
    assert price(both, network(2), 1).seconds == pytest.approx(2.0)


def test_a_hub_shares_its_interface_among_its_leaves() -> None:
    what = Range(DATA, 0, BIG)
    hub = Schedule((Round(sends=tuple(Send(r, what) for r in (1, 2, 3))),), BIG)
    leaf = Schedule((Round(recvs=(Recv(0, what),)),), BIG)
    got = price([hub, leaf, leaf, leaf], network(4), 1)
    assert got.seconds == pytest.approx(1.0 + 3.0)
    assert got.finish[1:] == pytest.approx((4.0, 4.0, 4.0)), "the kernel serves all three in turn"
    assert got.busy["out", 0] == pytest.approx(3.0)
    assert got.busiest == ("out", 0)


def test_messages_to_one_receiver_queue_for_its_interface() -> None:
    sender = Schedule((Round(sends=(Send(0, Range(DATA, 0, BIG)),)),), BIG)
    inboxes = [Recv(r, Range(f"in.{r}", 0, BIG)) for r in (1, 2, 3)]
    assert price([Schedule((Round(recvs=inboxes),), BIG), *[sender] * 3], network(4), 1).seconds == pytest.approx(
        1.0 + 3.0
    )


def test_folds_take_bytes_over_the_fold_rate() -> None:
    inbox = Range("in", 0, 1000)
    fold = Fold(Range(DATA, 0, 1000), (Range(DATA, 0, 1000), inbox))
    receiver = Schedule((Round(recvs=(Recv(0, inbox),), folds=(fold,)),), 1000, 0, {"in": 1000})
    free, slow = (price([one_way(1000)[0], receiver], network(2, fold_rate=f), 4).seconds for f in (float("inf"), 1e3))
    assert slow - free == pytest.approx(4000 / 1e3)


def test_a_raw_contribution_travels_in_its_own_width() -> None:
    what = Range(DATA, 0, 500_000)
    pair = [
        Schedule((Round(sends=(Send(1, what, True),)),), 500_000),
        Schedule((Round(recvs=(Recv(0, what, True),)),), 500_000),
    ]
    wide, narrow = (price(pair, network(2), 4, raw).seconds for raw in (None, 2))
    assert wide - narrow == pytest.approx(1.0)


def test_ranks_of_one_host_queue_for_its_cores_and_not_for_its_interface() -> None:
    def at_once(cores: int) -> float:
        host = Host(send_rate=1.0, recv_rate=1.0, cores=cores, per_message=1.0, per_byte=0.0)
        return price(one_way(0) + one_way_between(2, 3), Network((host,), (0,) * 4, near=Line(0.0)), 1).seconds

    assert at_once(4) == pytest.approx(2.0), "send, then receive, both pairs side by side"
    assert at_once(1) == pytest.approx(4.0)


def one_way_between(src: int, dst: int) -> list[Schedule]:
    what = Range(DATA, 0, 0)
    return [Schedule((Round(sends=(Send(dst, what),)),), 0), Schedule((Round(recvs=(Recv(src, what),)),), 0)]


def test_one_shot_and_two_shot_by_hand() -> None:
    """Four ranks and a megabyte each: 3 MB leave every rank in one shot; twice 3 quarters in two."""
    net = network(4)
    headers = HEADER_BYTES / 1e6
    one = estimate.all_reduce("mesh", "one_shot", "rank", net, 1_000_000, 1 << 40).seconds
    two = estimate.all_reduce("mesh", "two_shot", "rank", net, 1_000_000, 1 << 40).seconds
    assert one == pytest.approx(1.0 + 3.0 + 3 * headers)
    assert two == pytest.approx(2 * (1.0 + 0.75 + 3 * headers))


@pytest.mark.parametrize(("topology", "variant", "order"), VARIANTS)
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_no_all_reduce_gets_cheaper_with_more_bytes_or_slower_lines(
    topology: str, variant: str, order: str, world_size: int
) -> None:
    def cost(nbytes: int, gbit: float) -> float:
        return estimate.all_reduce(topology, variant, order, ethernet(world_size, gbit), nbytes, 1 << 16).seconds

    prices = [cost(nbytes, 1.0) for nbytes in (4, 1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)]
    assert prices == sorted(prices)
    assert cost(1 << 20, 2.5) < cost(1 << 20, 1.0) < cost(1 << 20, 0.1)


@pytest.mark.parametrize(("topology", "variant", "order"), VARIANTS)
def test_the_formulas_agree_with_the_run_schedules(topology: str, variant: str, order: str) -> None:
    """Where both are possible.

    What trees and short pipelines do in between is not in the formulas: hence the tolerance.
    """
    for world_size in (2, 4, 8):
        for net in (ethernet(world_size), one_host(world_size, 8)):
            for nbytes in (4, 1 << 12, 1 << 16, 1 << 20, 1 << 23):
                run = estimate.all_reduce(topology, variant, order, net, nbytes, 1 << 18).seconds
                assert formulas.all_reduce(variant, net, nbytes, 1 << 18).seconds == pytest.approx(run, rel=0.35)


@pytest.mark.parametrize("variant", ["two_shot", "rotate", "stream", "reduce_broadcast"])
def test_long_pipelines_are_priced_without_running_them_whole(variant: str) -> None:
    topology, _, order = next(v for v in VARIANTS if v[1] == variant)
    t, segment, n_elements = TOPOLOGIES[topology], 1 << 10, 100_000
    net = ethernet(3)
    whole = price(
        [t.variants[variant].build(t.place(r, 3), n_elements, order, segment) for r in range(3)], net, 4
    ).seconds
    assert estimate.all_reduce(topology, variant, order, net, 4 * n_elements, 4 * segment).seconds == pytest.approx(
        whole, rel=0.05
    )


def test_thousands_of_ranks_are_priced_on_paper() -> None:
    net = ethernet(4096)
    prices = {v: estimate.all_reduce(t, v, order, net, 1 << 20, 1 << 18).seconds for t, v, order in VARIANTS}
    assert min(prices, key=prices.__getitem__) == "two_shot"
    assert prices["stream"] > 4095 * (1 << 20) / (PAYLOAD * GBIT), "the hub alone sends that much"


@pytest.mark.parametrize(
    "collective", ["broadcast", "all_gather", "reduce_scatter", "reduce", "gather", "scatter", "all_to_all", "barrier"]
)
@pytest.mark.parametrize("topology", list(TOPOLOGIES))
def test_every_collective_has_a_price_in_every_topology(collective: str, topology: str) -> None:
    small, large = (
        estimate.movement(collective, topology, "rank", ethernet(4), n, 1 << 16).seconds for n in (4, 1 << 20)
    )
    assert 30e-6 <= small <= large


def test_what_a_rank_costs_is_seen_by_freeing_it() -> None:
    net = ethernet(6, hub_gbit=0.1)
    bound, free = (
        estimate.all_reduce("star", "stream", "rank", n, 1 << 20, 1 << 16) for n in (net, net.without_limit_at(0))
    )
    assert bound.busiest in (("in", 0), ("out", 0))
    assert free.seconds < bound.seconds / 5


def test_a_network_survives_json() -> None:
    net = Network(
        (Host(cores=3), Host(send_rate=5.0)), (0, 1, 1), Line(1e-6), Line(2e-6, 7.0), {(0, 2): Line(3e-6, 9.0)}, 11
    )
    assert Network.from_json(json.loads(json.dumps(net.to_json()))) == net
    with pytest.raises(ValueError, match="hosts"):
        Network.from_json({"home": [0]})


def test_a_links_file_names_ranks_and_links(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "links.json"
    ranks, links = '"ranks": {"0": {"gbit_per_s": 2.5}}', '"links": [{"from": 0, "to": 2, "latency_us": 400}]'
    path.write_text(f'{{"latency_us": 50, "gbit_per_s": 1, {ranks}, {links}}}', encoding="utf-8")
    net = from_links(read_links(str(path)), 3)
    assert net.host(0).send_rate == pytest.approx(2.5 * GBIT * PAYLOAD)
    assert net.host(1).recv_rate == pytest.approx(GBIT * PAYLOAD)
    assert net.between(0, 1).latency == pytest.approx(50e-6)
    assert net.between(0, 2).latency == pytest.approx(400e-6)
    path.write_text('{"latency_us": 50, "ranks": {"0": {"gbits": 2.5}}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"ranks\.0: unknown key gbits"):
        read_links(str(path))
    path.write_text('{"latency_us": "soon"}', encoding="utf-8")
    with pytest.raises(ValueError, match="latency_us is 'soon'"):
        read_links(str(path))


ROUNDS = {
    "one_shot": lambda n, m: m,
    "two_shot": lambda n, m: m + 1,
    "relay": lambda n, m: n // 2 + m - 1,
    "chain": lambda n, m: 2 * (n - 1) + m - 1,
    "rotate": lambda n, m: 2 * (n - 1) * m,
    "stream": lambda n, m: m + 1,
    "reduce_broadcast": lambda n, m: 2 * (n - 1).bit_length() + m - 1,
    "doubling": lambda n, m: ((n - 1).bit_length() + 1) * m,  # the last of each segment only folds
}
SENT = {
    "one_shot": lambda n, r: n - 1,
    "two_shot": lambda n, r: 2 * (n - 1) / n,
    "relay": lambda n, r: n - 1,
    "chain": lambda n, r: 2 if r < n - 2 else 1,
    "rotate": lambda n, r: 2 * (n - 1) / n,
    "stream": lambda n, r: n - 1 if r == 0 else 1,
    "doubling": lambda n, r: n - 1,
}


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("topology", "variant", "order"), VARIANTS)
def test_rounds_and_bytes_are_those_in_the_documentation(
    topology: str, variant: str, order: str, world_size: int
) -> None:
    t, segment = TOPOLOGIES[topology], 840  # which every number of ranks here divides
    for m in (1, 3):
        n_elements = segment * m * (world_size if variant in formulas.CHUNKED else 1)
        schedules = [
            t.variants[variant].build(t.place(r, world_size), n_elements, order, segment) for r in range(world_size)
        ]
        assert max(len(s.rounds) for s in schedules) == ROUNDS[variant](world_size, m)
        if variant in SENT:
            assert [s.sent_elements() / n_elements for s in schedules] == [
                SENT[variant](world_size, r) for r in range(world_size)
            ]
        else:
            assert max(s.sent_elements() for s in schedules) <= (world_size - 1).bit_length() * n_elements
