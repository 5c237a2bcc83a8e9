"""What one rank tells the others about itself, and how that is packed for the store and for the hello."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostring.errors import HandshakeError
from hostring.group.host_info import this_host
from hostring.store.protocol import pack, typed, typed_fields, unpack
from hostring.transports.addresses import Address

PROTOCOL = 2
"""Version of what ranks tell each other. Ranks of different versions refuse each other."""

MAX_ENTRY_BYTES = 1 << 16
MAX_CORES = 8192
MAX_CORE_RUNS = 256
"""A mask with more runs of CPU numbers is cut off, so that it fits into a hello."""

_INFO_FIELDS: dict[str, type | list[type]] = {
    "host_id": str,
    "net_id": str,
    "hostname": str,
    "pid": int,
    "core_runs": [int],
    "cpu_quota": float,
    "hosts": [str],
    "ports": [int],
}


@dataclass(frozen=True)
class PeerInfo:
    """One rank, as the others know it.

    Attributes:
        host_id, net_id, hostname, cores, cpu_quota: see `HostInfo`.
        pid: process id on its machine.
        addresses: where its listener waits, best first.
    """

    host_id: str
    net_id: str
    hostname: str
    pid: int
    cores: list[int]
    cpu_quota: float | None
    addresses: list[Address]

    def to_dict(self) -> dict[str, Any]:
        """A dict that msgpack takes. CPU numbers become runs, so that a mask of many CPUs stays short."""
        return {
            "host_id": self.host_id,
            "net_id": self.net_id,
            "hostname": self.hostname,
            "pid": self.pid,
            "core_runs": _runs(self.cores),
            "cpu_quota": self.cpu_quota or 0.0,
            "hosts": [host for host, _ in self.addresses],
            "ports": [port for _, port in self.addresses],
        }

    @classmethod
    def from_dict(cls, packed: Any) -> PeerInfo:
        """Raises: ValueError, when this is not what `to_dict` gives."""
        fields = typed_fields(packed, _INFO_FIELDS)
        runs, hosts, ports = fields.pop("core_runs"), fields.pop("hosts"), fields.pop("ports")
        cores = itertools.chain.from_iterable(
            range(first, first + n) for first, n in zip(runs[::2], runs[1::2], strict=True)
        )
        fields["cpu_quota"] = fields["cpu_quota"] or None
        return cls(
            cores=list(itertools.islice(cores, MAX_CORES)), addresses=list(zip(hosts, ports, strict=True)), **fields
        )


def this_peer(addresses: list[Address]) -> PeerInfo:
    """Describe this process."""
    return PeerInfo(**vars(this_host()), pid=os.getpid(), addresses=addresses)


@dataclass(frozen=True)
class Entry:
    """What one rank publishes before there are links. `trouble` says why it can't take part; empty when it can."""

    rank: int
    world_size: int
    nonce: bytes
    transport: str
    contract: Mapping[str, Any]
    info: PeerInfo
    trouble: str = ""

    def to_bytes(self) -> bytes:
        """Raises: ValueError, when it is over the limit."""
        described = [dict(self.contract), self.info.to_dict(), self.trouble[:1000]]
        return pack([PROTOCOL, self.rank, self.world_size, self.nonce, self.transport, *described], MAX_ENTRY_BYTES)

    @classmethod
    def from_bytes(cls, rank: int, data: bytes, mine: Entry | None = None) -> Entry:
        """What rank `rank` published.

        Raises:
            HandshakeError: this version of hostring writes nothing like it, or its world size is not that of `mine`.
        """
        try:
            packed = unpack(data)
            if not isinstance(packed, list) or packed[0] != PROTOCOL:
                version = repr(packed[0])[:40] if isinstance(packed, list) and packed else "unknown"
                raise HandshakeError(
                    f"rank {rank} speaks protocol {version}, this rank {PROTOCOL}; install the same hostring", rank
                )
            kinds = (int, int, bytes, str, dict, dict, str)
            fields: list[Any] = [typed(packed, i, kind) for i, kind in enumerate(kinds, 1)]
            fields[5] = PeerInfo.from_dict(fields[5])
            entry = cls(*fields)
        except (ValueError, IndexError) as exc:
            raise HandshakeError(f"what rank {rank} published can't be read: {exc}", rank) from exc
        if mine is not None:
            entry.check_place(mine.rank, mine.world_size)
        return entry

    def check_place(self, rank: int, world_size: int) -> None:
        """Raises: HandshakeError, when this entry counts the ranks otherwise than rank `rank`."""
        if self.world_size != world_size:
            theirs = f"rank {self.rank} has {self.world_size}"
            raise HandshakeError(
                f"world_size differs: rank {rank} has {world_size}, {theirs}; give all ranks the same", self.rank
            )


def _runs(cores: list[int]) -> list[int]:
    """First number and length of each run of consecutive numbers."""
    runs: list[int] = []
    for core in cores:
        if runs and runs[-2] + runs[-1] == core:
            runs[-1] += 1
        else:
            runs += [core, 1]
    return runs[: 2 * MAX_CORE_RUNS]
