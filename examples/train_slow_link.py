"""Data-parallel training of the bundled model over a lossy wire, with error feedback, that survives a lost rank.

    HOSTRING_WIRE=mxint8-both hostring launch -n 3 --rejoin 1 examples/train_slow_link.py --kill 1:60

Gradients travel in 8 bits (4 with mxfp4-both); what rounding cuts off comes with the next ones. Here rank 1 is killed
at step 60 and started again. The others rebuild the group with it, and it gets parameters, optimiser and step from
them. At the end all ranks have the same bits:

    step   0  loss 7.6330
    step  40  loss 5.0511
    rank 1 is back at step 60
    step  80  loss 4.3210
    step 120  held-out loss 4.1234, 0.258 of float32's bytes, sha256 0123456789abcdef on all 3 ranks
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_training import SmallTraining, corpus

import hostring
from hostring.training import digest, share_state


class SlowLink:
    """One rank of the training: its model, its group, and the feedback of its gradients."""

    def __init__(self, comm: hostring.Comm, args: argparse.Namespace) -> None:
        self.comm, self.args = comm, args
        shape = {"windows": args.windows, "window": args.window, "steps": args.steps, "layers": args.layers}
        self.training = SmallTraining(corpus(args.text), **shape)
        self.feedback = hostring.Feedback() if args.feedback else None
        self.step, self.curve, self.sent = 0, [], 0

    def run(self, back: bool) -> None:
        if back:
            self.share(None)
        while self.step < self.args.steps:
            if f"{self.comm.rank}:{self.step}" == self.args.kill and not back:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                self.one_step()
            except hostring.HostringError as exc:
                self.go_on_after(exc)

    def one_step(self) -> None:
        """Nothing is changed before the gradients of all ranks are there: a step is taken as a whole, or not at all."""
        training, before = self.training, self.comm.counters.payload_sent
        loss = np.array([training.backward(self.comm.rank, self.step)])  # float64: no wire rounds it
        self.comm.all_reduce(training.gradients, "avg", feedback=self.feedback)
        self.sent = self.comm.counters.payload_sent - before
        self.comm.all_reduce(loss, "avg")
        training.update(self.step)
        self.curve.append((self.step, float(loss[0])))
        if self.comm.rank == 0 and self.step % 40 == 0:
            print(f"step {self.step:3}  loss {loss[0]:.4f}", flush=True)
        self.step += 1

    def state(self) -> dict[str, Any]:
        return {**self.training.state_dict(), "step": self.step}

    def go_on_after(self, exc: hostring.HostringError) -> None:
        self.comm = self.comm.rebuild(min_ranks=self.comm.world_size)
        self.share(self.state())
        if self.comm.rank == 0:
            print(f"rank {exc.rank} is back at step {self.step}", flush=True)

    def share(self, state: dict[str, Any] | None) -> None:
        """Take the state of the furthest rank, if this one has another."""
        if (theirs := share_state(self.comm, state, self.step, as_array=torch.from_numpy)) is not None:
            self.training.load_state_dict(theirs)
            self.step = theirs["step"]

    def finish(self) -> None:
        sha256 = digest(self.state())
        if share_state(self.comm, self.state(), self.step) is not None:
            raise SystemExit(f"rank {self.comm.rank}: other bits, sha256 {sha256}")
        if self.comm.rank == 0:
            n, size = self.comm.world_size, self.training.gradients.numel()
            share = self.sent / (2 * (n - 1) / n * 4 * size)
            held_out = self.training.held_out_loss()
            words = f"{share:.3f} of float32's bytes, sha256 {sha256[:16]} on all {n} ranks"
            print(f"step {self.step:3}  held-out loss {held_out:.4f}, {words}", flush=True)
            if self.args.out:
                result = {"held_out": held_out, "share": share, "sha256": sha256, "curve": self.curve}
                Path(self.args.out).write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a text file; without it, hostring's documentation")
    parser.add_argument("--steps", type=int, default=121)
    parser.add_argument("--windows", type=int, default=2, help="windows per rank and step")
    parser.add_argument("--window", type=int, default=64, help="tokens per window")
    parser.add_argument("--layers", type=int, help="of the model; all 4 without")
    parser.add_argument("--feedback", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--kill", help="RANK:STEP: this rank kills itself there, once")
    parser.add_argument("--out", help="a JSON file for the losses")
    args = parser.parse_args()
    slow_link = SlowLink(hostring.init(), args)
    slow_link.run(back=os.environ.get("HOSTRING_REJOIN") == "1")
    slow_link.finish()
    slow_link.comm.close()


if __name__ == "__main__":
    main()
