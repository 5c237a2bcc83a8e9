"""`hostring demo` starts rank processes and shows what they do; `hostring generate` is one rank of a launched group."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from dataclasses import replace
from multiprocessing.connection import Client, Listener
from time import monotonic
from typing import TYPE_CHECKING, Any

from hostring.integrations.llm.demo.board import Board
from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.resume import how_to_come_back, nobody_restarts
from hostring.integrations.llm.demo.screen import Screen
from hostring.launch.cores import pin
from hostring.launch.ranks import launch

if TYPE_CHECKING:
    from hostring import Comm

_TEXT_EVERY = 0.03  # seconds; a message per token would cost the ranks' cores more than the token
_LAST_WORDS = 10.0  # seconds in which the head says what it has, once the run is over
_CHANNEL = "HOSTRING_DEMO_CHANNEL"


def demo(job: Job, *, topology: str = "auto", order: str = "rank", timeout: float = 120.0) -> dict[str, Any]:
    """Run `job` on rank processes of this machine and show it. Returns the figures.

    A rank that is lost between the first prompt and the last is started again.

    Raises:
        HostringError: a rank failed; what it said is on stderr.
        ValueError: there is no such device; no rank was started.
    """
    from hostring import HostringError

    job = replace(job, devices=_found(job.devices))
    key = secrets.token_bytes(32)
    screen = Screen(job)
    with Listener(("127.0.0.1", 0), authkey=key, backlog=job.ranks) as listener:
        board = Board(listener, screen)
        port = listener.address[1]
        env = {
            _CHANNEL: json.dumps({"port": port, "key": key.hex(), "job": job.to_json()}),
            "HOSTRING_TOPOLOGY": topology,
            "HOSTRING_ORDER": order,
            "HOSTRING_TRANSPORT": "tcp",
            "HOSTRING_TIMEOUT": str(timeout),
            "OMP_NUM_THREADS": "1",
        }
        with screen:
            code = launch(["-m", __name__], job.ranks, env=env, last_words=_LAST_WORDS, revival=board)
            result = board.finish()
    if code == 128 + signal.SIGINT:
        if result is None:
            raise SystemExit(code)
        result["error"] = result.get("error") or "interrupted"
    if result is None and board.head_ended is not None:
        raise HostringError(
            f"rank 0, the head, {board.head_ended}; it holds the prompts, so the run ends here: start it again", 0
        )
    if result is None:
        raise HostringError(
            f"the ranks ended with exit code {code} before there was a result; see their messages above"
        )
    return result


def generate(job: Job, comm: Comm, *, device: str = "auto", stats: bool = True) -> dict[str, Any] | None:
    """Run `job` as one rank of `comm`, which names its own device. The head rank shows the text and the figures, and returns these."""
    from hostring.integrations.llm.demo.runs import measure

    if nobody_restarts(os.environ):
        job = replace(job, patience=0.0)
    if comm.rank != 0:
        return measure(job, comm, lambda kind, value: None, device)
    comes_back = lambda rank: how_to_come_back(rank, job.ranks, os.environ, sys.argv)  # noqa: E731
    screen = Screen(job, starting=False, summary=stats, comes_back=comes_back)
    with screen:
        return measure(job, comm, lambda kind, value: screen.handle(0, kind, value), device)


def _found(devices: tuple[str, ...]) -> tuple[str, ...]:
    """The devices under torch's names. Torch, which takes a second to import, is only asked about accelerators."""
    if set(devices) <= {"cpu"}:
        return devices
    from hostring.integrations.llm.model.devices import find_device

    return tuple(str(find_device(name, rank)) for rank, name in enumerate(devices))


class _Channel:
    """One rank's way to the screen. Pieces of text are joined for a moment before they go."""

    def __init__(self, rank: int, port: int, key: bytes) -> None:
        self._rank = rank
        self._connection = Client(("127.0.0.1", port), authkey=key)
        self._pending: list[str] = []
        self._sent = 0.0

    def tell(self, kind: str, value: Any) -> None:
        """See `runs.Tell`."""
        if kind == "text":
            self._pending.append(value)
            if monotonic() - self._sent > _TEXT_EVERY:
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


def _rank_main() -> None:
    """What a rank process of the demo runs."""
    told = json.loads(os.environ.pop(_CHANNEL))
    job, rank = Job.from_json(told["job"]), int(os.environ["RANK"])
    channel = _Channel(rank, told["port"], bytes.fromhex(told["key"]))
    channel.tell("stage", "starting")
    pin(rank, job.ranks)
    import torch

    import hostring
    from hostring.integrations.llm.demo.runs import measure

    torch.set_num_threads(1)
    channel.tell("stage", "joining")
    try:
        with hostring.init() as comm:
            measure(job, comm, channel.tell, job.devices[rank])
    except (hostring.HostringError, ValueError, FileNotFoundError) as exc:
        sys.exit(f"hostring: rank {rank}: {exc}")
    except KeyboardInterrupt:  # the way out of a talk, not worth a traceback per rank
        sys.exit(130)


if __name__ == "__main__":
    _rank_main()
