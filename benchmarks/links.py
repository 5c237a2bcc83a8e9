"""Hosts on one machine for measurements: network namespaces on a switch, with rates, or two with a delay. Needs root.

    with Switch(4, mbit=[250, 100, 100, 100]) as hosts:
        subprocess.run(hosts.command(0, ["python", "rank.py"]))

    python benchmarks/links.py --mbit 1000 hostring-bench --pin          # a rank on each of two hosts

Rates are token buckets, both ways. The bursts are small enough that a rate holds from the first packet on, and large
enough that the kernel reaches it. Where the kernel has no netem, a relay between two TUN devices delays packets
(delay.c).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hostring.launch.cores import core_for

HERE = Path(__file__).parent


class Switch:
    """Hosts that are joined by one switch.

    Args:
        n: how many.
        mbit: rate of each host's interface, both ways; None for no limit.
        queue_ms: how much may wait for an interface; what comes then is dropped, and sent again by TCP.
        burst: bytes that may go at once, at least. From 70000 on the kernel need not take packets apart to keep a rate.
    """

    interface = "eth0"

    def __init__(
        self, n: int, mbit: Sequence[float | None] | None = None, queue_ms: float = 20.0, burst: int = 0
    ) -> None:
        self.n, self._mbit, self._queue_ms, self._burst = n, list(mbit or [None] * n), queue_ms, burst
        self._tag = f"hb{os.getpid()}"

    def namespace(self, host: int) -> str:
        return f"{self._tag}-{host}"

    def address(self, host: int) -> str:
        return f"10.97.0.{host + 1}"

    def command(self, host: int, argv: Sequence[str], core: int | None = None) -> list[str]:
        """`argv` as run on `host`, on one core when it is given."""
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        return ["ip", "netns", "exec", self.namespace(host), *pinned, *argv]

    def __enter__(self) -> Switch:
        _leave_on_sigterm()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        switch = f"{self._tag}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.n):
            here, port = self.namespace(host), f"p{host}"
            _ip("netns", "add", here)
            _ip("link", "add", "eth0", "netns", here, "type", "veth", "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", here, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", here, "link", "set", "lo", "up")
            _ip("-n", here, "link", "set", "eth0", "up")
            _ip(
                "-n",
                here,
                "route",
                "change",
                "10.97.0.0/24",
                "dev",
                "eth0",
                "src",
                self.address(host),
                "congctl",
                "cubic",
            )
            if (mbit := self._mbit[host]) is not None:
                limit(here, "eth0", mbit, self._queue_ms, least_burst=self._burst)
                burst = max(32 << 10, self._burst)  # only where several send to one does it matter
                limit(switch, port, mbit, self._queue_ms, least_burst=burst)

    def close(self) -> None:
        for name in (*(self.namespace(host) for host in range(self.n)), f"{self._tag}-sw"):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


class Delayed:
    """Two hosts with a delay each way and a rate, for links that are further away than a switch."""

    interface = "tun0"
    n = 2

    def __init__(self, one_way_us: float, mbit: float) -> None:
        self._delay, self._mbit = one_way_us, mbit
        self._tag = f"hb{os.getpid()}"
        self._relay: subprocess.Popen[bytes] | None = None
        self._build = tempfile.mkdtemp(prefix="hostring-delay-")

    namespace = Switch.namespace
    command = Switch.command

    def address(self, host: int) -> str:
        return f"10.96.0.{host + 1}"

    def __enter__(self) -> Delayed:
        _leave_on_sigterm()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        program = str(Path(self._build) / "delay")
        subprocess.run(["cc", "-O2", "-pthread", "-o", program, str(HERE / "delay.c")], check=True)
        for host in range(2):
            _ip("netns", "add", self.namespace(host))
            _ip("-n", self.namespace(host), "link", "set", "lo", "up")
        arguments = [self.namespace(0), self.namespace(1), str(self._delay), str(self._mbit)]
        self._relay = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != b"ready\n":
            raise RuntimeError("the delaying relay did not start; it needs root and /dev/net/tun")
        for host in range(2):
            here, own = self.namespace(host), self.address(host)
            _ip("-n", here, "addr", "add", f"{own}/24", "dev", "tun0")
            _ip("-n", here, "link", "set", "tun0", "txqueuelen", "4000", "up")
            _ip("-n", here, "route", "change", "10.96.0.0/24", "dev", "tun0", "src", own, "congctl", "cubic")

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for host in range(2):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(self._build, ignore_errors=True)


def _leave_on_sigterm() -> None:
    """Let `timeout` and the like end this process through its `with` blocks, so that no namespace stays behind."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def limit(namespace: str, device: str, mbit: float, queue_ms: float = 20.0, least_burst: int = 0) -> None:
    """Let `device` send no faster than that."""
    burst = max(least_burst, 3100 if mbit <= 1000 else 6200 if mbit <= 2500 else 262144)
    command = [
        "tc",
        "-n",
        namespace,
        "qdisc",
        "replace",
        "dev",
        device,
        "root",
        "tbf",
        "rate",
        f"{mbit}mbit",
        "burst",
        str(burst),
    ]
    subprocess.run([*command, "latency", f"{queue_ms}ms"], check=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def start_ranks(
    hosts: Switch | Delayed,
    argv: Sequence[str],
    world_size: int,
    *,
    env: Mapping[str, str] | None = None,
    pin: bool = False,
    only: int | None = None,
    **popen: Any,
) -> list[subprocess.Popen[Any]]:
    """Start `argv` as one rank on each host, or as rank `only` alone. Rank 0's host is where they meet."""
    port = str(20000 + os.getpid() % 10000)
    ranks = []
    for rank in range(world_size) if only is None else [only]:
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": hosts.address(0),
            "MASTER_PORT": port,
            "HOSTRING_INTERFACE": hosts.interface,
            "HOSTRING_SECRET": "between namespaces of one machine",
            "GLOO_SOCKET_IFNAME": hosts.interface,
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        core = core_for(rank) if pin else None
        ranks.append(subprocess.Popen(hosts.command(rank, argv, core), env=variables, **popen))
    return ranks


def wait_ranks(ranks: Sequence[subprocess.Popen[Any]], seconds: float) -> None:
    """Until all have ended.

    Raises:
        RuntimeError: one failed, or time is over; the others are ended.
    """
    until = time.monotonic() + seconds
    try:
        while any(r.poll() is None for r in ranks):
            failed = [k for k, r in enumerate(ranks) if r.poll()]
            if failed or time.monotonic() > until:
                raise RuntimeError(f"ranks {failed} failed" if failed else f"ranks did not end within {seconds:.0f} s")
            time.sleep(0.02)
        if any(r.returncode for r in ranks):
            raise RuntimeError(f"exit codes by rank: {[r.returncode for r in ranks]}")
    finally:
        for r in ranks:
            if r.poll() is None:
                r.kill()
                r.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="rate of each host, both ways; no limit without")
    parser.add_argument("--burst", type=int, default=0, help="see Switch")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run as one rank on each host")
    options = parser.parse_args()
    with Switch(options.ranks, [options.mbit] * options.ranks, burst=options.burst) as hosts:
        wait_ranks(start_ranks(hosts, options.command, options.ranks), options.timeout)


if __name__ == "__main__":
    main()
