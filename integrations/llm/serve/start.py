"""`hostring serve` starts rank processes of this machine, and starts those again that die; or it is one rank itself."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from dataclasses import replace
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any

from hostring.integrations.llm.demo.rejoin import how_to_rejoin, nobody_restarts
from hostring.integrations.llm.demo.start import found_devices
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.process import PROGRAM, task_environment
from hostring.integrations.llm.serve.watch import RankWatch
from hostring.launch.joining import offered_hosts
from hostring.launch.ranks import launch
from hostring.launch.silence import silence_environment

if TYPE_CHECKING:
    from hostring import Comm

STAYS = (
    "it comes back by itself where `hostring cluster join TOKEN` runs on its machine; otherwise start that there again"
)
_GRACE_S = 0.7  # how long ranks have to end by themselves when the server is stopped


def serve_local(options: ServeOptions) -> int:
    """Serve with rank processes on this machine. Returns the exit code.

    Raises:
        ValueError: there is no such device; no rank was started.
    """
    job = options.job
    options = replace(options, job=replace(job, devices=found_devices(job.devices)))
    key = secrets.token_bytes(32)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        env = {
            **task_environment(options, listener.address[1], key),
            "HOSTRING_TOPOLOGY": job.topology,
            "HOSTRING_ORDER": job.order,
            "HOSTRING_TRANSPORT": "tcp",
            "HOSTRING_TIMEOUT": str(job.timeout),
            **silence_environment(),
            "OMP_NUM_THREADS": "1",
        }
        return launch(["-m", PROGRAM], job.ranks, env=env, grace=_GRACE_S, revival=RankWatch(listener))


def serve_member(options: ServeOptions, comm: Comm, device: str) -> None:
    """Serve as one rank of a group that others started; its rank 0 is the head.

    Raises:
        HostringError: a rank was lost and did not come back.
        OSError: the head can't listen.
        ValueError: the model can't be loaded.
    """
    from hostring.integrations.llm.serve.serving import serve_rank
    from hostring.integrations.llm.serve.supply import offer

    if nobody_restarts(os.environ):
        options = replace(options, job=replace(options.job, patience=0.0))

    sends = comm.rank == HEAD_RANK and bool(offered_hosts(os.environ))

    def tell(kind: str, value: Any) -> None:
        if kind == "lost" and options.job.patience:
            how = STAYS if sends else how_to_rejoin(value, comm.world_size, os.environ, sys.argv)
            print(f"hostring: rank {value} is lost; {how}", file=sys.stderr)

    with contextlib.ExitStack() as stack:
        supply = stack.enter_context(contextlib.closing(offer(options.job.model))) if sends else None
        serve_rank(options, comm, device, tell=tell, supply=supply)
