"""Hellos, and both sides of a handshake carried by hand, for the tests of the handshake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st

from hostring.group.handshake import (
    Hello,
    Protocol,
    RefusedError,
    accept,
)
from hostring.group.peer_info import this_peer

SECRET = b"a secret of the group"
INFO = this_peer([])
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


def hello(rank: int, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "group": b"g" * 16,
        "session": bytes([rank % 256]) * 16,
        "world_size": 3,
        "rank": rank,
        "kind": "data",
        "contract": {"order": "rank"},
        "info": INFO,
    }
    return Hello(**{**fields, **changes})


def acceptor(
    mine: Hello, secret: bytes = SECRET, admit: Callable[[Hello], str | None] = lambda theirs: None
) -> Protocol:
    def own(kind: str) -> Hello:
        return Hello(**{**vars(mine), "kind": kind})

    return accept(own, admit, secret)


def converse(dialler: Protocol, answerer: Protocol) -> tuple[Hello, Hello, list[bytes]]:
    """Carry the four messages by hand. Returns what A and D learned, and the messages."""
    assert next(answerer) == b""
    wire = [next(dialler)]
    wire.append(answerer.send(wire[-1]))
    wire.append(dialler.send(wire[-1]))
    with pytest.raises(StopIteration) as accepted:
        answerer.send(wire[-1])
    learned_by_a, verdict = accepted.value.value
    wire.append(verdict)
    with pytest.raises(StopIteration) as dialled:
        dialler.send(verdict)
    return learned_by_a, dialled.value.value[0], wire


def refusal(protocol: Protocol, *messages: bytes) -> RefusedError:
    """Feed `messages`, of which the last must be refused."""
    next(protocol)
    for message in messages[:-1]:
        protocol.send(message)
    with pytest.raises(RefusedError) as refused:
        protocol.send(messages[-1])
    return refused.value
