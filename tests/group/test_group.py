"""A group has the links that it should, closes them all, and makes sub-groups of itself."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest
from forming import CONTRACT, KINDS, close_all, configs, everyone, form, hosted, left_behind, next_one, talk
from ranks import free_port, side_by_side

from hostring.errors import PeerLostError
from hostring.group.config import Config
from hostring.group.group import Group, connect
from hostring.rendezvous import MemoryStore
from hostring.transports.addresses import is_loopback

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix", "auto"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_pair_is_linked(transport: str, world_size: int) -> None:
    groups = form(configs(world_size, transport))
    others = [set(range(world_size)) - {r} for r in range(world_size)]
    for r, group in enumerate(groups):
        assert isinstance(group, Group), group
        assert (group.rank, group.world_size, group.name) == (r, world_size, "world")
        for kind in KINDS:
            assert set(getattr(group, kind)) == others[r]
        assert len(group.links) == 3 * (world_size - 1)
        assert [m.pid for m in group.peer_infos] == [os.getpid()] * world_size
        assert group.peer_infos[r].cores == sorted(os.sched_getaffinity(0))
    assert len({group.epoch for group in groups}) == 1
    assert len({group.secret for group in groups}) == 1
    assert groups[0].secret not in repr(groups[0]).encode()
    talk(groups)
    close_all(groups)


@pytest.mark.parametrize("transport", ["memory", "tcp"])
def test_data_links_lead_to_neighbours_only_and_are_symmetric(transport: str) -> None:
    groups = form(configs(5, transport), neighbours=next_one)
    for r, group in enumerate(groups):
        assert set(group.data) == {(r + 1) % 5, (r - 1) % 5}
        assert set(group.control) == set(group.p2p) == set(range(5)) - {r}
    talk(groups)
    close_all(groups)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_rank_0_hosts_the_store(world_size: int, host: str) -> None:
    groups = form(hosted(world_size, host))
    talk(groups)
    groups[1].store.set("still", b"there")
    assert groups[0].store.get("still", 1.0) == b"there"
    assert all(is_loopback(address) for group in groups for address in group.hosts)
    close_all(groups)


def test_a_world_of_one_needs_nobody() -> None:
    group = connect(Config(), neighbours=everyone, contract=CONTRACT)
    assert (group.rank, group.world_size, group.links, group.store) == (0, 1, [], None)
    assert group.peer_infos[0].pid == os.getpid()
    group.close()


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_init_and_close_twenty_times_on_one_port(transport: str) -> None:
    """Ranks drift apart: each closes and starts again while others still hold the old group or the old store."""
    port = free_port()

    def rank(r: int) -> list[int]:
        epochs = []
        for i in range(20):
            config = Config(
                rank=r, world_size=3, transport=transport, timeout=30.0, store_host="127.0.0.1", store_port=port
            )
            group = connect(config, neighbours=everyone, contract=CONTRACT)
            epochs.append(group.epoch)
            assert set(group.data) == {0, 1, 2} - {r}
            time.sleep(0.001 * ((5 * r + 3 * i) % 7))
            group.close()
        return epochs

    close_all(form(hosted(2)))  # what a process opens once stays open
    before = left_behind()
    epochs = side_by_side([lambda r=r: rank(r) for r in range(3)])
    assert epochs[0] == epochs[1] == epochs[2]
    assert len(set(epochs[0])) == 20
    assert left_behind() == before


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_subgroups_have_links_of_their_own(transport: str) -> None:
    groups = form(configs(5, transport))
    colours = {0: [0, 3], 1: [4, 1, 2]}
    board = MemoryStore()

    def split(r: int) -> Group:
        [(colour, members)] = [(c, ms) for c, ms in colours.items() if r in ms]

        def gather(payload: bytes) -> list[bytes]:
            board.set(f"{colour}/{r}", payload)
            return [board.get(f"{colour}/{m}", 10.0) for m in members]

        return groups[r].subgroup(str(colour), members, neighbours=everyone, contract=CONTRACT, exchange=gather)

    parts = side_by_side([lambda r=r: split(r) for r in range(5)])
    for r, part in enumerate(parts):
        assert isinstance(part, Group), part
        assert part.world_size == len(colours[0 if r in colours[0] else 1])
        assert part.name == f"world/{0 if r in colours[0] else 1}"
        assert part.store is None
    assert (parts[4].rank, parts[1].rank, parts[2].rank) == (0, 1, 2)
    assert parts[0].epoch == parts[3].epoch != parts[1].epoch
    talk(parts)
    talk(groups)
    close_all(parts)
    talk(groups)
    close_all(groups)


def test_a_subgroup_of_one_still_takes_part_in_the_gathering() -> None:
    groups = form(configs(2, "memory"))
    gathered: list[bytes] = []

    def gather(payload: bytes) -> list[bytes]:
        gathered.append(payload)
        return [payload]

    alone = groups[0].subgroup("solo", [0], neighbours=everyone, contract=CONTRACT, exchange=gather)
    assert (alone.world_size, alone.links, len(gathered)) == (1, [], 1)
    close_all([alone, *groups])


def test_closing_one_end_is_seen_at_the_other_and_closing_twice_is_fine() -> None:
    groups = form(configs(2))
    groups[0].control[1].send([b"bye"])
    groups[0].close()
    groups[0].close()
    got = bytearray(3)
    end = time.monotonic() + 10
    while not groups[1].control[0].recv_into(got) and time.monotonic() < end:
        time.sleep(0.001)
    assert got == b"bye"

    def read() -> None:
        while time.monotonic() < end:
            groups[1].control[0].recv_into(got)

    with pytest.raises(PeerLostError, match="rank 0 is lost"):
        read()
    groups[1].close()


def test_abort_reaches_every_link() -> None:
    groups = form(configs(3))
    groups[1].abort()
    for group in (groups[0], groups[2]):
        for kind in KINDS:
            link = getattr(group, kind)[1]
            end = time.monotonic() + 10

            def read(link: Any = link, end: float = end) -> None:
                while time.monotonic() < end:
                    link.recv_into(bytearray(1))

            with pytest.raises(PeerLostError, match="rank 1 is lost"):
                read()
    close_all(groups)


@pytest.mark.parametrize("transport", ["memory", "tcp", "unix"])
def test_nothing_is_left_after_close(transport: str) -> None:
    close_all(form(hosted(3, transport=transport)))
    before = left_behind()
    for _ in range(3):
        close_all(form(hosted(3, transport=transport)))
    assert left_behind() == before


def test_connecting_works_inside_a_running_event_loop() -> None:
    async def main() -> list[Any]:
        return form(configs(2))

    groups = asyncio.run(main())
    talk(groups)
    close_all(groups)

    async def directly() -> Group:
        two = hosted(2)
        other: list[Group] = []
        thread = threading.Thread(target=lambda: other.append(connect(two[1], neighbours=everyone, contract=CONTRACT)))
        thread.start()
        mine = connect(two[0], neighbours=everyone, contract=CONTRACT)  # blocks this loop, as a cell in a notebook does
        thread.join(10)
        close_all(other)
        return mine

    group = asyncio.run(directly())
    assert set(group.data) == {1}
    group.close()


def test_torch_store_brings_ranks_together() -> None:
    distributed = pytest.importorskip("torch.distributed")
    groups = form(configs(3, store=distributed.HashStore()))
    talk(groups)
    close_all(groups)
