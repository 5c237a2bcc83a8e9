"""`hostring serve` starts rank processes of this machine, and starts those again that die; or it is one rank itself."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import replace
from multiprocessing.connection import Listener
from typing import TYPE_CHECKING, Any

from hostring.integrations.llm.demo.rejoin import how_to_rejoin, nobody_restarts
from hostring.integrations.llm.demo.start import found_devices
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.process import PROGRAM, task_environment
from hostring.integrations.llm.serve.watch import RankWatch
from hostring.launch.ranks import launch

if TYPE_CHECKING:
    from hostring import Comm

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

    if nobody_restarts(os.environ):
        options = replace(options, job=replace(options.job, patience=0.0))

    def tell(kind: str, value: Any) -> None:
        if kind == "lost" and options.job.patience:
            print(
                f"hostring: rank {value} is lost; {how_to_rejoin(value, comm.world_size, os.environ, sys.argv)}",
                file=sys.stderr,
            )

    serve_rank(options, comm, device, tell=tell)
