"""What one sees at a prompt: the public names of the package, and a group in a few words."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import hostring
from hostring.errors import HostringError


def test_dir_shows_the_public_names_and_nothing_else():
    assert set(dir(hostring)) == {*hostring.__all__, "__version__"}


def test_dir_shows_them_before_anything_was_used():
    code = "import hostring; print(sorted(dir(hostring)) == sorted([*hostring.__all__, '__version__']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


def test_a_group_says_what_it_is(run_ranks):
    texts = run_ranks(3, repr, topology="ring", order="tree", wire="bfloat16")
    rest = "order='tree', wire='bfloat16', topology='ring', transport='memory'>"
    assert texts == [f"<hostring.Comm rank {rank} of 3, {rest}" for rank in range(3)]


@pytest.mark.parametrize(("end", "state"), [("close", "closed"), ("abort", "aborted: by this test")])
def test_a_closed_group_says_so(end, state):
    comm = hostring.init(0, 1)
    comm.close() if end == "close" else comm.abort("by this test")
    assert repr(comm).endswith(f"{state}>")


def test_a_failed_group_says_so(run_ranks):
    def body(comm):
        if comm.rank == 0:
            comm.recv(np.zeros(1), 1)
            comm.abort("by this test")
        else:
            comm.send(np.zeros(1), 0)  # now rank 0 may abort: this one has started
        with pytest.raises(HostringError):
            comm.barrier()
        return repr(comm)

    aborted, failed = run_ranks(2, body)
    assert aborted.endswith("aborted: by this test>")
    assert failed.endswith("failed: rank 0 aborted the group: by this test>")
