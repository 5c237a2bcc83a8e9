"""Encrypted links keep the link contract and the bits, hide what they carry, and admit only holders of the secret."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import link_contract
import numpy as np
import pytest
from link_ends import LEFT, RIGHT, Pair
from ranks import side_by_side, successes

import hostring
from hostring.errors import HandshakeError
from hostring.rendezvous import MemoryStore

pytest.importorskip("cryptography")
from hostring.transports import tls


def handshake(left: tls.Wrapper, right: tls.Wrapper, a: socket.socket, b: socket.socket) -> list[Any]:
    ends: list[Any] = [None, None]

    def wrap(k: int, wrapper: tls.Wrapper, sock: socket.socket, peer: int) -> None:
        try:
            ends[k] = wrapper.wrap(sock, peer, time.monotonic() + 10)
        except HandshakeError as exc:
            ends[k] = exc
            sock.close()

    other = threading.Thread(target=wrap, args=(1, right, b, LEFT), daemon=True)
    other.start()
    wrap(0, left, a, RIGHT)
    other.join(15)
    return ends


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return dialled, accepted


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = connected()
    left, right = handshake(tls.Wrapper(b"secret", LEFT), tls.Wrapper(b"secret", RIGHT), a, b)
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize("check", link_contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_link_contract(pair: Pair, check: Callable[[Pair], None]) -> None:
    check(pair)


def read_for_a_while(link: Any) -> None:
    for _ in range(1000):
        link.recv_into(bytearray(1))
        time.sleep(0.001)


def test_another_secret_is_refused_on_both_sides() -> None:
    a, b = connected()
    ends = handshake(tls.Wrapper(b"secret", LEFT), tls.Wrapper(b"guess", RIGHT), a, b)
    if not isinstance(
        ends[1], HandshakeError
    ):  # TLS 1.3 lets a client finish first; it learns of the refusal when it reads
        with pytest.raises(hostring.PeerLostError):
            read_for_a_while(ends[1])
        ends[1].close()
    assert isinstance(ends[0], HandshakeError)
    assert "did not prove" in str(ends[0])


def test_nothing_readable_crosses_the_wire() -> None:
    """A relay between the two ends sees every byte."""
    a, relay_a = connected()
    relay_b, b = connected()
    seen = bytearray()

    def forward(source: socket.socket, target: socket.socket) -> None:
        while piece := source.recv(65536):
            seen.extend(piece)
            target.sendall(piece)

    for pipe in ((relay_a, relay_b), (relay_b, relay_a)):
        threading.Thread(target=forward, args=pipe, daemon=True).start()
    left, right = handshake(tls.Wrapper(b"secret", LEFT), tls.Wrapper(b"secret", RIGHT), a, b)
    words = b"attack at dawn, with every rank"
    assert left.send([words, words]) == 2 * len(words)
    got = bytearray(2 * len(words))
    end = time.monotonic() + 10
    n = 0
    while n < len(got) and time.monotonic() < end:
        n += right.recv_into(memoryview(got)[n:])
    assert bytes(got) == 2 * words
    assert len(seen) > len(got)
    assert words not in seen
    left.close()
    right.close()
    for sock in (relay_a, relay_b):
        sock.close()


@pytest.mark.parametrize("topology", ["mesh", "ring", "star"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_are_those_of_plain_links(
    run_ranks: Any, monkeypatch: pytest.MonkeyPatch, world_size: int, topology: str
) -> None:
    monkeypatch.setenv("HOSTRING_SECRET", "between us")
    inputs = [np.random.default_rng(r).standard_normal(100_003).astype(np.float32) * 10.0**r for r in range(world_size)]
    expected = functools.reduce(np.add, inputs)

    def body(comm: hostring.Comm) -> Any:
        mine = np.full(3, comm.rank, np.int32)
        comm.send(mine, (comm.rank + 1) % world_size)
        got = comm.recv(np.empty(3, np.int32), (comm.rank - 1) % world_size)
        return comm.all_reduce(inputs[comm.rank].copy()), got[0]

    for rank, (total, neighbour) in enumerate(run_ranks(world_size, body, topology=topology, transport="tls")):
        np.testing.assert_array_equal(total.view(np.uint32), expected.view(np.uint32))
        assert neighbour == (rank - 1) % world_size


def test_without_a_secret_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTRING_SECRET", raising=False)
    with pytest.raises(ValueError, match="HOSTRING_SECRET"):
        hostring.init(0, 2, transport="tls", store=MemoryStore())


def test_plain_and_encrypted_ranks_refuse_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTRING_SECRET", "between us")
    store = MemoryStore()

    def body(rank: int) -> None:
        with pytest.raises(HandshakeError, match="encrypted"):
            hostring.init(rank, 2, transport=("tls", "tcp")[rank], store=store, timeout=10)

    successes(side_by_side([lambda: body(0), lambda: body(1)]))
