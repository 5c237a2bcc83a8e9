"""Network addresses of this host: which are there, which to offer to other ranks, how to read one."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

Address = tuple[str, int]
"""(host, port); an IPv6 host may end in "%scope".

A host that starts with "/" is the path of a UNIX socket; one that starts with "@" names a UNIX socket without a file.
"""

_IFF_UP = 1
MAX_HOSTS = 16
"""Addresses that a rank offers."""

_OFTEN_LOCAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "tap")
"""Interfaces whose addresses other hosts often have too, or can't reach: offered last."""


@dataclass(frozen=True)
class Interface:
    """One numeric address of this host. IPv6 link-local ones carry their scope id ("fe80::1%eth0")."""

    name: str
    host: str


def split_address(text: str, port: int | None = None) -> Address:
    """Read "host:port", "[v6]:port", "host", "[v6]" or a bare IPv6 address; scope ids stay in the host.

    Args:
        text: the address.
        port: used when the text has none.

    Raises:
        ValueError: no port anywhere, or something that is not a port.
    """
    text = text.strip()
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an address: write [IPv6]:port")
        digits = rest[1:]
    elif text.count(":") > 1:
        host, digits = text, ""
    else:
        host, _, digits = text.partition(":")
    if not host:
        raise ValueError(f"{text!r} names no host")
    if not digits:
        if port is None:
            raise ValueError(f"{text!r} names no port")
        return host, port
    if not digits.isascii() or not digits.isdigit() or not 0 < int(digits) < 65536:
        raise ValueError(f"{text!r}: {digits!r} is not a port (1 to 65535)")
    return host, int(digits)


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def numeric(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` writes out, None for a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address, a name that always means one, or a UNIX socket without a file."""
    if host.startswith("@"):
        return True
    address = numeric(host)
    if address is not None:
        return address.is_loopback
    return host.lower().rstrip(".") in ("localhost", "ip6-localhost", "ip6-loopback") or host.lower().endswith(
        ".localhost"
    )


def is_here(host: str) -> bool:
    """Whether `host` is an address of this host."""
    if is_loopback(host):
        return True
    own = {i.host for i in interfaces()}
    return any(found in own or is_loopback(found) for found in resolve(host))


def resolve(host: str) -> list[str]:
    """All numeric addresses of `host`, in the system's order; empty when it has none.

    "localhost" always gives both loopback addresses, since hosts disagree on which of them it means.
    """
    if is_loopback(host) and numeric(host) is None:
        return ["127.0.0.1", "::1"]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = [
        f"{a[4][0]}%{a[4][3]}" if len(a[4]) == 4 and a[4][3] and "%" not in str(a[4][0]) else str(a[4][0])
        for a in found
    ]
    return list(dict.fromkeys(hosts))


def interfaces() -> list[Interface]:
    """Addresses of the interfaces that are up, IPv4 first."""
    import ifaddr  # takes 0.1 s, since it looks for the C library, and loopback needs none of this

    ipv4, ipv6 = [], []
    for adapter in ifaddr.get_adapters():
        name = adapter.nice_name.partition(":")[0]  # Linux calls a second address of eth0 "eth0:1"
        if not _is_up(name):
            continue
        for ip in adapter.ips:
            if isinstance(ip.ip, str):
                ipv4.append(Interface(name, ip.ip))
            else:
                host = ip.ip[0]
                ipv6.append(Interface(name, f"{host}%{name}" if host.startswith("fe80") else host))
    return [*ipv4, *ipv6] or [Interface("", host) for host in resolve(socket.gethostname())]


def choose(spec: str, there: Sequence[Interface]) -> list[Interface]:
    """Keep the interfaces that `spec` selects.

    Args:
        spec: items separated by commas. An item is an interface's name ("eth1"), the beginning of names when no
            interface has exactly that name ("en"), or a network ("10.1.0.0/16", "fd00::/8"). `^` before an item
            excludes what it matches, and applies to that item only. Without an item to include, all but the excluded
            remain.
        there: the host's.

    Raises:
        ValueError: an item to include matches nothing, or nothing remains.
    """
    items = [item.strip() for item in spec.split(",") if item.strip()]
    wanted = [item for item in items if not item.startswith("^")]
    chosen = list(there) if not wanted else []
    for item in wanted:
        matched = _matching(item, there)
        if not matched:
            have = ", ".join(f"{i.name} ({i.host})" for i in there)
            raise ValueError(f"HOSTRING_INTERFACE: {item!r} matches no interface of this host, which has {have}")
        chosen += [i for i in matched if i not in chosen]
    for item in items:
        if item.startswith("^"):
            unwanted = _matching(item[1:].strip(), there)
            chosen = [i for i in chosen if i not in unwanted]
    if not chosen:
        raise ValueError(f"HOSTRING_INTERFACE={spec!r} leaves no interface")
    return chosen


def _matching(item: str, there: Sequence[Interface]) -> list[Interface]:
    if "/" in item:
        try:
            network = ipaddress.ip_network(item, strict=False)
        except ValueError as exc:
            raise ValueError(f"HOSTRING_INTERFACE: {item!r} is not a network: {exc}") from exc
        return [i for i in there if (address := numeric(i.host)) is not None and address in network]
    exact = [i for i in there if i.name == item]
    return exact or [i for i in there if item and i.name.startswith(item)]


def hosts_to_bind(*, loopback: bool, spec: str | None, first: Sequence[str] = ()) -> list[str]:
    """Where a rank's listener waits, best address first.

    Args:
        loopback: the rendezvous is on loopback, so nobody else has to reach this rank.
        spec: see `choose`; overrides `loopback`.
        first: addresses of this host that are known to lead to the others, for example that of the socket which reached
            the rendezvous.
    """
    if loopback and not spec:
        return ["127.0.0.1", *(["::1"] if has_ipv6_loopback() else [])]
    there = interfaces()
    if spec:
        hosts = [i.host for i in choose(spec, there)]
    else:
        outward = [i for i in there if not is_loopback(i.host)]
        outward.sort(key=lambda i: (i.name.startswith(_OFTEN_LOCAL), "%" in i.host))
        known = {i.host for i in there}
        hosts = [h for h in first if not is_loopback(h) and (h in known or not known)] + [i.host for i in outward]
    ordered = [h for h in first if h in hosts] + hosts
    return list(dict.fromkeys(ordered))[:MAX_HOSTS] or ["127.0.0.1"]


def with_own_scopes(host: str) -> list[str]:
    """`host` as this host can dial it: a link-local address without a scope, once for each of its own interfaces."""
    address = numeric(host)
    if address is None or not address.is_link_local or address.version == 4 or "%" in host:
        return [host]
    return [f"{host}%{i.name}" for i in interfaces() if "%" in i.host]


def scope_id(scope: str) -> int:
    """The number of an IPv6 scope, which may be written as an interface's name."""
    if not scope:
        return 0
    return int(scope) if scope.isdigit() else socket.if_nametoindex(scope)


def beside(port: int) -> str:
    """The name of the UNIX socket beside a TCP listener; one that nobody can guess when the port is 0."""
    return f"@hostring-{port or os.urandom(8).hex()}"


def own_host(sock: socket.socket) -> str:
    """This end's address of a connected TCP socket, as `interfaces` would name it."""
    name = sock.getsockname()
    host = str(name[0]).partition("%")[0]
    mapped = numeric(host)
    if mapped is not None and mapped.version == 4:
        return str(mapped)
    return f"{host}%{socket.if_indextoname(name[3])}" if name[3] else host


def any_host() -> str:
    """What to bind for all addresses of this host."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def has_ipv6_loopback() -> bool:
    """Whether ::1 can be bound."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
        return True
    except OSError:
        return False


def route_to(host: str) -> str | None:
    """The address of this host from which packets to `host` leave. Sends nothing."""
    if is_loopback(host) and numeric(host) is not None:
        return host
    for target in resolve(host):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            return str(sock.getsockname()[0])
    return None


def _is_up(name: str) -> bool:
    """Whether an interface is up, as far as the system tells: ifaddr lists the addresses of those that are down too."""
    try:
        with open(f"/sys/class/net/{name}/flags", encoding="ascii") as file:
            return bool(int(file.read(), 16) & _IFF_UP)
    except (OSError, ValueError):
        return True
