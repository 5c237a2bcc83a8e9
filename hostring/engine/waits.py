"""Who waits for whom, and in which call: the culprit when ranks wait, and the odd one out when their calls differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hostring.engine.frames import SEQ, SEQ_OFFSET, Call, Header, decode, numbered
from hostring.errors import CollectiveMismatch


@dataclass(frozen=True)
class Waiting:
    """What a rank sleeps in: an operation that waits for rank `peer`; call number `seq` when it is a collective."""

    peer: int
    operation: str
    call: Call | None = None
    seq: int = -1

    @property
    def name(self) -> str:
        return self.operation if self.call is None else f"{self.operation} {numbered(self.seq)}"

    def header(self) -> bytes:
        """The header that all ranks must have alike in this call; empty for a message."""
        if self.call is None:
            return b""
        header = self.call.header(0, 0, 0, 0)
        SEQ.pack_into(header, SEQ_OFFSET, self.seq)
        return bytes(header)

    def to_body(self) -> dict[str, Any]:
        """The fields of a state frame."""
        return {"what": "state", "waits_for": self.peer, "seq": self.seq, "header": self.header()}


@dataclass(frozen=True)
class State:
    """What another rank said that it waits for (a rank, or -1), and the header of its call, if it is in one."""

    waits_for: int
    seq: int
    header: bytes

    @staticmethod
    def of(body: Mapping[str, Any]) -> State:
        """Of a state frame. Raises `ValueError`, `TypeError` or `KeyError` for one that is none."""
        header = bytes(body["header"])
        if header and (
            len(header) != len(Call("barrier", None, 0, "rank", 0).header(0, 0, 0, 0)) or not decode(header)
        ):
            raise ValueError("a state frame holds no header")
        return State(int(body["waits_for"]), int(body["seq"]), header)


def mismatch(mine: Waiting, theirs: State, peer: int) -> CollectiveMismatch | None:
    """The error for two sleeping ranks that wait for each other in different calls of the same number."""
    ours, header = decode(mine.header() or bytes(64)), decode(theirs.header or bytes(64))
    if ours is None or header is None or theirs.seq != mine.seq or mine.header() == theirs.header:
        return None
    sides = f"this rank calls {ours.describe_call()}; rank {peer} calls {header.describe_call()}"
    return CollectiveMismatch(f"{sides}; each waits for the other; {_difference(ours, header)}", peer)


def odd_one_out(calls: Mapping[int, bytes], world_size: int) -> CollectiveMismatch | None:
    """The error that names the rank whose call differs from that of most ranks.

    Args:
        calls: headers by rank, as far as they are known.

    Returns:
        None when nobody differs, when no call is that of most ranks, or when those that are unknown could change it.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, header in sorted(calls.items()):
        ranks_of.setdefault(header, []).append(rank)
    usual, most = max(ranks_of.items(), key=lambda item: len(item[1]))
    others = [(rank, header) for rank, header in sorted(calls.items()) if header != usual]
    runner_up = max((len(ranks) for header, ranks in ranks_of.items() if header != usual), default=0)
    unknown = world_size - len(calls)
    if not others or len(most) <= runner_up + unknown:
        return None
    rank, header = others[0]
    odd, right = decode(header), decode(usual)
    if odd is None or right is None:
        return None
    many = f"rank {most[0]} calls" if len(most) == 1 else f"ranks {', '.join(map(str, most))} call"
    sides = f"rank {rank} calls {odd.describe_call()}; {many} {right.describe_call()}"
    return CollectiveMismatch(f"{sides}; {_difference(odd, right)}", rank)


def _difference(one: Header, other: Header) -> str:
    return f"they differ in: {one.differs_from(other)}"
