"""How torch finds the backend, and how launchers start, kill and restart it. Real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from mpis import mpi
from two_hosts import Hosts

pytest.importorskip("torch")

pytestmark = pytest.mark.faults


def environment(**extra: str) -> dict[str, str]:
    """This process's, without what a launcher of the test run itself may have set."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RING_CONFIG", "PYTHONPATH")
    kept = {
        k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("TORCHELASTIC_", "HOSTRING_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **extra}


def run(command: list[str], folder: Path, seconds: float = 90, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run to the end, or kill the whole process group at the deadline."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} did not end within {seconds} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def script(folder: Path, body: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(body), encoding="utf-8")
    return str(path)


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


ONE_STEP = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("hostring")
    x = torch.full((4,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {x[0]:.0f}", flush=True)
    dist.destroy_process_group()
"""

# ---------------------------------------------------------------------- registration


def test_a_script_needs_no_import(tmp_path):
    done = run(torchrun("--standalone", "--nproc-per-node", "2", script(tmp_path, ONE_STEP)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of \d: \d+", done.stdout)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


def test_importing_torch_loads_nothing_of_the_core(tmp_path):
    program = "import sys, torch; print(sorted(m for m in sys.modules if m.startswith('hostring')))"
    done = run([sys.executable, "-c", program], tmp_path)
    folder = "hostring.integrations"
    loaded = ["hostring", folder, f"{folder}.torch_backend", "hostring.platforms", "hostring.torch_hook"]
    assert done.stdout.strip() == str(loaded)


@pytest.mark.parametrize(
    "imports", ["import torch, hostring", "import hostring, torch", "import hostring, torch.distributed.tensor"]
)
def test_importing_hostring_registers_whichever_comes_first(tmp_path, imports):
    """Without torch's entry points, as when hostring is not installed but only on the path."""
    program = (
        f"{imports}\nimport torch.distributed as dist\n"
        "print(dist.is_backend_available('hostring'), dist.Backend.default_device_backend_map)"
    )
    done = run([sys.executable, "-c", program], tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.strip() == "True {'cpu': 'gloo', 'cuda': 'nccl', 'xpu': 'xccl', 'mps': 'gloo'}", done.stderr


def test_importing_hostring_does_not_import_torch(tmp_path):
    done = run([sys.executable, "-c", "import sys, hostring; hostring.init(); print('torch' in sys.modules)"], tmp_path)
    assert done.stdout.strip() == "False", done.stderr


def test_a_map_that_gives_another_device_to_another_backend(tmp_path):
    """Up to torch 2.13 it is refused; from 2.14 on both work."""
    from hostring.integrations.torch_pg.torch_versions import HAS_PYTHON_BACKENDS

    path = script(tmp_path, ONE_STEP.replace('"hostring"', '"cpu:hostring,cuda:gloo"'))
    done = run(torchrun("--standalone", "--nproc-per-node", "2", path), tmp_path)
    if HAS_PYTHON_BACKENDS:
        assert sorted(re.findall(r"rank \d of \d: \d+", done.stdout)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"], (
            done.stderr
        )
    else:
        assert "cuda:gloo was asked for; use 'hostring' for all devices" in done.stderr


@pytest.mark.skipif(mpi("mpich", "mpiexec.hydra") is None, reason="MPICH is not installed")
def test_mpirun(tmp_path):
    """A launcher that torch doesn't know: hostring's rendezvous does."""
    path = script(tmp_path, ONE_STEP.replace('("hostring")', '("hostring", init_method="hostring://")'))
    done = run(
        [str(mpi("mpich", "mpiexec.hydra")), "-n", "2", sys.executable, path], tmp_path, XDG_RUNTIME_DIR=str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d of \d: \d+", done.stdout)) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


# ---------------------------------------------------------------------- ends


def test_a_process_may_end_without_destroying_the_group(tmp_path):
    """Also with a message that nobody will answer, a queued collective, and callbacks pending."""
    body = """
        import torch
        import torch.distributed as dist

        dist.init_process_group("hostring")
        x = torch.ones(4)
        dist.all_reduce(x)
        dist.irecv(torch.zeros(4), 1 - dist.get_rank(), tag=5)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda f: None)
        print("end", flush=True)
    """
    started = time.monotonic()
    done = run(torchrun("--standalone", "--nproc-per-node", "2", script(tmp_path, body)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("end") == 2
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 60


def test_a_killed_worker_is_restarted_and_the_group_works_again(tmp_path):
    body = f"""
        import os, signal
        import torch
        import torch.distributed as dist

        attempt, flag = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), {str(tmp_path / "killed")!r}
        dist.init_process_group("hostring")
        rank = dist.get_rank()
        x = torch.full((1000,), rank + 1.0)
        for step in range(5):
            if attempt == 0 and rank == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            y = x.clone()
            dist.all_reduce(y)
        print(f"attempt {{attempt}} rank {{rank}}: {{y[0]:.0f}}", flush=True)
        dist.destroy_process_group()
    """
    done = run(
        torchrun("--nproc-per-node", "2", "--max-restarts", "1", "--master-port", free_port(), script(tmp_path, body)),
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"attempt \d rank \d: \d+", done.stdout)) == ["attempt 1 rank 0: 3", "attempt 1 rank 1: 3"]
    assert "rank 1 is lost" in done.stderr or "SIGKILL" in done.stderr


# ---------------------------------------------------------------------- two nodes


def _start_node(node, name, path):
    """torchrun's two workers of one of two nodes, in the network namespace `name`."""
    nodes = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2"]
    command = torchrun(*nodes, "--master-addr", "10.97.0.1", "--master-port", "29571", path)
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_nodes(hosts: Hosts, tmp_path):
    """torchrun on two hosts, each of two workers; links go over the interface that leads to the other host."""
    addresses = "sorted({host for m in dist.group.WORLD.comm.session.group.peer_infos for host, _ in m.addresses})"
    body = ONE_STEP.replace("dist.destroy_process_group()", f'print("addresses " + str({addresses}), flush=True)')
    path = script(tmp_path, body)
    running = [_start_node(node, name, path) for node, name in enumerate(hosts.names.values())]
    output = ""
    try:
        for process in running:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            output += out
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert sorted(re.findall(r"rank \d of \d: \d+", output)) == [f"rank {r} of 4: 10" for r in range(4)]
    found = set(re.findall(r"addresses \[.*?\]", output))
    assert len(found) == 1  # all ranks know the same, and offer the way to the other host
    (addresses,) = found
    assert "10.97.0.1" in addresses
    assert "10.97.0.2" in addresses
