"""Control frames: what is one, what a rank makes of each, and who is blamed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from feed import Feed

from hostring.arrays.dtypes import CODES
from hostring.engine.control import Control
from hostring.engine.control_link import MAX_FRAME_NBYTES, ControlLink
from hostring.engine.frames import Call
from hostring.engine.waits import State, Waiting, mismatch, odd_one_out
from hostring.errors import CollectiveMismatch, PeerLostError, ProtocolError

HEARD = [(-1, 1)]  # what a poll returns when bytes have come from a `Feed`


def frame(body: Any, nbytes: int | None = None, magic: bytes = b"hCtl") -> bytes:
    packed = msgpack.packb(body)
    return magic + (len(packed) if nbytes is None else nbytes).to_bytes(4, "little") + packed


def waiting(n_elements: int, seq: int, peer: int = 1) -> Waiting:
    return Waiting(peer, "all_reduce", Call("all_reduce", "sum", CODES[np.dtype(np.float32)], "rank", n_elements), seq)


def test_frames_arrive_whole_and_in_order() -> None:
    bodies: list[Any] = []
    feed = Feed(frame({"what": "probe"}) + frame({"what": "farewell"}) + frame({"what": "probe"})[:-1])
    assert ControlLink(feed).read(bodies.append)
    assert bodies == [{"what": "probe"}, {"what": "farewell"}]


def test_a_rank_that_reads_again_after_very_long_gets_frames_again() -> None:
    """Frames that were kept and the next one, whole ones only; those that had no place in between are left out."""
    feed = Feed(room=10)
    link = ControlLink(feed)
    told = [{"what": "state", "number": number, "rest": bytes(20000)} for number in range(6)]
    for body in told:
        link.tell(body)
    assert len(feed.sent) == 10
    feed.room = 1 << 30
    link.tell({"what": "probe"})
    heard: list[Any] = []
    assert ControlLink(Feed(bytes(feed.sent))).read(heard.append)
    assert heard == [*told[:4], {"what": "probe"}]


@pytest.mark.parametrize(
    "data",
    [
        frame({"what": "probe"}, magic=b"hRng"),
        frame({"what": "probe"}, nbytes=MAX_FRAME_NBYTES + 1),  # of which the rest would be waited for
        frame({"what": "probe"}, nbytes=0xFFFFFFFF),
        b"hCtl\1\0\0\0\xc1",
        frame(["what"]),
        frame({"what": "state", "waits_for": 1, "seq": 1}),
        frame({"what": "state", "waits_for": 1, "seq": 1, "header": b"abc"}),
        frame({"what": "state", "waits_for": 1, "seq": 1, "header": bytes(64)}),
        frame({"what": "state", "waits_for": None, "seq": 1, "header": b""}),
    ],
)
def test_nonsense_is_an_error_that_names_the_sender(data: bytes) -> None:
    control = Control(0, {1: Feed(data)})
    with pytest.raises(ProtocolError, match="rank 1 sent bytes on its control link that are no control frame"):
        control.hear(HEARD)


def test_what_a_rank_that_does_not_read_is_told_has_a_limit() -> None:
    feed = Feed(room=0)
    link = ControlLink(feed)
    for _ in range(20_000):
        link.tell({"what": "probe"})
    feed.room = 1 << 30
    link.tell({"what": "probe"})
    assert len(feed.sent) < 2 * MAX_FRAME_NBYTES


def test_a_rank_that_said_farewell_has_not_died() -> None:
    for said, dies in ((b"", True), (frame({"what": "farewell"}), False)):
        control = Control(0, {1: Feed(said)})
        control.hear(HEARD)
        assert control.alive() == 0
        if dies:
            with pytest.raises(PeerLostError, match="rank 1 is lost"):
                control.hear([])
        else:
            control.hear([])


def test_the_first_cause_is_raised() -> None:
    words = {"what": "abort", "kind": "PeerLostError", "message": "connection closed", "rank": 3}
    control = Control(0, {1: Feed(frame(words) + frame({**words, "rank": 2}))})
    with pytest.raises(PeerLostError, match=r"rank 3 is lost: connection closed \(reported by rank 1\)"):
        control.hear(HEARD)


def test_sleepers_in_different_calls_of_one_number_are_a_mismatch() -> None:
    mine = waiting(10, seq=5)
    for other, differs in ((waiting(11, seq=5), True), (waiting(11, seq=6), False), (waiting(10, seq=5), False)):
        state = State.of(other.to_body())
        assert (mismatch(mine, state, 1) is not None) == differs
        control = Control(0, {1: Feed(frame(other.to_body()))})
        control.waiting = mine
        if differs:
            with pytest.raises(CollectiveMismatch, match=r"of 10 elements.*rank 1 calls .*of 11 elements"):
                control.hear(HEARD)
        else:
            control.hear(HEARD)


def test_a_message_is_no_call_that_could_differ() -> None:
    assert mismatch(Waiting(1, "recv"), State.of(Waiting(0, "recv").to_body()), 1) is None
    assert mismatch(waiting(10, seq=5), State.of(Waiting(0, "recv").to_body()), 1) is None


def test_the_odd_one_out_is_named_once_no_unknown_rank_can_change_it() -> None:
    usual, odd = (waiting(n, seq=5).header() for n in (10, 11))
    assert odd_one_out({0: usual, 1: usual, 2: usual}, 3) is None
    assert odd_one_out({0: usual, 1: odd}, 2) is None, "one against one"
    assert odd_one_out({0: usual, 1: odd, 2: usual}, 4) is None, "rank 3 may call what rank 1 calls"
    for world_size, calls in ((3, {0: usual, 1: odd, 2: usual}), (5, {0: usual, 1: odd, 2: usual, 4: usual})):
        found = odd_one_out(calls, world_size)
        assert found is not None
        assert found.rank == 1
        assert "rank 1 calls all_reduce #5 of 11 elements" in str(found)


# ------------------------------------------------------------------ who waits for whom


class SocketLink:
    """A control link over one end of a pair of sockets."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.peer, self._sock = peer, sock
        sock.setblocking(False)

    def send(self, buffers: Any) -> int:
        return self._sock.send(b"".join(buffers))

    def recv_into(self, view: Any) -> int:
        try:
            return self._sock.recv_into(view)
        except BlockingIOError:
            return 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def arm(self, recv: bool, send: bool) -> int:
        return 1


@pytest.fixture
def ask() -> Iterator[Callable[[dict[int, int | None], int], int]]:
    """`ask(waits, first)`: whom rank 0 blames, which waits for `first`, when others answer as `waits` says."""
    socks: list[socket.socket] = []
    over = threading.Event()

    def answer(sock: socket.socket, waits_for: int) -> None:
        sock.settimeout(0.05)
        while not over.is_set():
            try:
                if sock.recv(1000):
                    sock.sendall(frame(Waiting(waits_for, "all_reduce").to_body()))
            except TimeoutError:
                continue
            except OSError:
                return

    def culprit(waits: dict[int, int | None], first: int) -> int:
        links = {}
        for peer, waits_for in waits.items():
            ours, theirs = socket.socketpair()
            socks.extend((ours, theirs))
            links[peer] = SocketLink(ours, peer)
            if waits_for is not None:
                threading.Thread(target=answer, args=(theirs, waits_for), daemon=True).start()
        return Control(0, links).culprit(first)  # type: ignore[arg-type]

    yield culprit
    over.set()
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("waits", "blamed"),
    [
        ({1: None, 2: None, 3: None}, 1),  # rank 1 does not answer
        ({1: 2, 2: None, 3: None}, 2),
        ({1: 2, 2: 3, 3: None}, 3),
        ({1: 2, 2: 3, 3: -1}, 3),  # rank 3 waits for nobody
        ({1: 0, 2: None, 3: None}, 1),  # rank 1 waits for this rank, which waits for it
        ({1: 2, 2: 1, 3: None}, 2),  # a circle that this rank is not in
        ({1: 2, 2: 3, 3: 1}, 3),
    ],
)
def test_the_culprit_is_at_the_end_of_the_chain(ask: Any, waits: dict[int, int | None], blamed: int) -> None:
    assert ask(waits, 1) == blamed
