"""The hello: who is let in, who is refused, and why."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hellos import INFO, SECRET, VALUES, acceptor, converse, hello, refusal
from hypothesis import given, settings
from hypothesis import strategies as st

from hostring.errors import HandshakeError
from hostring.group.accepting import Acceptor
from hostring.group.greeting import Greeted
from hostring.group.handshake import (
    MAX_HELLO_BYTES,
    PROTOCOL,
    RefusedError,
    compare_contracts,
    dial,
)
from hostring.group.peer_info import Entry, PeerInfo
from hostring.group.roster import Roster
from hostring.group.tasks import Tasks
from hostring.store.protocol import framed, pack, prove, unpack


def read_message(sock: socket.socket) -> bytes:
    """One message that came as a whole."""
    return sock.recv(int.from_bytes(sock.recv(4), "little"))


def test_both_sides_learn_who_the_other_is() -> None:
    by_a, by_d, wire = converse(dial(hello(2, kind="p2p"), 0, SECRET), acceptor(hello(0)))
    assert (by_a.rank, by_a.kind, by_a.world_size) == (2, "p2p", 3)
    assert (by_d.rank, by_d.kind) == (0, "p2p")
    assert by_a.contract == {"order": "rank"}
    assert by_a.info == by_d.info == INFO
    assert len(wire) == 4
    assert all(len(message) <= MAX_HELLO_BYTES for message in wire)
    assert not any(SECRET in message for message in wire)


def test_an_empty_secret_works_between_two_that_have_none() -> None:
    by_a, _, _ = converse(dial(hello(1), 0, b""), acceptor(hello(0), b""))
    assert by_a.rank == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": b"h" * 16}, "group"),
        ({"world_size": 4}, "world_size"),
        ({"rank": 0}, "rank"),
        ({"rank": 3}, "rank"),
        ({"rank": -1}, "rank"),
    ],
)
def test_strange_ranks_are_refused_before_they_learn_anything(changes: dict[str, Any], reason: str) -> None:
    refused = refusal(acceptor(hello(0)), hello(**{"rank": 1, **changes}).to_bytes(b"n" * 16))
    assert refused.reason == reason
    assert b"nonce" not in refused.reply
    told = refusal(dial(hello(1), 0, SECRET), refused.reply)
    assert told.reason == reason
    assert "refused" in str(told)


def test_another_version_is_refused_naming_both() -> None:
    wire = unpack(hello(1).to_bytes(b"n" * 16))
    refused = refusal(acceptor(hello(0)), pack({**wire, "hostring": PROTOCOL + 1}, MAX_HELLO_BYTES))
    assert refused.reason == "version"
    assert f"version {PROTOCOL + 1}" in str(refused)
    assert f"we speak {PROTOCOL}" in str(refused)


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": b"short"},
        {"nonce": 5},
        {"kind": "gossip"},
        {"contract": [1]},
        {"rank": "one"},
        {"world_size": None},
        {"info": {}},
        {"info": None},
        {"group": 3.5},
    ],
)
def test_ill_typed_fields_are_junk(change: dict[str, Any]) -> None:
    wire = unpack(hello(1).to_bytes(b"n" * 16))
    assert refusal(acceptor(hello(0)), pack({**wire, **change}, MAX_HELLO_BYTES)).reason == "junk"


def test_a_missing_field_is_junk() -> None:
    wire = unpack(hello(1).to_bytes(b"n" * 16))
    for key in set(wire) - {"hostring"}:
        rest = {k: v for k, v in wire.items() if k != key}
        assert refusal(acceptor(hello(0)), pack(rest, MAX_HELLO_BYTES)).reason == "junk", key


def test_a_wrong_secret_is_refused_by_the_acceptor_without_a_proof_of_its_own() -> None:
    answerer, dialler = acceptor(hello(0)), dial(hello(1), 0, b"wrong")
    next(answerer)
    proof = dialler.send(answerer.send(next(dialler)))
    with pytest.raises(RefusedError, match="does not know the group's secret") as refused:
        answerer.send(proof)
    assert refused.value.reason == "secret"
    assert "proof" not in unpack(refused.value.reply)


def test_an_acceptor_that_lets_everyone_in_is_refused_by_the_dialler() -> None:
    dialler = dial(hello(1), 0, SECRET)
    next(dialler)
    dialler.send(hello(0).to_bytes(b"m" * 16))
    with pytest.raises(RefusedError, match="rank 0 does not know") as refused:
        dialler.send(pack({"proof": b"p" * 32}, MAX_HELLO_BYTES))
    assert refused.value.reason == "secret"


def test_a_replayed_conversation_is_refused() -> None:
    _, _, recorded = converse(dial(hello(1), 0, SECRET), acceptor(hello(0)))
    answerer = acceptor(hello(0))
    next(answerer)
    answerer.send(recorded[0])
    with pytest.raises(RefusedError) as refused:
        answerer.send(recorded[2])
    assert refused.value.reason == "secret"

    dialler = dial(hello(1), 0, SECRET)
    next(dialler)
    dialler.send(recorded[1])
    with pytest.raises(RefusedError, match="does not know"):
        dialler.send(recorded[3])


def test_what_a_rank_said_can_not_be_reflected_to_it() -> None:
    """An attacker without the secret opens a link to rank 0 and lets rank 0's own words work for it."""
    first = acceptor(hello(0))
    next(first)
    theirs = hello(1).to_bytes(b"x" * 16)
    own = first.send(theirs)
    assert refusal(acceptor(hello(0)), own).reason == "rank"
    assert refusal(dial(hello(1), 0, SECRET), hello(1).to_bytes(b"y" * 16)).reason == "rank"

    dialler = dial(hello(1), 0, SECRET)
    said = next(dialler)
    proof = unpack(dialler.send(hello(0).to_bytes(b"z" * 16)))["proof"]
    with pytest.raises(RefusedError, match="does not know"):
        dialler.send(pack({"proof": proof}, MAX_HELLO_BYTES))
    assert said


def test_every_changed_byte_of_the_first_message_breaks_the_proof() -> None:
    """The acceptor sees another hello than the dialler sent, for example another contract."""
    answerer, dialler = acceptor(hello(0)), dial(hello(1), 0, SECRET)
    next(answerer)
    tampered = next(dialler).replace(b"\xa5order\xa4rank", b"\xa5order\xa4tree")
    proof = dialler.send(answerer.send(tampered))
    with pytest.raises(RefusedError) as refused:
        answerer.send(proof)
    assert refused.value.reason == "secret"


def test_a_duplicate_is_refused_before_the_proof() -> None:
    answerer, dialler = (
        acceptor(hello(0), admit=lambda theirs: f"rank {theirs.rank} is there already"),
        dial(hello(1), 0, SECRET),
    )
    next(answerer)
    with pytest.raises(RefusedError, match="rank 1 is there already") as refused:
        answerer.send(next(dialler))
    assert refused.value.reason == "duplicate"


def test_of_two_links_that_prove_themselves_at_once_one_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    """A slow peer dials a second address of ours beside the first. If we kept both, it might use the one we closed."""

    caplog.set_level(logging.DEBUG)
    tasks, greeted = Tasks(), Greeted(hello(0), SECRET, {(1, "data")})
    acceptor = Acceptor(greeted, [(1, "data")], tasks)
    pairs = [socket.socketpair() for _ in range(2)]
    for ours, theirs in pairs:
        ours.settimeout(10)
        theirs.setblocking(False)
        tasks.start(acceptor.greet(theirs, "test"))
    diallers = [dial(hello(1), 0, SECRET) for _ in pairs]
    for (ours, _), dialler in zip(pairs, diallers, strict=True):
        ours.sendall(framed(next(dialler)))
    tasks.turn(time.monotonic() + 1)
    proofs = [dialler.send(read_message(ours)) for (ours, _), dialler in zip(pairs, diallers, strict=True)]
    for (ours, _), proof in zip(pairs, proofs, strict=True):
        ours.sendall(framed(proof))
    tasks.turn(time.monotonic() + 1)  # both in one turn
    verdicts = []
    for (ours, _), dialler in zip(pairs, diallers, strict=True):
        try:
            dialler.send(read_message(ours))
        except (StopIteration, RefusedError) as exc:
            verdicts.append(type(exc))
    assert sorted(verdicts, key=str) == sorted([StopIteration, RefusedError], key=str)
    kept = pairs[verdicts.index(StopIteration)][1]
    assert greeted.sockets == {(1, "data"): kept}
    assert kept.fileno() >= 0
    for pair in pairs:
        for sock in pair:
            sock.close()
    dropped = [r.levelno for r in caplog.records if "dropped a caller" in r.getMessage()]
    assert dropped == [logging.DEBUG], "a second attempt of the same start is no news"


def test_a_machine_of_another_byte_order_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the store where there is one, and in the hello of a static ring."""
    from hostring.group.config import Config
    from hostring.group.start import Start

    with contextlib.ExitStack() as undo:
        ours = Start(Config(world_size=2), {"order": "rank"}, undo).contract
        monkeypatch.setattr("sys.byteorder", {"little": "big", "big": "little"}[sys.byteorder])
        theirs = Start(Config(world_size=2, rank=1), {"order": "rank"}, undo).contract
    by_a, by_d, _ = converse(dial(hello(1, contract=theirs), 0, SECRET), acceptor(hello(0, contract=ours)))
    expected = r"rank 0 has byte_order='\w+', rank 1 has byte_order='\w+'; numbers travel as they lie in memory"
    with pytest.raises(HandshakeError, match=expected):
        compare_contracts(0, by_d.contract, 1, by_a.contract)
    little = Entry(0, 2, bytes(16), "tcp", ours, INFO)
    with pytest.raises(HandshakeError, match=expected):
        Roster("world", b"", little, [little, replace(little, rank=1, contract=theirs)]).check()


def test_another_rank_than_the_dialled_one_is_refused() -> None:
    assert refusal(dial(hello(1), 0, SECRET), hello(2).to_bytes(b"n" * 16)).reason == "rank"
    assert refusal(dial(hello(1), 0, SECRET), hello(0, kind="control").to_bytes(b"n" * 16)).reason == "rank"


def test_contracts_that_differ_name_the_key_and_both_values() -> None:
    compare_contracts(0, {"order": "rank", "wire": "f32"}, 1, {"wire": "f32", "order": "rank"})
    with pytest.raises(HandshakeError, match=r"rank 0 has order='rank', rank 1 has order='tree'"):
        compare_contracts(0, {"order": "rank"}, 1, {"order": "tree"})
    with pytest.raises(HandshakeError, match=r"rank 2 has model=None, rank 1 has model='abc'"):
        compare_contracts(2, {}, 1, {"model": "abc"})


def test_a_contract_that_does_not_fit_is_an_error_here_and_not_there() -> None:
    with pytest.raises(ValueError, match=f"over the limit of {MAX_HELLO_BYTES}"):
        hello(0, contract={"order": "x" * MAX_HELLO_BYTES}).to_bytes(b"n" * 16)


def test_a_host_of_many_cores_fits() -> None:
    crowded = PeerInfo(**{**vars(INFO), "cores": list(range(0, 512, 2)), "hostname": "h" * 64})
    data = hello(1, info=crowded).to_bytes(b"n" * 16)
    assert len(data) <= MAX_HELLO_BYTES
    assert PeerInfo.from_dict(unpack(data)["info"]).cores == crowded.cores


@settings(max_examples=300)
@given(st.binary(max_size=400))
def test_junk_never_gets_past_the_first_message(junk: bytes) -> None:
    for protocol in (acceptor(hello(0)), dial(hello(1), 0, SECRET)):
        assert refusal(protocol, junk).reason in ("junk", "version")


@settings(max_examples=300)
@given(st.data())
def test_mutated_hellos_are_refused_or_fail_their_proof(data: st.DataObject) -> None:
    good = bytearray(hello(1).to_bytes(b"n" * 16))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] ^= data.draw(st.integers(1, 255))
    answerer = acceptor(hello(0))
    next(answerer)

    def attempt() -> None:
        own = answerer.send(bytes(good))
        answerer.send(pack({"proof": prove(SECRET, "dialer", hello(1).to_bytes(b"n" * 16), own)}, MAX_HELLO_BYTES))

    with pytest.raises(RefusedError):
        attempt()


@settings(max_examples=200)
@given(VALUES)
def test_any_msgpack_value_as_a_description_of_a_rank_is_read_or_refused(value: Any) -> None:
    wire = {**INFO.to_dict(), **(value if isinstance(value, dict) else {"cores": value})}
    try:
        read = PeerInfo.from_dict(msgpack.unpackb(msgpack.packb(wire), strict_map_key=False))
    except ValueError:
        return
    assert read.hostname == wire["hostname"]
