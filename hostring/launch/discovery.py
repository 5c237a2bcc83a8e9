"""Finds the machine that opened a cluster when its addresses are no longer those of the token: it announces itself on
the local network (mDNS, by the package zeroconf).

Without that package, or where multicast is filtered, the token's addresses are all that is tried. Whoever answers must
still prove that it knows the token's secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hostring.transports.addresses import Address, hosts_to_bind

SERVICE = "_hostring._tcp.local."
LOOK_S = 3.0  # for an answer on the local network
_ANSWER_S = 1.0  # for the addresses of one name
_END_S = 0.5  # for saying that the cluster is gone; it goes on in the background

_log = logging.getLogger(__name__)


def name_of(secret: bytes) -> str:
    """How the cluster of a token is called on the network, which tells nothing of its secret."""
    return "hostring-" + hashlib.sha256(b"hostring cluster" + secret).hexdigest()[:24]


@contextlib.contextmanager
def announced(secret: bytes, addresses: Sequence[Address]) -> Iterator[None]:
    """Announce the store of a cluster until the block ends. Does not wait; a failure is logged: it is no condition."""
    try:
        from zeroconf import IPVersion, ServiceInfo, Zeroconf
    except ImportError:
        _log.info("hostring: this cluster is not announced; pip install 'hostring[discovery]' for that")
        yield
        return
    if not _with_ipv4(host for host, _ in addresses):
        yield
        return
    opened: list[Any] = []

    def announce() -> None:
        try:
            about = ServiceInfo(
                SERVICE,
                f"{name_of(secret)}.{SERVICE}",
                addresses=[_packed(host) for host, _ in addresses],
                port=addresses[0][1],
                server=f"hostring-{secrets.token_hex(8)}.local.",  # machines may have been cloned, with their names
            )
            opened.append(Zeroconf(_with_ipv4(host for host, _ in addresses), ip_version=IPVersion.V4Only))
            # others may remember an earlier head of this cluster: the name may change
            opened[0].register_service(about, allow_name_change=True)
        except Exception as exc:  # whatever the network or the package has: a cluster works without
            _log.warning("hostring: this cluster can't be announced on the local network: %s", exc)

    announcing = threading.Thread(target=announce, name="hostring-announce", daemon=True)
    announcing.start()
    try:
        yield
    finally:
        ending = threading.Thread(target=_end, args=(announcing, opened), name="hostring-announce-end", daemon=True)
        ending.start()
        ending.join(_END_S)


def _end(announcing: threading.Thread, opened: list[Any]) -> None:
    announcing.join()
    for one in opened:
        one.close()  # says goodbye, three times


def _with_ipv4(hosts: Iterable[str]) -> list[str]:
    """Those of the addresses on which there is IPv4 multicast, each once."""
    return list(dict.fromkeys(host for host in hosts if ":" not in host))


def _packed(host: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host.partition("%")[0])


def found(secret: bytes) -> list[Address]:
    """Where the cluster of a token is announced; empty where nobody says so for `LOOK_S`."""
    try:
        from zeroconf import IPVersion, ServiceBrowser, Zeroconf
    except ImportError:
        return []
    names, came = list[str](), threading.Event()

    def note(zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        if name.startswith(name_of(secret)):
            names.append(name)
            came.set()

    hosts = [*hosts_to_bind(loopback=False, spec=os.environ.get("HOSTRING_INTERFACE")), "127.0.0.1"]
    try:
        with Zeroconf(_with_ipv4(hosts), ip_version=IPVersion.V4Only) as network:
            browser = ServiceBrowser(network, SERVICE, handlers=[note])
            came.wait(LOOK_S)
            asked = [network.get_service_info(SERVICE, name, int(1000 * _ANSWER_S)) for name in dict.fromkeys(names)]
            browser.cancel()
    except Exception as exc:  # whatever the network or the package has: the token's addresses are there without
        _log.info("hostring: this machine can't look for the cluster on the local network: %s", exc)
        return []
    return [(host, info.port) for info in asked if info and info.port for host in info.parsed_scoped_addresses()]
