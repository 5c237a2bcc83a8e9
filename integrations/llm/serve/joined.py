"""The program of a machine that joined the head of `hostring serve --machines` with nothing but a token."""

from __future__ import annotations

import contextlib
import json
import os
import sys

from hostring import HostringError, init
from hostring.integrations.llm.serve.options import ServeOptions
from hostring.launch.silence import wanted_silence

_TASK = "HOSTRING_SERVE"


def joined_main() -> None:
    """Serve as one rank, with what the head says and sends."""
    told = json.loads(os.environ.pop(_TASK))
    options = ServeOptions.from_json(told["options"])
    try:
        _serve(options, told["device"])
    except (HostringError, ValueError, OSError) as exc:
        sys.exit(f"hostring: rank {os.environ.get('RANK')}: {exc}")
    except KeyboardInterrupt:
        os._exit(130)  # everything is closed; the end of an interpreter that has loaded torch takes a second more


def _serve(options: ServeOptions, device: str) -> None:
    from hostring.integrations.llm.serve.serving import serve_rank
    from hostring.integrations.llm.serve.supply import Bare

    job, secret = options.job, os.environ["HOSTRING_SECRET"].encode()
    head = os.environ["MASTER_ADDR"]
    with (
        init(topology=job.topology, order=job.order, timeout=job.timeout, silence=wanted_silence()) as comm,
        contextlib.closing(Bare(head, secret)) as supply,
    ):
        serve_rank(options, comm, device, supply=supply)


if __name__ == "__main__":
    joined_main()
