"""The torch examples run, and print what their first lines say."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch.distributed as dist
from torch_ranks import pool

EXAMPLES = Path(__file__).parents[2] / "examples"


def _example(group, name):
    dist.destroy_process_group()
    printed = io.StringIO()
    sys.argv = [name]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue().splitlines()


def promised(name: str) -> list[str]:
    """The lines after "prints" in the example's docstring."""
    words = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    return [line.strip() for line in re.split(r"[Pp]rints\n", words)[1].splitlines() if line.strip()]


def shape_and_numbers(line: str) -> tuple[str, list[float]]:
    number = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
    return re.sub(number, "#", line), [float(n) for n in re.findall(number, line)]


EXAMPLES_ON_RANKS = (
    "torch_ddp",
    "torch_fsdp2",
    "torch_tensor_parallel",
    "torch_pipeline",
    "torch_transformers",
    "torch_async_checkpoint",
)


@pytest.mark.parametrize("name", EXAMPLES_ON_RANKS)
def test_an_example_prints_what_it_promises(name):
    if name == "torch_transformers":
        pytest.importorskip("transformers")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    by_rank = pool.run(2, _example, name, env={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    got = sorted((line for lines in by_rank for line in lines), key=shape_and_numbers)
    expected = sorted(promised(name), key=shape_and_numbers)
    assert [shape_and_numbers(line)[0] for line in got] == [shape_and_numbers(line)[0] for line in expected]
    for a, b in zip(got, expected, strict=True):
        if "differ" not in a and "tokens/s" not in a:  # roundings and speed are the machine's
            assert shape_and_numbers(a)[1] == pytest.approx(shape_and_numbers(b)[1], rel=0.05, abs=0.01)
