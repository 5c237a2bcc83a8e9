"""Every kind of store keeps, counts and waits alike."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from at_a_store import SECRET, client, soon
from forming import CONTRACT, everyone
from ranks import free_port, side_by_side, successes

from hostring.errors import RendezvousError
from hostring.group.config import Config
from hostring.group.group import connect
from hostring.group.rendezvous import exchange
from hostring.rendezvous import MemoryStore, TorchStore
from hostring.store.server import StoreServer
from hostring.store.stores import Store
from hostring.transports.tcp import listen_at


@pytest.fixture(params=["memory", "tcp", "torch"])
def shared(request: pytest.FixtureRequest) -> Iterator[Callable[[], Store]]:
    """Gives views of one store, one for each rank."""
    with contextlib.ExitStack() as stack:
        if request.param == "memory":
            store = MemoryStore()
            yield lambda: store
        elif request.param == "tcp":
            running = StoreServer([listen_at("127.0.0.1", 0)], SECRET)
            stack.callback(running.close)

            def connect() -> Store:
                made = client(running)
                stack.callback(made.close)
                return made

            yield connect
        else:
            distributed = pytest.importorskip("torch.distributed")
            torch_store = distributed.HashStore()
            yield lambda: TorchStore(torch_store)


def test_a_store_keeps_what_it_was_given(shared: Callable[[], Store]) -> None:
    mine, theirs = shared(), shared()
    assert isinstance(mine, Store)
    assert not mine.check(["a"])
    mine.set("a", b"\0\xff bytes")
    theirs.set("b", b"")
    assert theirs.get("a", 5.0) == b"\0\xff bytes"
    assert mine.get("b", 5.0) == b""
    assert mine.check(["a", "b"])
    assert not mine.check(["a", "c"])
    mine.set("a", b"new")
    assert theirs.get("a", 0.0) == b"new"
    mine.delete("a")
    mine.delete("never there")
    assert not theirs.check(["a"])
    mine.close()


def test_torch_stores_tell_the_way_to_them() -> None:
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wrapped = TorchStore(distributed.PrefixStore("a", distributed.PrefixStore("b", server)))
    assert wrapped.local_host == "127.0.0.1"
    assert TorchStore(distributed.HashStore()).local_host is None
    agent = TorchStore.agent("127.0.0.1", server.port, 2, 5.0)
    wrapped.set("key", b"\0value")
    with pytest.raises(TimeoutError):
        agent.get("key", 0.1)  # the prefix is part of the name
    agent.set("key", b"\xff")
    assert TorchStore(server).get("key", 1.0) == b"\xff"


def test_torchs_own_store_that_is_not_there_is_reported() -> None:
    pytest.importorskip("torch.distributed")
    with pytest.raises(RendezvousError, match=r"torchrun's store at 127\.0\.0\.1 port \d+ does not answer"):
        TorchStore.agent("127.0.0.1", free_port(), 2, 0.5)


def test_a_store_counts(shared: Callable[[], Store]) -> None:
    stores = [shared() for _ in range(4)]
    got = side_by_side([lambda store=store: [store.add("n", 1) for _ in range(25)] for store in stores])
    assert sorted(n for numbers in got for n in numbers) == list(range(1, 101))
    assert stores[0].add("n", -100) == 0
    assert stores[0].add("other", 5) == 5


def test_a_get_waits_for_a_set(shared: Callable[[], Store]) -> None:
    mine, theirs = shared(), shared()
    threading.Timer(0.2, theirs.set, ("late", b"here")).start()
    started = time.monotonic()
    assert mine.get("late", 10.0) == b"here"
    assert 0.1 < time.monotonic() - started < 5.0


def test_a_get_ends_at_its_timeout(shared: Callable[[], Store]) -> None:
    store = shared()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="'absent' is not in"):
        store.get("absent", 0.3)
    assert 0.2 < time.monotonic() - started < 3.0
    with pytest.raises(TimeoutError):
        store.get("absent", 0.0)


def test_all_ranks_get_all_payloads_again_and_again(shared: Callable[[], Store]) -> None:
    for generation in range(3):

        def rank(r: int, generation: int = generation) -> list[bytes]:
            time.sleep(0.02 * ((r + generation) % 3))
            return exchange(shared(), "group", r, 5, b"%d of %d" % (r, generation), soon())

        for got in side_by_side([lambda r=r: rank(r) for r in range(5)]):
            assert got == [b"%d of %d" % (r, generation) for r in range(5)]


def test_a_group_takes_few_round_trips_to_torchs_store() -> None:
    """Counted, since seconds depend on the machine: looks for what is not there yet are the only ones that vary."""
    distributed = pytest.importorskip("torch.distributed")
    shared = distributed.HashStore()
    calls: list[list[str]] = [[], [], []]

    class Counted:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __getattr__(self, name: str) -> Any:
            method = getattr(shared, name)
            calls[self.rank].append(name)
            return method

    def rank(r: int) -> None:
        config = Config(rank=r, world_size=3, transport="tcp", store=TorchStore(Counted(r)), timeout=20.0)
        connect(config, neighbours=everyone, contract=CONTRACT).close()

    successes(side_by_side([lambda r=r: rank(r) for r in range(3)]))
    for made in calls:
        assert [name for name in made if name not in ("check", "has_extended_api")] == ["add", "set", "multi_get"]
