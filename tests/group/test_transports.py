from __future__ import annotations

import errno
import mmap
import os
import socket
import stat
from collections.abc import Callable, Iterator

import link_contract
import link_ends
import pytest
from link_ends import LEFT, RIGHT, Pair, noise, receive

from hostring.errors import PeerLostError
from hostring.transports import memory, tcp, unix


def tcp_pair(host: str) -> Pair:
    listener = tcp.listen_at(host, 0)
    listener.setblocking(True)
    dialled = socket.create_connection(listener.getsockname()[:2], timeout=5)
    accepted, _ = listener.accept()
    listener.close()
    return tcp.wrap(dialled, RIGHT), tcp.wrap(accepted, LEFT)


def unix_pair() -> Pair:
    listener, path = unix.listen_at_new_path()
    listener.setblocking(True)
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dialled.connect(path)
    accepted, _ = listener.accept()
    listener.close()
    unix.remove(path)
    return unix.wrap(dialled, RIGHT), unix.wrap(accepted, LEFT)


def memory_pair() -> Pair:
    return memory.pair(LEFT, RIGHT, capacity=100_003)


MAKERS: dict[str, Callable[[], Pair]] = {
    "tcp4": lambda: tcp_pair("127.0.0.1"),
    "tcp6": lambda: tcp_pair("::1"),
    "unix": unix_pair,
    "memory": memory_pair,
}


@pytest.fixture(params=MAKERS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ends = MAKERS[request.param]()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("check", link_contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_link_contract(pair: Pair, check: Callable[[Pair], None]) -> None:
    check(pair)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_closed_or_dropped_pair_leaves_no_descriptor(make: Callable[[], Pair]) -> None:
    make()[0].close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for end in make():
            end.close()
        make()
        make()[0].abort()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tcp_links_send_at_once_and_notice_dead_hosts() -> None:
    left, right = tcp_pair("127.0.0.1")
    sock = left._sock
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle, interval, probes = (sock.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    assert idle + interval * probes == 30
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0, (
        "it kills links to live peers that are late to read"
    )
    assert not sock.getblocking()
    left.close()
    right.close()


class PickySocket:
    """Refuses, as macOS does, more than a limit in one call; stands in for a kernel that we don't have."""

    def __init__(self, sock: socket.socket, limit: int) -> None:
        self._sock, self.limit = sock, limit
        self.family = sock.family

    def __getattr__(self, name: str) -> object:
        return getattr(self._sock, name)

    def sendmsg(self, buffers: list[memoryview]) -> int:
        if sum(memoryview(b).nbytes for b in buffers) > self.limit or len(buffers) > 512:
            raise OSError(errno.EINVAL, "Invalid argument")
        return self._sock.sendmsg(buffers)

    def recv_into(self, view: memoryview) -> int:
        if memoryview(view).nbytes > self.limit:
            raise OSError(errno.EINVAL, "Invalid argument")
        return self._sock.recv_into(view)

    def recvmsg_into(self, views: list[memoryview]) -> tuple[int, object, object, object]:
        if sum(memoryview(v).nbytes for v in views) > self.limit or len(views) > 512:
            raise OSError(errno.EMSGSIZE, "Message too long")
        return self._sock.recvmsg_into(views)


def test_calls_that_are_too_large_for_the_kernel_are_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_CALL_BYTES", 1000)
    ours, theirs = socket.socketpair()
    link, other = tcp.SocketLink(PickySocket(ours, 1000), RIGHT), tcp.SocketLink(PickySocket(theirs, 1000), LEFT)  # type: ignore[arg-type]
    data = noise(3000)
    assert link.send([data[:1], b"", data[1:]]) == 1000
    got = bytearray(5000)
    assert other.recv_into(got) == 1000
    assert got[:1000] == data[:1000]
    many = [data[i : i + 1] for i in range(700)]
    assert link.send(many) == 512
    assert other.recv_into_all([memoryview(got)[:400], memoryview(got)[400:]]) == 512
    assert got[:512] == data[:512]
    assert other.recv_into(bytearray(2000)) == 0
    link.close()
    with pytest.raises(PeerLostError, match=f"rank {LEFT} is lost: connection closed"):
        other.recv_into(bytearray(2000))
    other.close()


def test_more_than_two_gigabytes_may_be_offered_at_once() -> None:
    left, right = tcp_pair("127.0.0.1")
    untouched = mmap.mmap(-1, (1 << 31) + 4096)  # pages that nobody touches cost nothing
    with untouched, memoryview(untouched) as huge:
        sent = left.send([b"abc", huge])
        assert 3 < sent < 1 << 31
        assert receive(right, sent) == b"abc" + bytes(sent - 3)
        assert left.send([b"def"]) == 3
        link_ends.until(lambda: right.recv_into(huge) == 3, "three bytes into a view of more than 2 GiB")
        assert huge[:4] == b"def\0"
    left.close()
    right.close()


def test_unix_sockets_are_for_this_user_alone_and_fit_the_path_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    deep = os.path.join(str(tmp_path), "d" * 120)
    os.mkdir(deep)
    monkeypatch.setattr("tempfile.tempdir", deep)
    listener, path = unix.listen_at_new_path()
    folder = os.path.dirname(path)
    assert len(os.fsencode(path)) <= 100
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    listener.close()
    unix.remove(path)
    assert not os.path.exists(folder)
    assert os.listdir(deep) == []


def test_memory_ends_meet_under_their_key_in_any_order() -> None:
    first = memory.meet("group", 0, 1)
    other_key = memory.meet("another", 1, 0)
    second = memory.meet("group", 1, 0)
    assert (first.peer, second.peer) == (1, 0)
    assert second.send([b"hello"]) == 5
    assert receive(first, 5) == b"hello"
    assert other_key.recv_into(bytearray(1)) == 0
    memory.forget("another", 1)
    with pytest.raises(PeerLostError, match="rank 0 is lost"):
        other_key.recv_into(bytearray(1))
    assert not memory._left
    for link in (first, second, other_key):
        link.close()


def test_memory_takes_exactly_its_capacity() -> None:
    left, right = memory.pair(LEFT, RIGHT, capacity=10)
    assert left.send([b"0123456", b"789abc"]) == 10
    assert left.send([b"x"]) == 0
    assert receive(right, 4) == b"0123"
    assert left.send([b"ABCDEFGH"]) == 4
    assert receive(right, 10) == b"456789ABCD"
    left.close()
    right.close()
