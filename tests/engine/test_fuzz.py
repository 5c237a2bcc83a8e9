"""Bytes from elsewhere, broken in every way: what reads them raises what it documents, soon, and nothing else.

`HOSTRING_FUZZ_EXAMPLES` raises the number of inputs per decoder. `benchmarks/fuzz.py` throws millions at the same
decoders.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostring.engine.frames import message_header
from hostring.rendezvous import TcpStore
from hostring.store.protocol import framed, pack, prove, unpack
from hostring.store.server import StoreServer
from hostring.transports.tcp import listen_at

EXAMPLES = int(os.environ.get("HOSTRING_FUZZ_EXAMPLES", "60"))
SECRET = b"of the store"


def load() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("fuzz")


fuzz = load()
TARGETS = {target.name: target for target in fuzz.targets()}

REGRESSIONS: dict[str, list[bytes]] = {
    "messages": [  # a message of 6 EiB for which there is no receive yet
        message_header(9, 0, (1 << 62) + 1, 3, (1 << 62) + 1, 7),
        message_header(9, 0, 1 << 63, 3, 1 << 63, 7),
    ],
    "gguf": [
        b"GGUF\3\0\0\0"
        + (0).to_bytes(8, "little")
        + (1).to_bytes(8, "little")
        + b"\1\0\0\0\0\0\0\0k"
        + b"\x09\0\0\0" * 3000,  # nested
        b"GGUF\3\0\0\0"
        + bytes(8)
        + b"\1\0\0\0\0\0\0\0"
        + b"\1\0\0\0\0\0\0\0k\x09\0\0\0\4\0\0\0"
        + b"\xff" * 8,  # 2**64 numbers
        b"GGUF\3\0\0\0"
        + bytes(8)
        + b"\1\0\0\0\0\0\0\0"
        + b"\x11\0\0\0\0\0\0\0general.alignment\4\0\0\0\0\0\0\0",  # aligned to 0
        b"GGUF\3\0\0\0" + b"\1" + bytes(7) + bytes(8) + b"\1\0\0\0\0\0\0\0w" + bytes(20),  # a tensor without dimensions
    ],
    "control": [
        b"hCtl\1\0\0\0\xc1",  # no msgpack
        b"hCtl\1\0\0\0\x90",  # no dict
        b"hCtl" + b"\xff" * 60,
    ],
}


@st.composite
def inputs(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    """Noise, or a good input that hypothesis cuts, splices and overwrites."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        what = draw(st.sampled_from(("insert", "overwrite", "delete", "cut")))
        piece = draw(st.binary(max_size=12))
        if what == "insert":
            data[at:at] = piece
        elif what == "overwrite":
            data[at : at + len(piece)] = piece
        elif what == "delete":
            del data[at : at + len(piece)]
        else:
            del data[at:]
    return bytes(data)


def read(name: str, data: bytes) -> None:
    target, tally = TARGETS[name], fuzz.Tally()
    fuzz.attempt(target, data, tally)
    assert tally.failures == []


@pytest.mark.parametrize("name", TARGETS)
def test_good_inputs_are_taken(name: str) -> None:
    target = TARGETS[name]
    for seed in target.seeds:
        with contextlib.suppress(*target.documented):
            target.read(seed)
        read(name, seed)


@pytest.mark.parametrize("name", TARGETS)
def test_broken_inputs_raise_what_is_documented(name: str) -> None:
    target = TARGETS[name]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(inputs(list(target.seeds)))
    def run(data: bytes) -> None:
        read(name, data)

    run()


@pytest.mark.parametrize(("name", "data"), [(name, data) for name, inputs in REGRESSIONS.items() for data in inputs])
def test_what_once_failed(name: str, data: bytes) -> None:
    if name not in TARGETS:
        pytest.skip("needs the extra llm")
    read(name, data)


def test_the_script_finds_what_is_wrong() -> None:
    """A fuzzer that can't fail proves nothing."""

    def bad(data: bytes) -> None:
        if len(data) > 4 and data[1] == 0xFF:
            raise KeyError("oops")

    target, tally = fuzz.Target("bad", [b"abcdef"], bad, (ValueError,)), fuzz.Tally()
    stream = fuzz.damaged(target.seeds, random.Random(1))
    for _ in range(2000):
        fuzz.attempt(target, next(stream), tally)
    assert tally.inputs == 2000
    assert tally.failures
    assert tally.failures[0][1] == "KeyError: 'oops'"


# ------------------------------------------------------------------ a store's server, from outside


def admitted(port: int) -> socket.socket:
    """A connection that the store believes."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    greeting = message_from(sock)
    client, nonce = b"c" * 16, os.urandom(16)
    sock.sendall(framed(pack([client, nonce, prove(SECRET, "store client", greeting, client, nonce)], 999)))
    assert unpack(message_from(sock))[0] is True
    return sock


def message_from(sock: socket.socket) -> bytes:
    head = sock.recv(4, socket.MSG_WAITALL)
    return sock.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)


def stranger(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


@pytest.mark.parametrize("connect", [stranger, admitted], ids=["stranger", "info"])
def test_nothing_that_is_said_to_a_store_stops_it(connect: Callable[[int], socket.socket]) -> None:
    server = StoreServer([listen_at("127.0.0.1", 0)], SECRET)
    seeds = [
        framed(pack(r, 999))
        for r in ([7, "set", "k", b"v"], [8, "get", "k", 0.0], [9, "check", ["k"]], [10, "add", "n", 1])
    ]
    seeds.append(framed(pack([b"c" * 16, b"n" * 16, b"p" * 32], 999)))
    stream = fuzz.damaged(seeds, random.Random(3))
    store = TcpStore.at("127.0.0.1", server.port, secret=SECRET, deadline=time.monotonic() + 30)
    try:
        for k in range(EXAMPLES * 3):
            with connect(server.port) as sock, contextlib.suppress(OSError):
                sock.settimeout(5)
                sock.sendall(b"".join(next(stream) for _ in range(5)))
            if k % 50 == 0:
                store.set("still", b"here")
                assert store.get("still", 1.0) == b"here"
        assert store.add("counted", 2) == 2
    finally:
        store.close()
        server.close()
