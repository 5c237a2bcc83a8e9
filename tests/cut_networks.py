"""Networks of two sides, in namespaces of their own, with a cable that can be cut."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Iterator

from hostring.transports.tcp import listen_at


def ip(*args: str, batch: str | None = None) -> None:
    subprocess.run(["ip", *args], input=batch, check=True, capture_output=True, text=True, timeout=20)


def can_cut() -> str:
    """Why this machine can't have networks of its own; empty when it can."""
    try:
        with network():
            return ""
    except (OSError, subprocess.SubprocessError) as exc:
        return f"network namespaces need root and iproute2: {exc}"


@contextlib.contextmanager
def network() -> Iterator[str]:
    """Two network namespaces, NAME-a with 198.18.0.1 (a range for tests, RFC 2544) and NAME-b with 198.18.0.2, and a
    cable.
    """
    name = f"hrtest-{os.getpid()}-{next(_numbers)}"
    try:
        for side, address in (("a", "198.18.0.1"), ("b", "198.18.0.2")):
            ip("netns", "add", f"{name}-{side}")
            if side == "b":
                ip(
                    "link",
                    "add",
                    "net0",
                    "netns",
                    f"{name}-a",
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "net0",
                    "netns",
                    f"{name}-b",
                )
                for end, host in (("a", "198.18.0.1"), ("b", address)):
                    lines = [
                        "link set lo up",
                        "link set net0 addrgenmode none",
                        f"addr add {host}/24 dev net0",
                        "link set net0 up",
                    ]
                    ip("-n", f"{name}-{end}", "-batch", "-", batch="\n".join(lines))
        yield name
    finally:
        for side in "ab":
            subprocess.run(["ip", "netns", "del", f"{name}-{side}"], capture_output=True, timeout=20, check=False)


_numbers = itertools.count()
_CLONE_NEWNET = 0x40000000


def enter(name: str, culprit: bool) -> None:
    """Move this thread, and what it starts, into one side of a network: the culprit is alone on its side."""
    with open(f"/var/run/netns/{name}-{'b' if culprit else 'a'}", "rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def cut(name: str) -> None:
    ip("-n", f"{name}-b", "link", "set", "net0", "down")


def mend(name: str) -> None:
    ip("-n", f"{name}-b", "link", "set", "net0", "up")


def listening_in(name: str) -> socket.socket:
    """A listener on the survivors' side."""
    made: list[socket.socket] = []

    def body() -> None:
        enter(name, culprit=False)
        made.append(listen_at("198.18.0.1", 0))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10)
    return made[0]
