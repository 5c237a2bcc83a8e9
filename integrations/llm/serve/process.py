"""The program of one rank process of `hostring serve --local`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from typing import Any

from hostring import HostringError, init
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.launch.cores import pin

PROGRAM = __name__ if __name__ != "__main__" else "hostring.integrations.llm.serve.process"

_TASK = "HOSTRING_SERVE"


def task_environment(options: ServeOptions, port: int, key: bytes) -> dict[str, str]:
    """What tells a rank process its task, and the head where to tell what happens."""
    return {_TASK: json.dumps({"port": port, "key": key.hex(), "options": options.to_json()})}


def rank_main() -> None:
    """What a rank process runs."""
    told = json.loads(os.environ.pop(_TASK))
    options, rank = ServeOptions.from_json(told["options"]), int(os.environ["RANK"])
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    pin(rank, options.job.ranks)
    try:
        _serve(options, rank, told, cores)
    except (HostringError, ValueError, OSError) as exc:
        sys.exit(f"hostring: rank {rank}: {exc}")
    except KeyboardInterrupt:
        sys.stdout.flush()
        os._exit(130)  # everything is closed; the end of an interpreter that has loaded torch takes a second more


def _serve(options: ServeOptions, rank: int, told: dict[str, Any], cores: Collection[int] | None) -> None:
    import torch

    from hostring.integrations.llm.serve.serving import serve_rank
    from hostring.integrations.llm.serve.watch import WatchChannel

    torch.set_num_threads(1)
    with init() as comm:
        tell = WatchChannel(told["port"], bytes.fromhex(told["key"])).tell if comm.rank == 0 else None
        serve_rank(options, comm, options.job.devices[rank], tell=tell, http_cores=cores)


if __name__ == "__main__":
    rank_main()
