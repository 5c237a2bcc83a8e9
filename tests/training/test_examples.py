"""The training examples: ranks as threads on a small model, and processes that are killed and come back."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from oracle import bits
from ranks import side_by_side, successes

import hostring
from hostring.rendezvous import MemoryStore

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, LOST_AT = 6, 3


@pytest.fixture
def examples(monkeypatch, tmp_path):
    """The examples can be imported, and train on a short text of their own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 120, encoding="utf-8")
    return argparse.Namespace(
        text=str(text), steps=STEPS, windows=1, window=16, layers=1, feedback=True, kill=None, out=None,
        every=2, rate=0.7, momentum=0.9, ddp=False,
    )  # fmt: skip


def vanish(comm):
    comm.session.group.abort()
    comm.session.group.close()


def in_threads_with_a_loss(make, wire):
    """Three ranks as threads; rank 1 is lost at LOST_AT, and comes back as a new one. Returns all ranks at the end."""
    store = MemoryStore()

    def start(rank, **more):
        return make(hostring.init(rank, 3, store=store, transport="tcp", wire=wire, timeout=30, **more))

    def survivor(rank):
        held = start(rank)
        held.run(back=False)
        held.finish()
        return held

    def victim():
        held = start(1)
        held.args = argparse.Namespace(**{**vars(held.args), "steps": LOST_AT})
        held.run(back=False)
        vanish(held.comm)
        held = start(1, rejoin=True)
        held.run(back=True)
        held.finish()
        return held

    ended = successes(side_by_side([lambda: survivor(0), victim, lambda: survivor(2)]))
    for held in ended:
        held.comm.close()
    return ended


@pytest.mark.faults
@pytest.mark.parametrize("wire", ["mxint8-both", "mxfp4"])
def test_training_over_a_lossy_wire_survives_a_lost_rank(examples, wire):
    from train_slow_link import SlowLink

    ended = in_threads_with_a_loss(lambda comm: SlowLink(comm, examples), wire)
    states = [[bits(p.detach().numpy()) for p in held.training.model.parameters()] for held in ended]
    assert states[0] == states[1] == states[2]
    assert [held.step for held in ended] == [STEPS] * 3
    moments = [held.training.optimizer.state_dict()["state"][0]["exp_avg"].numpy() for held in ended]
    assert bits(moments[0]) == bits(moments[1]) == bits(moments[2])
    assert [step for step, _ in ended[0].curve] == list(range(STEPS)), "no step was lost or taken twice"
    assert [step for step, _ in ended[1].curve] == list(range(LOST_AT, STEPS))
    assert not np.array_equal(ended[0].feedback.residual, ended[2].feedback.residual), "each rank has its own"


@pytest.mark.faults
def test_diloco_survives_a_lost_rank(examples):
    from diloco import Diloco
    from small_training import SmallTraining, corpus

    lock = threading.Lock()

    def make(comm):
        with lock:  # torch's seed is the process's
            training = SmallTraining(corpus(examples.text), windows=1, window=16, steps=STEPS, layers=1)
        return Diloco(comm, training, examples)

    ended = in_threads_with_a_loss(make, "mxint8-both")
    states = [[bits(p.detach().numpy()) for p in held.training.model.parameters()] for held in ended]
    assert states[0] == states[1] == states[2]
    assert [held.outer.outer_steps for held in ended] == [STEPS // 2] * 3


def launched(ranks, wire, *arguments):
    """The last line that an example prints under `hostring launch`."""
    command = [sys.executable, "-m", "hostring", "launch", "-n", str(ranks), "--rejoin", "1", *map(str, arguments)]
    done = subprocess.run(
        command, env={**os.environ, "HOSTRING_WIRE": wire, "PYTHONPATH": str(EXAMPLES.parent)}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("example", ["train_slow_link", "diloco"])
def test_a_killed_process_comes_back(example):
    script, kill = EXAMPLES / f"{example}.py", ("--kill", "1:25")
    lines = launched(3, "mxint8-both", script, "--steps", 40, "--window", 16, "--layers", 1, *kill, *every(example))
    assert any(line.startswith("rank 1 is back at step 2") for line in lines)
    assert re.search(r"sha256 [0-9a-f]{16} on all 3 ranks", lines[-1])


def every(example):
    return ("--every", "10") if example == "diloco" else ()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_lossy_wires_with_feedback_end_where_float32_ends(ranks):
    losses, shares = {}, {}
    for wire in ("float32", "mxint8-both", "mxfp4-both"):
        last = launched(ranks, wire, EXAMPLES / "train_slow_link.py", "--steps", 120, "--layers", 2)[-1]
        losses[wire], shares[wire] = (float(x) for x in re.findall(r"loss (\S+), (\S+) of", last)[0])
    assert losses["float32"] < 6.5, "it has learnt something"
    for wire, share in (("mxint8-both", 0.258), ("mxfp4-both", 0.133)):
        assert abs(losses[wire] / losses["float32"] - 1) < 0.02
        assert shares[wire] == pytest.approx(share, abs=0.001)
