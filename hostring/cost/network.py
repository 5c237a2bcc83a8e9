"""A model of hosts and of the links between them: what `price` runs schedules on. Seconds, bytes, bytes per second."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

UNLIMITED: Final = float("inf")
GBIT: Final = 1e9 / 8
PAYLOAD: Final = 0.94  # part of an Ethernet line's rate; headers take the rest


@dataclass(frozen=True)
class Host:
    """A machine with one network interface.

    Attributes:
        send_rate, recv_rate: of its full-duplex interface, for all links together. Each link has its own limit too.
        cores: for the ranks on it.
        per_message: seconds of processor time for each message sent, and for each one received.
        per_byte: seconds of processor time for each byte sent or received: the kernel copies it.
        fold_rate: bytes of result per second when two arrays become one.
    """

    send_rate: float = UNLIMITED
    recv_rate: float = UNLIMITED
    cores: int = 1
    per_message: float = 3e-6
    per_byte: float = 1e-10
    fold_rate: float = 10e9


@dataclass(frozen=True)
class Line:
    """One direction of a link. `latency`: from the sender's last to the receiver's first step for an empty message."""

    latency: float = 5e-6
    rate: float = UNLIMITED


@dataclass(frozen=True)
class Network:
    """All ranks' hosts and links.

    Attributes:
        hosts: the machines. home: the machine of each rank.
        line: between ranks of different hosts. near: between ranks of one host, whose interface is not involved.
        special: directions that differ, by (src, dst).
        buffered: bytes that a link takes before a sender has to wait for the line.
    """

    hosts: tuple[Host, ...]
    home: tuple[int, ...]
    line: Line = field(default_factory=Line)
    near: Line = field(default_factory=Line)
    special: Mapping[tuple[int, int], Line] = field(default_factory=dict)
    buffered: int = 1 << 21

    @property
    def world_size(self) -> int:
        return len(self.home)

    def host(self, rank: int) -> Host:
        return self.hosts[self.home[rank]]

    def between(self, src: int, dst: int) -> Line:
        """The line from `src` to `dst`."""
        return self.special.get((src, dst)) or (self.near if self.home[src] == self.home[dst] else self.line)

    def ranks_on(self, host: int) -> int:
        return self.home.count(host)

    def without_limit_at(self, rank: int) -> Network:
        """This network with a host of unlimited speed for `rank`. The difference in price is what its limits cost."""
        at = self.home[rank]
        free = replace(
            self.hosts[at], send_rate=UNLIMITED, recv_rate=UNLIMITED, per_message=0.0, per_byte=0.0, fold_rate=UNLIMITED
        )
        hosts = tuple(free if i == at else host for i, host in enumerate(self.hosts))
        special = {pair: line for pair, line in self.special.items() if rank not in pair}
        return replace(self, hosts=hosts, special=special)

    def to_json(self) -> dict[str, Any]:
        """Plain values; unlimited rates are null."""
        plain = asdict(self)
        plain["special"] = [[src, dst, asdict(line)] for (src, dst), line in self.special.items()]
        found = _swap(plain, UNLIMITED, None)
        assert isinstance(found, dict)
        return found

    @classmethod
    def from_json(cls, plain: Any) -> Network:
        """What `to_json` gave.

        Raises:
            ValueError: it is something else; names the key.
        """
        try:
            known = _swap(plain, None, UNLIMITED)
            return cls(
                hosts=tuple(Host(**h) for h in known["hosts"]),
                home=tuple(int(h) for h in known["home"]),
                line=Line(**known["line"]),
                near=Line(**known["near"]),
                special={(int(src), int(dst)): Line(**line) for src, dst, line in known["special"]},
                buffered=int(known["buffered"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ValueError(f"not a description of a network: {type(exc).__name__}: {exc}") from exc


def _swap(value: Any, old: Any, new: Any) -> Any:
    """`value` with every `old` in it, at any depth, replaced by `new`."""
    if isinstance(value, dict):
        return {k: _swap(v, old, new) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_swap(v, old, new) for v in value]
    return new if value is old or (value == old and type(value) is type(old)) else value


def one_host(world_size: int, cores: int) -> Network:
    """Ranks of one machine over loopback TCP: the cost is the kernel's copies and system calls."""
    host = Host(cores=cores, per_message=3.5e-6, per_byte=1.3e-10, fold_rate=10e9)
    return Network((host,), (0,) * world_size, near=Line(2e-6))


def ethernet(world_size: int, gbit: float = 1.0, latency: float = 30e-6, hub_gbit: float | None = None) -> Network:
    """Every rank on a machine of its own, on one switch without a limit of its own. Rank 0's interface may differ."""
    rates = [hub_gbit if rank == 0 and hub_gbit is not None else gbit for rank in range(world_size)]
    hosts = tuple(Host(r * GBIT * PAYLOAD, r * GBIT * PAYLOAD, per_message=4e-6, per_byte=2e-10) for r in rates)
    return Network(hosts, tuple(range(world_size)), Line(latency))


def in_words(network: Network) -> str:
    """Rates and latencies of a network of one rank on each host: the usual ones, then what differs."""

    def speed(rate: float) -> str:
        return "no limit" if rate == UNLIMITED else f"{rate / GBIT / PAYLOAD:.4g} Gbit/s"

    rates = [(host.send_rate, host.recv_rate) for host in network.hosts]
    usual = statistics.mode(rates)
    parts = [f"{speed(usual[0])} and {network.line.latency * 1e6:.4g} us between hosts"]
    for rank, (send, recv) in enumerate(rates):
        if (send, recv) != usual:
            parts.append(f"rank {rank} sends {speed(send)}, receives {speed(recv)}")
    for (src, dst), line in sorted(network.special.items()):
        parts.append(f"{src} to {dst} {speed(line.rate)}, {line.latency * 1e6:.4g} us")
    return "; ".join(parts)


_RANK_KEYS: Final = (
    "gbit_per_s",
    "send_gbit_per_s",
    "recv_gbit_per_s",
    "cores",
    "per_message_us",
    "per_byte_ns",
    "fold_gb_per_s",
)
_LINK_KEYS: Final = ("latency_us", "gbit_per_s")


def read_links(path: str) -> dict[str, Any]:
    """Read a LINKS file: a JSON object.

        {"latency_us": 50, "gbit_per_s": 1, "ranks": {"0": {"gbit_per_s": 2.5}},
         "links": [{"from": 0, "to": 3, "latency_us": 400, "gbit_per_s": 0.1}]}

    What is at the top holds for all ranks. A rank's `gbit_per_s` is its interface, all links together. Rates are those
    of the line; payload gets a little less. A link is one direction. See `_RANK_KEYS` for what else a rank may have.

    Raises:
        ValueError: names the file and the key.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as exc:
        raise ValueError(f"{path}: can't be read as JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object with latency_us, gbit_per_s, ranks, links")
    _known(found, (*_RANK_KEYS, "latency_us", "ranks", "links"), path)
    for rank, row in found.get("ranks", {}).items():
        _known(row, _RANK_KEYS, f"{path}: ranks.{rank}")
        if not str(rank).isdigit():
            raise ValueError(f"{path}: ranks.{rank}: a rank is a whole number from 0 up")
    for n, row in enumerate(found.get("links", [])):
        _known(row, (*_LINK_KEYS, "from", "to"), f"{path}: links[{n}]")
        if not {"from", "to"} <= set(row):
            raise ValueError(f"{path}: links[{n}]: needs from and to")
    return found


def _known(row: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with some of {', '.join(keys)}")
    wrong = [k for k in row if k not in keys]
    if wrong:
        raise ValueError(f"{where}: unknown key {', '.join(wrong)}; possible are {', '.join(keys)}")
    for key, value in row.items():
        if key not in ("ranks", "links", "from", "to") and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0
        ):
            raise ValueError(f"{where}: {key} is {value!r}, expected a number, not below 0")


def from_links(links: Mapping[str, Any], world_size: int) -> Network:
    """The network of `world_size` ranks that a LINKS file (see `read_links`) describes."""
    everyone = {k: v for k, v in links.items() if k in _RANK_KEYS}
    rows = [{**everyone, **links.get("ranks", {}).get(str(rank), {})} for rank in range(world_size)]
    latency = links.get("latency_us", 30.0) * 1e-6
    special = {}
    for row in links.get("links", []):
        if row["from"] < world_size and row["to"] < world_size:
            rate = row["gbit_per_s"] * GBIT * PAYLOAD if "gbit_per_s" in row else UNLIMITED
            special[row["from"], row["to"]] = Line(row["latency_us"] * 1e-6 if "latency_us" in row else latency, rate)
    return Network(tuple(_host(row) for row in rows), tuple(range(world_size)), Line(latency), special=special)


def _host(row: Mapping[str, Any]) -> Host:
    both = row.get("gbit_per_s", 1.0)
    return Host(
        send_rate=row.get("send_gbit_per_s", both) * GBIT * PAYLOAD,
        recv_rate=row.get("recv_gbit_per_s", both) * GBIT * PAYLOAD,
        cores=int(row.get("cores", 1)),
        per_message=row.get("per_message_us", 4.0) * 1e-6,
        per_byte=row.get("per_byte_ns", 0.2) * 1e-9,
        fold_rate=row.get("fold_gb_per_s", 10.0) * 1e9,
    )
