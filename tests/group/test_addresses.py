"""Addresses and interfaces: how they are read, which are loopback, on which a rank listens."""

from __future__ import annotations

import pytest

from hostring.transports import addresses
from hostring.transports.addresses import Interface, choose, is_loopback, join_address, split_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:29500", ("::1", 29500)),
        ("[fe80::1%eth0]:2", ("fe80::1%eth0", 2)),
        ("fe80::1%eth0", ("fe80::1%eth0", 7)),
        ("::1", ("::1", 7)),
        ("[::1]", ("::1", 7)),
        ("host", ("host", 7)),
    ],
)
def test_addresses_are_read(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, 7) == expected
    assert split_address(join_address(*expected)) == expected


@pytest.mark.parametrize(
    "text", ["", ":5", "[]:5", "host:", "host:x", "host:0", "host:65536", "[::1]5", "[::1", "host:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|names no"):
        split_address(text)


def test_loopback_in_all_its_forms() -> None:
    assert all(
        map(
            is_loopback,
            ["127.0.0.1", "127.0.1.1", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1", "a.localhost"],
        )
    )
    assert not any(map(is_loopback, ["10.0.0.1", "fd00::1", "fe80::1%lo", "myhost", "0.0.0.0"]))
    assert addresses.resolve("localhost") == ["127.0.0.1", "::1"]
    assert addresses.resolve("no-such-host.invalid") == []


HOST = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5"),
    Interface("eth1", "192.168.77.1"),
    Interface("eth10", "172.16.0.1"),
    Interface("docker0", "172.17.0.1"),
    Interface("eth0", "fd00::5"),
]


@pytest.mark.parametrize(
    ("spec", "hosts"),
    [
        ("eth1", ["192.168.77.1"]),
        ("eth0", ["10.0.0.5", "fd00::5"]),
        ("eth", ["10.0.0.5", "192.168.77.1", "172.16.0.1", "fd00::5"]),
        ("eth1, eth0", ["192.168.77.1", "10.0.0.5", "fd00::5"]),
        ("^lo,^docker", ["10.0.0.5", "192.168.77.1", "172.16.0.1", "fd00::5"]),
        ("eth,^eth10", ["10.0.0.5", "192.168.77.1", "fd00::5"]),
        ("192.168.0.0/16", ["192.168.77.1"]),
        ("^172.16.0.0/12,^lo", ["10.0.0.5", "192.168.77.1", "fd00::5"]),
        ("fd00::/8", ["fd00::5"]),
        ("^nothing", [i.host for i in HOST]),
    ],
)
def test_interfaces_are_included_and_excluded(spec: str, hosts: list[str]) -> None:
    assert [i.host for i in choose(spec, HOST)] == hosts


@pytest.mark.parametrize(
    ("spec", "message"),
    [("ib0", "'ib0' matches no interface.*eth0"), ("^lo,^eth,^docker", "leaves no"), ("1.2.3.4/99", "not a network")],
)
def test_interface_choices_that_leave_nothing_say_what_is_there(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(spec, HOST)


def test_addresses_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "interfaces", lambda: HOST)
    assert addresses.hosts_to_bind(loopback=True, spec=None)[0] == "127.0.0.1"
    by_route = addresses.hosts_to_bind(loopback=False, spec=None, first=["192.168.77.1"])
    assert by_route == ["192.168.77.1", "10.0.0.5", "172.16.0.1", "fd00::5", "172.17.0.1"]
    assert addresses.hosts_to_bind(loopback=False, spec=None, first=["127.0.1.1"])[0] == "10.0.0.5"
    assert addresses.hosts_to_bind(loopback=True, spec="eth1") == ["192.168.77.1"]


def test_this_hosts_interfaces_include_loopback() -> None:
    assert "127.0.0.1" in [i.host for i in addresses.interfaces()]
