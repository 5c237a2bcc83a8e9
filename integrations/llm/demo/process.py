"""The program of one rank process of the demo, and its channel to the screen."""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Client
from time import monotonic
from typing import Any

from hostring.integrations.llm.demo.job import Job
from hostring.launch.cores import pin

PROGRAM = __name__ if __name__ != "__main__" else "hostring.integrations.llm.demo.process"

_TEXT_INTERVAL_S = 0.03  # a message per token would cost the ranks' cores more than the token
_CHANNEL = "HOSTRING_DEMO_CHANNEL"


def channel_environment(job: Job, port: int, key: bytes) -> dict[str, str]:
    """What tells a rank process its job, and where to report."""
    return {_CHANNEL: json.dumps({"port": port, "key": key.hex(), "job": job.to_json()})}


class _Channel:
    """One rank's way to the screen. Pieces of text are joined for a moment before they go."""

    def __init__(self, rank: int, port: int, key: bytes) -> None:
        self._rank = rank
        self._connection = Client(("127.0.0.1", port), authkey=key)
        self._pending: list[str] = []
        self._sent = 0.0

    def tell(self, kind: str, value: Any) -> None:
        """See `loop.Tell`."""
        if kind == "text":
            self._pending.append(value)
            if monotonic() - self._sent > _TEXT_INTERVAL_S:
                self._flush()
            return
        self._flush()
        self._send(kind, value)

    def _flush(self) -> None:
        if self._pending:
            self._send("text", "".join(self._pending))
            self._pending.clear()
            self._sent = monotonic()

    def _send(self, kind: str, value: Any) -> None:
        self._connection.send_bytes(json.dumps([self._rank, kind, value]).encode())


def rank_main() -> None:
    """What a rank process of the demo runs."""
    told = json.loads(os.environ.pop(_CHANNEL))
    job, rank = Job.from_json(told["job"]), int(os.environ["RANK"])
    channel = _Channel(rank, told["port"], bytes.fromhex(told["key"]))
    channel.tell("stage", "starting")
    pin(rank, job.ranks)
    import torch

    import hostring
    from hostring.integrations.llm.demo.measure import measure

    torch.set_num_threads(1)
    channel.tell("stage", "joining")
    try:
        with hostring.init() as comm:
            measure(job, comm, channel.tell, job.devices[rank])
    except (hostring.HostringError, ValueError, FileNotFoundError) as exc:
        sys.exit(f"hostring: rank {rank}: {exc}")
    except KeyboardInterrupt:  # the way out of a chat, not worth a traceback per rank
        sys.exit(130)


if __name__ == "__main__":
    rank_main()
