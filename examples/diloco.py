"""DiLoCo: each rank trains alone with AdamW, and all come together once in 50 steps, in 8 bits. A lost rank comes back.

    HOSTRING_WIRE=mxint8-both hostring launch -n 2 --rejoin 1 examples/diloco.py --kill 1:120

Here rank 1 is killed at its step 120 and started again. It gets the outer state from the others, with its hash checked;
they begin again at the last outer step. `--ddp` trains the same model by DistributedDataParallel over hostring instead.
It prints (loss of rank 0, tokens of all ranks):

    step  50  loss 6.3155  1234 tokens/s
    step 100  loss 5.7101  1234 tokens/s
    rank 1 is back at step 100
    step 150  loss 5.3881  1234 tokens/s
    step 200  held-out loss 5.6404, sha256 0123456789abcdef on all 2 ranks
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from time import monotonic

from small_training import SmallTraining, corpus

import hostring
from hostring.training import LocalSGD, digest, share_state


class Diloco:
    """One rank: its inner training, and the outer steps with the others."""

    def __init__(self, comm: hostring.Comm, training: SmallTraining, args: argparse.Namespace) -> None:
        self.comm, self.training, self.args = comm, training, args
        parameters = training.model.parameters()
        self.outer = LocalSGD(comm, parameters, every=args.every, rate=args.rate, momentum=args.momentum)
        self.curve: list[tuple[int, float, float]] = []  # tokens of all ranks, seconds, loss

    def run(self, back: bool) -> None:
        if back:
            self.share(fresh=True)
        began = monotonic()
        while self.outer.steps < self.args.steps:
            step = self.outer.steps
            if f"{self.comm.rank}:{step}" == self.args.kill and not back:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.training.backward(self.comm.rank, step)
            self.training.update(step)
            try:
                together = self.outer.step()
            except hostring.HostringError as exc:
                self.go_on_after(exc)
                continue
            tokens = (step + 1) * self.training.tokens * self.comm.world_size
            self.curve.append((tokens, monotonic() - began, loss))
            if together and self.comm.rank == 0:
                report(step + 1, *self.curve[-1])

    def go_on_after(self, exc: hostring.HostringError) -> None:
        self.comm = self.outer.comm = self.comm.rebuild(min_ranks=self.comm.world_size)
        self.share()
        if self.comm.rank == 0:
            print(f"rank {exc.rank} is back at step {self.outer.steps}", flush=True)

    def share(self, fresh: bool = False) -> None:
        """Begin again at the last outer step of the furthest rank."""
        state = share_state(self.comm, None if fresh else self.outer.state_dict(), self.outer.outer_steps)
        if state is None:
            self.outer.reset()
        else:
            self.outer.load_state_dict(state)

    def finish(self) -> str:
        """The hash of parameters and outer state, which is the same on all ranks."""
        if share_state(self.comm, self.outer.state_dict(), self.outer.outer_steps) is not None:
            raise SystemExit(f"rank {self.comm.rank} has another outer state")
        return digest(self.outer.state_dict())


def report(step: int, tokens: int, seconds: float, loss: float) -> None:
    print(f"step {step:3}  loss {loss:.4f}  {tokens / seconds:.0f} tokens/s", flush=True)


def run_ddp(training: SmallTraining, args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """The same training with gradients averaged in every step. Returns the curve."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("hostring")
    training.net = DistributedDataParallel(training.model)
    began, curve = monotonic(), []
    for step in range(args.steps):
        loss = training.backward(dist.get_rank(), step)
        training.update(step)
        curve.append(((step + 1) * training.tokens * dist.get_world_size(), monotonic() - began, loss))
        if dist.get_rank() == 0 and (step + 1) % args.every == 0:
            report(step + 1, *curve[-1])
    dist.destroy_process_group()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a text file; without it, hostring's documentation")
    parser.add_argument("--steps", type=int, default=200, help="inner steps of each rank, a multiple of --every")
    parser.add_argument("--every", type=int, default=50, help="inner steps between two outer steps")
    parser.add_argument("--rate", type=float, default=0.7, help="of the outer steps")
    parser.add_argument("--momentum", type=float, default=0.9, help="of the outer steps, Nesterov's")
    parser.add_argument("--windows", type=int, default=1, help="windows per rank and step")
    parser.add_argument("--window", type=int, default=64, help="tokens per window")
    parser.add_argument("--layers", type=int, help="of the model; all 4 without")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel instead")
    parser.add_argument("--kill", help="RANK:STEP: this rank kills itself there, once")
    parser.add_argument("--out", help="a JSON file for the losses")
    args = parser.parse_args()
    shape = {"windows": args.windows, "window": args.window, "steps": args.steps, "layers": args.layers}
    training = SmallTraining(corpus(args.text), **shape)
    if args.ddp:
        curve, head, words = run_ddp(training, args), os.environ.get("RANK", "0") == "0", "DDP"
    else:
        with hostring.init() as comm:
            diloco = Diloco(comm, training, args)
            diloco.run(back=os.environ.get("HOSTRING_REJOIN") == "1")
            curve, head = diloco.curve, comm.rank == 0
            words = f"sha256 {diloco.finish()[:16]} on all {diloco.comm.world_size} ranks"
            diloco.comm.close()
    if head:
        held_out = training.held_out_loss()
        print(f"step {args.steps:3}  held-out loss {held_out:.4f}, {words}", flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps({"held_out": held_out, "curve": curve}), encoding="utf-8")


if __name__ == "__main__":
    main()
