"""The hello on a new link: who is there, does it know the group's secret, and did it sign the same contract.

Four messages, each at most `MAX_HELLO_BYTES` bytes, with D the rank that dialled and A the one that accepted:

    D -> A  hello: version, group, world size, rank, kind of link, contract, description, nonce
    A -> D  hello: the same of its own                          (or a refusal)
    D -> A  HMAC-SHA256(secret, "dialer", both hellos)
    A -> D  HMAC-SHA256(secret, "acceptor", both hellos, D's)   (or a refusal)

Each side's fresh nonce is in its hello, so nothing recorded can be replayed; the role and both ranks are under the
HMAC, so nothing can be reflected. D proves itself first, so a stranger that dials gets nothing to guess secrets with.
What follows on the link is neither encrypted nor authenticated.

The functions here are generators that yield bytes to send and are sent bytes that came; they touch no socket.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hostring.errors import HandshakeError
from hostring.group.peer_info import PROTOCOL, PeerInfo
from hostring.store.protocol import pack, prove, proves, typed_fields, unpack

MAX_HELLO_BYTES = 4096
KINDS = ("data", "control", "p2p")

_HELLO_FIELDS: dict[str, type | list[type]] = {
    "group": bytes,
    "session": bytes,
    "world_size": int,
    "rank": int,
    "kind": str,
    "contract": dict,
    "info": dict,
    "nonce": bytes,
}

_ADVICE = {"byte_order": "numbers travel as they lie in memory, so all machines of a group must have the same"}


@dataclass(frozen=True)
class Hello:
    """What a rank says about itself on a link.

    Attributes:
        group: names the group and, where there was a store, this very start of it.
        session: names this rank's start; the same in all its hellos, and never again.
        kind: one of `KINDS`.
    """

    group: bytes
    session: bytes
    world_size: int
    rank: int
    kind: str
    contract: Mapping[str, Any]
    info: PeerInfo

    def to_bytes(self, nonce: bytes) -> bytes:
        """Raises: ValueError, when it is over the limit."""
        packed = {
            "hostring": PROTOCOL,
            "group": self.group,
            "session": self.session,
            "world_size": self.world_size,
            "rank": self.rank,
            "kind": self.kind,
            "contract": dict(self.contract),
            "info": replace(self.info, addresses=[]).to_dict(),
            "nonce": nonce,
        }
        return pack(packed, MAX_HELLO_BYTES)


class RefusedError(HandshakeError):
    """One of the two sides did not want this link. Start-up goes on without it.

    Attributes:
        reason: a word for programs: "junk", "version", "group", "world_size", "rank", "kind", "duplicate", "secret".
        reply: bytes that tell the other side, when that is of use.
    """

    def __init__(self, reason: str, message: str, reply: bytes = b"") -> None:
        super().__init__(message)
        self.reason = reason
        self.reply = reply


Protocol = Generator[bytes, bytes, tuple[Hello, bytes]]
"""Yields bytes to send, b"" for none; returns the other side's hello, and bytes that are still to be sent."""


def dial(mine: Hello, peer: int, secret: bytes, nonce: bytes | None = None) -> Protocol:
    """D's side, for a link to rank `peer`.

    Raises:
        RefusedError: A refused us, is not the rank that was dialled, or doesn't know the secret.
    """
    hello = mine.to_bytes(nonce or os.urandom(16))
    answer = yield hello
    theirs = _parse(answer)
    expected = mine.group, mine.world_size, mine.kind, peer
    if (theirs.group, theirs.world_size, theirs.kind, theirs.rank) != expected:
        raise RefusedError(
            "rank", f"dialled rank {peer} of {mine.world_size}, and rank {theirs.rank} of {theirs.world_size} answers"
        )
    proof = prove(secret, "dialer", hello, answer)
    verdict = _message((yield pack({"proof": proof}, MAX_HELLO_BYTES)))
    if not proves(verdict.get("proof"), secret, "acceptor", hello, answer, proof):
        raise RefusedError("secret", f"rank {peer} does not know the group's secret (HOSTRING_SECRET)")
    return theirs, b""


def accept(
    mine: Callable[[str], Hello], admit: Callable[[Hello], str | None], secret: bytes, nonce: bytes | None = None
) -> Protocol:
    """A's side.

    Args:
        mine: gives this rank's hello for a kind of link.
        admit: says why a rank can't have that link, for example because it has it already; None when it can. Called
            before the proof. Another link of the same rank may be finished first: call it again before you keep this.
        secret: the group's.
        nonce: random when not given.

    Raises:
        RefusedError: this is no rank of this group.
    """
    first = yield b""
    theirs = _parse(first)
    own = mine(theirs.kind)
    for reason, ours, got in (("group", own.group, theirs.group), ("world_size", own.world_size, theirs.world_size)):
        if ours != got:
            raise refusal(reason, f"its {reason} is {_show(got)}, ours is {_show(ours)}")
    if not 0 <= theirs.rank < own.world_size or theirs.rank == own.rank:
        raise refusal("rank", f"it says that it is rank {theirs.rank}; this is rank {own.rank} of {own.world_size}")
    if why := admit(theirs):
        raise refusal("duplicate", why)
    hello = own.to_bytes(nonce or os.urandom(16))
    proof = _message((yield hello)).get("proof")
    if not proves(proof, secret, "dialer", first, hello):
        raise refusal(
            "secret", f"who says that it is rank {theirs.rank} does not know the group's secret (HOSTRING_SECRET)"
        )
    assert isinstance(proof, bytes)
    return theirs, pack({"proof": prove(secret, "acceptor", first, hello, proof)}, MAX_HELLO_BYTES)


def compare_contracts(rank: int, ours: Mapping[str, Any], peer: int, theirs: Mapping[str, Any]) -> None:
    """Raises: HandshakeError, naming the first key that differs and both values."""
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key):
            raise HandshakeError(
                f"the group's contract differs: rank {rank} has {key}={ours.get(key)!r}, rank {peer} has "
                f"{key}={theirs.get(key)!r}; {_ADVICE.get(key, 'give all ranks the same')}",
                peer,
            )


def _parse(data: bytes) -> Hello:
    packed = _message(data)
    if packed.get("hostring") != PROTOCOL:
        raise refusal(
            "version", f"it speaks version {_show(packed.get('hostring'))} of the protocol, we speak {PROTOCOL}"
        )
    try:
        fields = typed_fields(packed, _HELLO_FIELDS)
        if len(fields.pop("nonce")) < 16:
            raise ValueError("its nonce is short")
        if fields["kind"] not in KINDS:
            raise ValueError("its kind of link is unknown")
        fields["info"] = PeerInfo.from_dict(fields["info"])
        return Hello(**fields)
    except ValueError as exc:
        raise refusal("junk", f"not a hello: {exc}") from exc


def _message(data: bytes) -> dict[str, Any]:
    try:
        packed = unpack(data)
    except ValueError as exc:
        raise RefusedError("junk", str(exc)) from exc
    if not isinstance(packed, dict):
        raise RefusedError("junk", "not a hello")
    if "refused" in packed:
        raise RefusedError(str(packed["refused"])[:32], f"refused: {str(packed.get('why'))[:300]}")
    return packed


def refusal(reason: str, message: str) -> RefusedError:
    """For the side that accepts: an error whose `reply` tells the dialler."""
    return RefusedError(reason, message, pack({"refused": reason, "why": message[:300]}, MAX_HELLO_BYTES))


def _show(value: Any) -> str:
    return value[:8].hex() if isinstance(value, bytes) else repr(value)[:40]
