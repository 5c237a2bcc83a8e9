"""`hostring demo` starts rank processes and shows what they do; `hostring generate` is one rank of a launched group."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any

from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.monitor import RankMonitor
from hostring.integrations.llm.demo.probing import plan_before
from hostring.integrations.llm.demo.process import PROGRAM, channel_environment
from hostring.integrations.llm.demo.rejoin import how_to_rejoin, nobody_restarts
from hostring.integrations.llm.demo.screen import Screen
from hostring.launch.ranks import launch
from hostring.launch.silence import silence_environment

if TYPE_CHECKING:
    from hostring import Comm

_LAST_WORDS_S = 10.0  # for the head to report what it has, once the run is over


def demo(job: Job) -> dict[str, Any]:
    """Run `job` on rank processes of this machine and show it. Returns the figures.

    A rank that is lost between the first prompt and the last is started again.

    Raises:
        HostringError: a rank failed; what it said is on stderr.
        ValueError: there is no such device; no rank was started.
    """
    from hostring import HostringError

    job = replace(job, devices=found_devices(job.devices))
    settings = {
        "HOSTRING_TOPOLOGY": job.topology,
        "HOSTRING_ORDER": job.order,
        "HOSTRING_TRANSPORT": "tcp",
        "HOSTRING_TIMEOUT": str(job.timeout),
        **silence_environment(),
        "OMP_NUM_THREADS": "1",
    }
    job, said = plan_before(job, settings)
    key = secrets.token_bytes(32)
    screen = Screen(job)
    for line in said:
        print(line, file=sys.stderr)
    with Listener(("127.0.0.1", 0), authkey=key, backlog=job.ranks) as listener:
        monitor = RankMonitor(listener, screen)
        env = {**channel_environment(job, listener.address[1], key), **settings}
        with screen:
            code = launch(["-m", PROGRAM], job.ranks, env=env, last_words=_LAST_WORDS_S, revival=monitor)
            result = monitor.finish()
    if code == 128 + signal.SIGINT:
        if result is None:
            raise SystemExit(code)
        result["error"] = result.get("error") or "interrupted"
    if result is None and monitor.head_ended is not None:
        raise HostringError(
            f"rank 0, the head, {monitor.head_ended}; it holds the prompts, so the run ends here: start it again", 0
        )
    if result is None:
        raise HostringError(
            f"the ranks ended with exit code {code} before there was a result; see their messages above"
        )
    return result


def generate(job: Job, comm: Comm, *, device: str = "auto", stats: bool = True) -> dict[str, Any] | None:
    """Run `job` as one rank of `comm`, which names its own device. The head rank shows the text and the figures, and
    returns these."""
    from hostring.integrations.llm.demo.measure import measure

    if nobody_restarts(os.environ):
        job = replace(job, patience=0.0)
    if comm.rank != 0:
        return measure(job, comm, lambda kind, value: None, device)
    rejoins = lambda rank: how_to_rejoin(rank, job.ranks, os.environ, sys.argv)  # noqa: E731
    screen = Screen(job, starting=False, summary=stats, rejoins=rejoins)
    with screen:
        return measure(job, comm, lambda kind, value: screen.handle(0, kind, value), device)


def found_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The devices under torch's names. Torch, which takes a second to import, is only asked about accelerators."""
    if set(devices) <= {"cpu"}:
        return devices
    from hostring.integrations.llm.model.devices import find_device

    return tuple(str(find_device(name, rank)) for rank, name in enumerate(devices))
