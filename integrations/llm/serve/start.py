"""`hostring serve` starts the rank processes of this machine, and starts those again that die."""

from __future__ import annotations

import secrets
from dataclasses import replace
from multiprocessing.connection import Listener

from hostring.integrations.llm.demo.start import found_devices
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.integrations.llm.serve.process import PROGRAM, task_environment
from hostring.integrations.llm.serve.watch import RankWatch
from hostring.launch.ranks import launch

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
