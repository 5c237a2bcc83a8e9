"""A cluster whose head has another address than its token says."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hostring.errors import RendezvousError
from hostring.launch import discovery
from hostring.launch.cluster import Cluster
from hostring.launch.discovery import found, name_of
from hostring.launch.joining import join
from hostring.launch.token import Token


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    opened = Cluster(2, name="head", hosts=["127.0.0.1"])
    yield opened
    opened.close()


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def moved(token: Token, port: int) -> Token:
    return replace(token, addresses=(("127.0.0.1", port),))


def test_a_head_that_has_moved_is_found(cluster: Cluster, nobody: int) -> None:
    place = join(moved(cluster.token, nobody), "worker", timeout=1.0)
    assert (place.address, place.rank) == (cluster.token.addresses[0], 1)


def test_another_cluster_is_not_taken_for_this_one(
    cluster: Cluster, nobody: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.5)
    other = replace(moved(cluster.token, nobody), secret=b"x" * 16)
    assert found(other.secret) == []
    with pytest.raises(RendezvousError, match="nobody announces this cluster"):
        join(other, "worker", timeout=1.0)


def test_the_name_on_the_network_tells_nothing_of_the_secret(cluster: Cluster) -> None:
    name, secret = name_of(cluster.token.secret), cluster.token.secret.hex()
    assert not any(secret[n : n + 6] in name for n in range(len(secret) - 5))


def test_without_zeroconf_the_addresses_of_the_token_are_tried(nobody: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    opened = Cluster(2, name="head", hosts=["127.0.0.1"])
    try:
        assert found(opened.token.secret) == []
        with pytest.raises(RendezvousError, match="nobody answers"):
            join(moved(opened.token, nobody), "worker", timeout=1.0)
        assert join(opened.token, "worker").rank == 1
    finally:
        opened.close()
