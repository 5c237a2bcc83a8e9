"""Starts the ranks of one machine: `hostring launch`, the demo and the tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence

from hostring.errors import HostringError
from hostring.group.host_info import usable_cores
from hostring.group.rendezvous import tell_ended
from hostring.launch.orphans import LAUNCHER
from hostring.launch.output import Output
from hostring.launch.processes import Processes
from hostring.launch.restarts import Revival
from hostring.store.client import TcpStore
from hostring.store.server import StoreServer
from hostring.transports.addresses import join_address
from hostring.transports.tcp import listen_at

GRACE_S = 5.0  # how long ranks have to end by themselves after each signal, before they get a stronger one
LAST_WORDS_S = 2.0  # how long ranks have to notice that another one has failed, and to say so


def launch(
    argv: Sequence[str],
    n: int,
    *,
    env: Mapping[str, str] | None = None,
    prefix_output: bool = False,
    grace: float = GRACE_S,
    last_words: float = LAST_WORDS_S,
    revival: Revival | None = None,
) -> int:
    """Run a Python program as `n` ranks on this machine, and wait for it.

    This process hosts the store, on loopback, with a secret that only the ranks get (in their environment, never on a
    command line). When a rank fails, the others are ended, unless `revival` wants it started again: then it gets
    HOSTRING_REJOIN=1, and the others are to call `Comm.rebuild`. SIGINT, SIGTERM and SIGHUP go to all ranks, and end
    those that don't react. Ranks that wait for one that has ended well before it joined are told so. With two ranks or
    more, tracebacks are written one after the other; that of the rank that failed first comes first.

    Args:
        argv: a script and its arguments, or "-m", a module and its arguments.
        n: world size.
        env: more variables for all ranks.
        prefix_output: put "[rank] " before each line of output. Lines appear whole, so streamed text comes late.
        grace, last_words: seconds, see `GRACE_S` and `LAST_WORDS_S`.
        revival: which ranks are started again; none when not given.

    Returns:
        0 when all ranks ended well, else the exit code of the one that failed first (128 + signal for a killed one).

    Raises:
        ValueError: nothing to run, or no ranks.
    """
    if n < 1:
        raise ValueError(f"n={n}: at least one rank is needed")
    if not argv:
        raise ValueError("argv is empty: give a script, or -m and a module")
    secret = (env or {}).get("HOSTRING_SECRET") or secrets.token_hex(32)
    with contextlib.ExitStack() as stack:
        server = StoreServer([listen_at("127.0.0.1", 0)], secret.encode())
        stack.callback(server.close)
        store = TcpStore.at("127.0.0.1", server.port, secret=secret.encode())
        stack.callback(store.close)

        def tell(ended: dict[int, str]) -> None:
            with contextlib.suppress(HostringError, OSError):  # then the ranks wait as long as their timeout is
                tell_ended(store, ended)

        output = Output(prefix_output)
        ranks = Processes(output, n > 1, prefix_output, grace, last_words, revival, tell)
        stack.callback(ranks.end_all)
        torch_port = _free_port()
        with ranks.passing_signals_on():
            for rank in range(n):
                environment = _environment(rank, n, server.port, torch_port, secret, env or {})
                if prefix_output:
                    environment["PYTHONUNBUFFERED"] = "1"  # else lines would wait in the ranks' buffers
                ranks.start([sys.executable, *argv], environment)
            return ranks.wait()


def _environment(
    rank: int, n: int, port: int, torch_port: int, secret: str, extra: Mapping[str, str]
) -> dict[str, str]:
    """`torch_port` is free: torch's own rendezvous would run there, ours runs at `port`."""
    unwanted = ("RING_CONFIG", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
    threads = max(1, len(usable_cores()) // n)  # by default each rank's numpy and torch would start one for every core
    return {
        "OMP_NUM_THREADS": str(threads),
        **inherited,
        **extra,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(torch_port),
        "HOSTRING_STORE": join_address("127.0.0.1", port),
        "HOSTRING_SECRET": secret,
        LAUNCHER: str(os.getpid()),
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
