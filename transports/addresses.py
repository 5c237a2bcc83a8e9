"""Network addresses of this host: which are there, which to offer to other ranks, how to read one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

Address = tuple[str, int]
"""(host, port); an IPv6 host may end in "%scope"."""

_SIOCGIFCONF = 0x8912
_OFTEN_LOCAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "tap")
"""Interfaces whose addresses other hosts often have too, or can't reach: offered last."""


@dataclass(frozen=True)
class Interface:
    """One numeric address of this host. IPv6 link-local ones carry their scope id ("fe80::1%eth0")."""

    name: str
    host: str


def split_address(text: str, port: int | None = None) -> tuple[str, int]:
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
    """Whether `host` is a loopback address, a name that always means one, or a UNIX socket that is seen where loopback is."""
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
    own = {i.host for i in interfaces()}
    return is_loopback(host) or any(found in own or is_loopback(found) for found in resolve(host))


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
    found = [*_ipv4(), *_ipv6()]
    if not found:  # a system without either table: what its own name resolves to
        found = [Interface("", host) for host in resolve(socket.gethostname())]
    return found


def choose(spec: str, there: Sequence[Interface]) -> list[Interface]:
    """Keep the interfaces that `spec` selects.

    Args:
        spec: items separated by commas. An item is an interface's name ("eth1"), the beginning of names when no
            interface has exactly that name ("en"), or a network ("10.1.0.0/16", "fd00::/8"). `^` before an item excludes
            what it matches, and applies to that item only. Without an item to include, all but the excluded remain.
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
    there = interfaces()
    if spec:
        hosts = [i.host for i in choose(spec, there)]
    elif loopback:
        return ["127.0.0.1", *(["::1"] if has_ipv6_loopback() else [])]
    else:
        outward = [i for i in there if not is_loopback(i.host)]
        outward.sort(key=lambda i: (i.name.startswith(_OFTEN_LOCAL), "%" in i.host))
        known = {i.host for i in there}
        hosts = [h for h in first if not is_loopback(h) and (h in known or not known)] + [i.host for i in outward]
    ordered = [h for h in first if h in hosts] + hosts
    return list(dict.fromkeys(ordered))[:16] or ["127.0.0.1"]


def listen(host: str, port: int, backlog: int = 1024) -> socket.socket:
    """A non-blocking listening socket on one numeric address ("::" takes IPv4 as well); port 0 picks a free one."""
    bare, _, scope = host.partition("%")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":  # there it would let a second process take the port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if bare == "::" else 1)
        sock.bind((bare, port, 0, scope_id(scope)) if family == socket.AF_INET6 else (bare, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def scope_id(scope: str) -> int:
    """The number of an IPv6 scope, which may be written as an interface's name."""
    if not scope:
        return 0
    return int(scope) if scope.isdigit() else socket.if_nametoindex(scope)


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
    for target in resolve(host):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            return str(sock.getsockname()[0])
    return None


def _ipv4() -> list[Interface]:
    if sys.platform != "linux":
        return []
    import array
    import fcntl

    entry = struct.calcsize("16sH2x4s16x")
    room = array.array("B", bytes(entry * 256))
    address, _ = room.buffer_info()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFCONF, struct.pack("iP", len(room), address))
    except OSError:
        return []
    nbytes = struct.unpack("iP", answer)[0]
    table = room.tobytes()
    found = []
    for at in range(0, nbytes, entry):
        name, _, host = struct.unpack_from("16sH2x4s16x", table, at)
        found.append(Interface(name.split(b"\0")[0].decode().split(":")[0], socket.inet_ntoa(host)))
    return found


def _ipv6() -> list[Interface]:
    found = []
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            for line in file:
                digits, _, _, _, flags, name = line.split()
                if int(flags, 16) & 0x48:  # duplicate, or not yet known not to be one (tentative)
                    continue
                host = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                found.append(Interface(name, f"{host}%{name}" if host.startswith("fe80") else host))
    except (OSError, ValueError):
        return []
    return found
