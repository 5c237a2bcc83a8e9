"""Checks of this host and of a join token. Each says what was found and, where that is possible, what to change."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from hostring.group.host_info import cpu_quota, usable_cores
from hostring.launch.token import Token
from hostring.transports.addresses import (
    Interface,
    choose,
    hosts_to_bind,
    interfaces,
    is_loopback,
    join_address,
    resolve,
)

Verdict = Literal["ok", "look", "bad"]

ETHERNET_MTU: Final = 1500
LARGE_BUFFER_NBYTES: Final = 4 << 20  # a TCP buffer that can fill a fast or long link
_ADVISED_BUFFER_NBYTES: Final = 6 << 20
_GOOD_CONTROLS: Final = ("cubic", "bbr", "dctcp", "reno")
_IPV4 = "/proc/sys/net/ipv4"


@dataclass(frozen=True)
class Finding:
    """One check. "look" is something to think about, "bad" something that fails; `advice` says what to change."""

    verdict: Verdict
    what: str
    found: str
    advice: str = ""


def check_host(world_size: int | None = None) -> Iterator[Finding]:
    """Names, interfaces, cores and kernel settings of this host.

    Args:
        world_size: how many ranks are to run here; without it, cores are only counted.
    """
    there = interfaces()
    yield _own_name(there)
    for name in dict.fromkeys(interface.name for interface in there):
        yield _interface(name, there)
    yield _cores(world_size)
    control = _read(f"{_IPV4}/tcp_congestion_control")
    if control:
        yield _congestion_control(control, _read(f"{_IPV4}/tcp_available_congestion_control").split())
    for name in ("rmem", "wmem"):
        limits = _read(f"{_IPV4}/tcp_{name}").split()
        if limits:
            yield _buffer(name, limits)


def check_token(token: Token) -> Finding:
    """Whether a join token is still valid by this host's clock."""
    left = token.expires - time.time()
    where = ", ".join(join_address(*a) for a in token.addresses)
    if left <= 0:
        found = f"expired {-left:.0f} s ago by this clock; cluster at {where}"
        return Finding("bad", "join token", found, "set the clock, or ask for a new token")
    return Finding("ok", "join token", f"{token.world_size} ranks, {left:.0f} s left; cluster at {where}")


def _own_name(there: list[Interface]) -> Finding:
    name = socket.gethostname()
    addresses = resolve(name)
    outward = [host for host in hosts_to_bind(loopback=False, spec=None) if not is_loopback(host)] if there else []
    use = f"give other hosts MASTER_ADDR={outward[0]}" if outward else ""
    if not addresses:
        return Finding("look" if use else "ok", "own name", f"{name} can't be resolved", use)
    if all(is_loopback(a) for a in addresses):
        found = f"{name} is {', '.join(addresses)}: loopback, which other hosts can't reach"
        return Finding("look" if use else "ok", "own name", found, f"{use}, not this name" if use else "")
    return Finding("ok", "own name", f"{name} is {', '.join(addresses)}")


def _interface(name: str, there: list[Interface]) -> Finding:
    """All addresses of one interface. To leave it out is advised only where another one leads to other hosts."""
    hosts = [i.host for i in there if i.name == name]
    mtu = _read(f"/sys/class/net/{name}/mtu")
    found = f"{', '.join(hosts)}, MTU {mtu or 'unknown'}"
    if not mtu.isdigit() or int(mtu) >= ETHERNET_MTU or all(map(is_loopback, hosts)):
        return Finding("ok", f"interface {name}", found)
    try:
        rest = [i for i in choose(f"^{name}", there) if not is_loopback(i.host)]
    except ValueError:  # nothing would remain
        rest = []
    if not rest:
        return Finding(
            "ok", f"interface {name}", f"{found}: below Ethernet's {ETHERNET_MTU}, the only way to other hosts"
        )
    advice = f"if this is a tunnel, HOSTRING_INTERFACE=^{name} leaves it out; {rest[0].name} remains"
    return Finding("look", f"interface {name}", f"{found}: below Ethernet's {ETHERNET_MTU}", advice)


def _cores(world_size: int | None) -> Finding:
    cores, quota = usable_cores(), cpu_quota()
    limit = min(len(cores), quota) if quota is not None else len(cores)
    found = f"{len(cores)} usable" + (f", limited to {quota:g} by a control group" if quota is not None else "")
    if world_size is not None and world_size > limit:
        advice = f"start at most {max(1, int(limit))} here: ranks that share a core wait longer for each other"
        return Finding("look", "cores", f"{found} for {world_size} ranks", advice)
    return Finding("ok", "cores", found + ("" if world_size is None else f" for {world_size} ranks"))


def _congestion_control(control: str, available: list[str]) -> Finding:
    better = [name for name in _GOOD_CONTROLS if name in available]
    if control in _GOOD_CONTROLS or not better:
        return Finding("ok", "congestion control", control)
    advice = _sysctl("tcp_congestion_control", better[0], "suits a switched LAN")
    return Finding("look" if advice else "ok", "congestion control", control, advice)


def _buffer(name: str, limits: list[str]) -> Finding:
    found = f"{int(limits[-1]) >> 10} KiB"
    if int(limits[-1]) >= LARGE_BUFFER_NBYTES:
        return Finding("ok", f"largest TCP {name}", found)
    value = " ".join([*limits[:-1], str(_ADVISED_BUFFER_NBYTES)])
    advice = _sysctl(f"tcp_{name}", f"'{value}'", "lets large messages fill a fast or long link")
    return Finding("look" if advice else "ok", f"largest TCP {name}", found, advice)


def _sysctl(name: str, value: str, why: str) -> str:
    """The command that sets a kernel setting; empty where it can't be set, as in most containers."""
    try:
        fixed = os.statvfs(f"{_IPV4}/{name}").f_flag & os.ST_RDONLY
    except (OSError, AttributeError):
        return ""
    return "" if fixed else f"sysctl -w net.ipv4.{name}={value} {why}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
