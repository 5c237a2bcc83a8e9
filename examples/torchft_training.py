"""torchft's manager over hostring: two replicas train; one is killed and started again, and the other waits.

    pip install torchft
    python examples/torchft_training.py

`ProcessGroupHostring` is all that torchft needs. It heals a replica that comes back by its own checkpoint transfer, and
makes a new hostring group for every quorum. Averages travel in 8 bits, rounded alike on all replicas. It prints

    replica 1 is killed
    replica 0 is at step 12, state a1b2c3d4e5f60718
    replica 1 is at step 12, state a1b2c3d4e5f60718
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupWrapper

from hostring.integrations.torch_backend import Options
from hostring.integrations.torch_pg.new_group import connect
from hostring.training import digest

STEPS, KILLED_AT = 12, 3
PATIENCE = timedelta(seconds=60)


class ProcessGroupHostring(ProcessGroupWrapper):
    """A hostring group for each quorum."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        return connect(store, rank, world_size, self._timeout, Options(wire="mxint8-both"))

    def getBackendName(self) -> str:  # torchft calls this
        return "torchft-hostring"


def train(number: int, lighthouse: str, victim: bool) -> None:
    """One replica of one process."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupHostring(timeout=PATIENCE), load_state_dict=load, state_dict=state, min_replica_size=2,
        use_async_quorum=False, replica_id=f"replica{number}", lighthouse_addr=lighthouse, timeout=PATIENCE,
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, quorum_timeout=PATIENCE,
    )  # fmt: skip
    while manager.current_step() < STEPS:
        step = manager.current_step()
        if victim and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        manager.start_quorum()
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(100 * step + number))
        loss = nn.functional.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            manager.allreduce(p.grad).wait()
        if manager.should_commit():
            optimizer.step()
    print(f"replica {number} is at step {STEPS}, state {digest(state())[:16]}", flush=True)
    time.sleep(3.0)  # the other may still be in its last step
    manager.shutdown(wait=False)


def main() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=2000)
    context = multiprocessing.get_context("spawn")

    def start(number: int, victim: bool = False) -> Any:
        process = context.Process(target=train, args=(number, lighthouse.address(), victim), daemon=True)
        process.start()
        return process

    first, second = start(0), start(1, victim=True)
    second.join()
    print("replica 1 is killed", flush=True)
    second = start(1)
    for process in (first, second):
        process.join()
    lighthouse.shutdown()
    sys.exit(first.exitcode or second.exitcode)


if __name__ == "__main__":
    main()
