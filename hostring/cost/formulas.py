"""What an all-reduce costs by formula, for groups that are too large to simulate. Tests compare it with `price`.

Every formula is (rounds · latency) + (the work for the first segment) + (m - 1) · (the work for each further segment),
with m segments of g bytes. The work of a rank is the larger of its processor's and its interface's. Rank 0 is the hub,
with its own host. All other ranks count as the slowest among them, because one slow rank slows the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from hostring.cost.network import Host, Line, Network
from hostring.cost.simulate import Price, Resource
from hostring.engine.frames import HEADER_BYTES


@dataclass(frozen=True)
class _Work:
    """What one rank does for one segment."""

    host: Host
    line: Line
    messages_out: int
    messages_in: int
    g: float
    folds: int
    per_link: int = 1  # messages over the busiest one of its links, one way

    @property
    def cpu(self) -> float:
        messages = self.messages_out + self.messages_in
        return (
            messages * (self.host.per_message + self.g * self.host.per_byte) + self.folds * self.g / self.host.fold_rate
        )

    @property
    def out(self) -> float:
        return self.messages_out * self.g / self.host.send_rate

    @property
    def into(self) -> float:
        return self.messages_in * self.g / self.host.recv_rate

    @property
    def seconds(self) -> float:
        return max(self.cpu, self.out, self.into, self.per_link * self.g / self.line.rate)


@dataclass(frozen=True)
class _Shape:
    """What all formulas start from."""

    n: int
    hub: Host
    leaf: Host
    line: Line
    m: int
    g: float

    def hub_does(self, out: int, into: int, folds: int, per_link: int = 1) -> _Work:
        return _Work(self.hub, self.line, out, into, self.g, folds, per_link)

    def leaf_does(self, out: int, into: int, folds: int, per_link: int = 1) -> _Work:
        return _Work(self.leaf, self.line, out, into, self.g, folds, per_link)

    def hop(self) -> float:
        """The work for one message from one rank to the next."""
        slow = max(self.g / min(self.leaf.send_rate, self.leaf.recv_rate, self.line.rate), self.g * self.leaf.per_byte)
        return 2 * self.leaf.per_message + slow


_Formula = Callable[
    [_Shape], tuple[int, float, tuple[_Work, _Work]]
]  # rounds, work of the first segment, (hub's, leaf's) of one more


def _one_shot(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    k = s.n - 1
    pace = s.hub_does(k, k, k), s.leaf_does(k, k, k)
    return s.m, _slower(pace), pace


def _two_shot(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    k = s.n - 1
    pace = s.hub_does(2 * k, 2 * k, k, 2), s.leaf_does(2 * k, 2 * k, k, 2)
    return s.m + 1, _slower(pace), pace


def _relay(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    k = s.n - 1
    pace = s.hub_does(k, k, k, s.n // 2), s.leaf_does(k, k, k, s.n // 2)
    return s.m + s.n // 2 - 1, _slower(pace), pace


def _chain(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    hops = 2 * (s.n - 1)
    both = 1 if s.n == 2 else 2  # messages over a link that partial sums and results share
    pace = s.hub_does(both, 1, 0, both), s.leaf_does(both, both, 1, both)
    return hops + s.m - 1, hops * s.hop() + (s.n - 1) * s.g / s.leaf.fold_rate, pace


def _rotate(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    steps = 2 * (s.n - 1)
    one = max(s.hub_does(1, 1, 0).seconds, s.leaf_does(1, 1, 0).seconds) + s.g / s.leaf.fold_rate / 2
    pace = s.hub_does(steps, steps, s.n - 1, steps), s.leaf_does(steps, steps, s.n - 1, steps)
    return steps * s.m, steps * one, pace


def _stream(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    k = s.n - 1
    copying = s.g * s.leaf.per_byte  # at the leaves, while the hub copies as well
    first = (
        2 * s.leaf.per_message + max(copying, s.hub_does(0, k, k).seconds) + max(copying, s.hub_does(k, 0, 0).seconds)
    )
    return s.m + 1, first, (s.hub_does(k, k, k), s.leaf_does(1, 1, 0))


def _tree(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    height = (s.n - 1).bit_length()
    first = 2 * height * s.hop() + height * s.g / s.hub.fold_rate
    half = 1 << (height - 1)
    degree = max((s.n - half - 1).bit_length() + 1, height - 1)  # of rank `half`, or of rank `half / 2`
    return 2 * height + s.m - 1, first, (s.hub_does(height, height, height), s.leaf_does(degree, degree, degree))


def _doubling(s: _Shape) -> tuple[int, float, tuple[_Work, _Work]]:
    rounds = (s.n - 1).bit_length()
    each = (s.n - 1) * s.g / rounds  # the bytes of a message, on average
    longest = max(1 << (rounds - 1), s.n - (1 << (rounds - 1))) * s.g
    per_link = -(-int(longest) // int(each))
    pace = (
        _Work(s.hub, s.line, rounds, rounds, each, rounds, per_link),
        _Work(s.leaf, s.line, rounds, rounds, each, rounds, per_link),
    )
    return rounds * s.m, _slower(pace), pace


def _slower(pace: tuple[_Work, _Work]) -> float:
    return max(pace[0].seconds, pace[1].seconds)


_FORMULAS: Final[dict[str, _Formula]] = {
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "relay": _relay,
    "chain": _chain,
    "rotate": _rotate,
    "stream": _stream,
    "reduce_broadcast": _tree,
    "doubling": _doubling,
}
CHUNKED: Final = ("two_shot", "rotate")  # a segment is a piece of one rank's chunk, not of the whole


def all_reduce(variant: str, network: Network, nbytes: int, segment_nbytes: int) -> Price:
    """The price of one all-reduce of `nbytes`, by formula."""
    n = network.world_size
    if n == 1:
        return Price(0.0)
    part = -(-nbytes // n) if variant in CHUNKED else nbytes
    m = max(1, -(-part // segment_nbytes))
    shape = _Shape(
        n,
        _worst([network.host(0)], [1 / _share(network, 0)]),
        _leaf(network),
        _line(network),
        m,
        part / m + HEADER_BYTES,
    )
    rounds, first, pace = _FORMULAS[variant](shape)
    seconds = rounds * shape.line.latency + first + (m - 1) * _slower(pace)
    busy: dict[Resource, float] = {}
    for rank, work in enumerate(pace):
        busy["cpu", rank] = m * work.cpu
        busy["out", network.home[rank]] = m * work.out
        busy["in", network.home[rank]] = m * work.into
    return Price(seconds, (), busy)


def _share(network: Network, rank: int) -> float:
    """The part of a core that `rank` has."""
    home = network.home[rank]
    return min(1.0, network.hosts[home].cores / network.ranks_on(home))


def _leaf(network: Network) -> Host:
    counts = Counter(network.home)
    hosts = [network.hosts[home] for home in dict.fromkeys(network.home[1:])]
    return _worst(
        hosts, [max(1.0, counts[home] / network.hosts[home].cores) for home in dict.fromkeys(network.home[1:])]
    )


def _worst(hosts: list[Host], slowdown: list[float]) -> Host:
    return replace(
        hosts[0],
        send_rate=min(h.send_rate for h in hosts),
        recv_rate=min(h.recv_rate for h in hosts),
        per_message=max(h.per_message * k for h, k in zip(hosts, slowdown, strict=True)),
        per_byte=max(h.per_byte * k for h, k in zip(hosts, slowdown, strict=True)),
        fold_rate=min(h.fold_rate / k for h, k in zip(hosts, slowdown, strict=True)),
    )


def _line(network: Network) -> Line:
    used = [*network.special.values(), network.near if len(network.hosts) == 1 else network.line]
    return Line(max(line.latency for line in used), min(line.rate for line in used))
