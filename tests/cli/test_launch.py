from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launched import ADD_UP, script

from hostring.launch.ranks import launch
from hostring.launch.restarts import Rejoining

pytestmark = pytest.mark.faults


FAIL = """
import os, signal, sys, time
rank, what = int(os.environ["RANK"]), sys.argv[1]
if rank == 1:
    time.sleep(0.3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(7)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", os.getpid(), flush=True)
time.sleep(60)
"""

WAIT = """
import os, signal, sys, time
def leave(number, frame):
    os.write(1, f"{os.environ['RANK']} got {signal.Signals(number).name}\\n".encode())  # print may be under way
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, leave)
print("ready", flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "Z" in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]


def run_launch(n: int, *argv: str, prefix: bool = False, grace: float = 5.0) -> subprocess.Popen[str]:
    call = f"launch(sys.argv[1:], {n}, prefix_output={prefix}, grace={grace})"
    code = f"import sys; from hostring.launch.ranks import launch; sys.exit({call})"
    environment = {
        k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"
    }  # with it, each word is a write of its own
    return subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment,
    )


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_meet_without_any_configuration(n: int, tmp_path: Path) -> None:
    done = run_launch(n, script(tmp_path, ADD_UP), "some", "arguments")
    out, err = done.communicate(timeout=90)
    assert done.returncode == 0, err
    assert sorted(out.splitlines()) == [f"{r} of {n}: {'1' * n} some arguments" for r in range(n)]


def test_lines_are_prefixed_with_their_rank(tmp_path: Path) -> None:
    text = "import sys; print('out'); print('err', file=sys.stderr); print('no newline', end='')"
    done = run_launch(2, script(tmp_path, text), prefix=True)
    out, err = done.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["[0] no newline", "[0] out", "[1] no newline", "[1] out"]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err"]


def test_a_module_can_be_launched() -> None:
    done = run_launch(2, "-m", "this")
    out, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert out.count("The Zen of Python") == 2


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [("exit", 7, "exited with code 7"), ("kill", 137, "was killed by SIGKILL"), ("stubborn", 7, "exited with code 7")],
)
def test_a_failing_rank_ends_the_others_and_is_named(what: str, code: int, words: str, tmp_path: Path) -> None:
    started = time.monotonic()
    done = run_launch(3, script(tmp_path, FAIL), what, grace=0.5)
    out, err = done.communicate(timeout=60)
    assert done.returncode == code
    assert "hostring: rank 1 (process " in err
    assert f"{words}; stopping the 2 that still run" in err
    assert time.monotonic() - started < 20
    pids = [int(line.split()[1]) for line in out.splitlines()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_rank_that_dies_in_a_collective_is_named_by_the_others_too(tmp_path: Path) -> None:
    suicide = "\n    import os\n    if comm.rank == 1: os.kill(os.getpid(), 9)\n    comm.barrier()"
    text = ADD_UP.replace("    comm.all_reduce(x)", "    comm.all_reduce(x)" + suicide)
    done = run_launch(3, script(tmp_path, text))
    _, err = done.communicate(timeout=90)
    assert done.returncode == 137
    assert "rank 1 (process" in err
    assert err.count("PeerLostError: rank 1 is lost") >= 2


@pytest.mark.parametrize(
    ("number", "received", "code"),
    [(signal.SIGINT, "SIGINT", 130), (signal.SIGTERM, "SIGTERM", 143), (signal.SIGHUP, "SIGTERM", 129)],
)
def test_signals_are_passed_on(number: signal.Signals, received: str, code: int, tmp_path: Path) -> None:
    running = run_launch(2, script(tmp_path, WAIT))
    assert running.stdout is not None
    lines = [running.stdout.readline(), running.stdout.readline()]
    assert lines == ["ready\n", "ready\n"]
    running.send_signal(number)
    out, _ = running.communicate(timeout=30)
    assert sorted(out.splitlines()) == [f"0 got {received}", f"1 got {received}"]
    assert running.returncode == code


def test_what_a_rank_leaves_behind_is_ended_too(tmp_path: Path) -> None:
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    text = f"import subprocess, sys; print({sleeper}.pid, flush=True)"
    done = run_launch(1, script(tmp_path, text))
    assert done.stdout is not None
    pid = int(done.stdout.readline())
    done.communicate(timeout=30)
    assert done.returncode == 0
    end = time.monotonic() + 5
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    text = "import hostring, os, time; c = hostring.init(timeout=60); print(os.getpid(), flush=True); time.sleep(60)"
    running = run_launch(2, script(tmp_path, text))
    assert running.stdout is not None
    pids = [int(running.stdout.readline()) for _ in range(2)]
    running.kill()
    end = time.monotonic() + 10
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    running.communicate(timeout=30)
    assert not left


def test_the_environment_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "RING_CONFIG",
        "EXTRA",
        "OMP_NUM_THREADS",
    ]
    secret = "os.environ['HOSTRING_SECRET']"
    text = f"import os, sys; print([os.environ.get(n) for n in {names}], len({secret}), {secret} in sys.argv)"
    monkeypatch.setenv("RING_CONFIG", "/nowhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launch([script(tmp_path, text)], 1, env={"EXTRA": "yes"}) == 0
    out = capfd.readouterr().out
    assert out == "['0', '1', '0', '1', '127.0.0.1', None, 'yes', '3'] 64 False\n"


def test_launching_from_a_thread_leaves_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, "pass")
    codes: list[int] = []
    launch([path], 1)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    handler = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: codes.append(launch([path], 2, prefix_output=True)))
    thread.start()
    thread.join(60)
    launch([path], 1)
    assert codes == [0]
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_nothing_to_launch_is_refused() -> None:
    with pytest.raises(ValueError, match="argv is empty"):
        launch([], 2)
    with pytest.raises(ValueError, match="n=0: at least one rank"):
        launch(["x.py"], 0)


BACK = """
import os
import sys
import numpy as np
import hostring
with hostring.init(timeout=30) as comm:
    if os.environ.get("HOSTRING_REJOIN") != "1":
        try:
            comm.barrier()  # now all are in the group
            if comm.rank == 1:
                sys.exit(7)
            comm.barrier()
        except hostring.HostringError:
            comm = comm.rebuild(min_ranks=3)
    x = np.array([10.0 ** comm.rank], np.float32)
    comm.all_reduce(x)
    os.write(1, f"{comm.rank} of {comm.world_size}: {x[0]:.0f}\\n".encode())  # in one piece
    comm.close()
"""


def test_a_failed_rank_is_started_again_to_rejoin(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hostring", "launch", "-n", "3", "--rejoin", "1", script(tmp_path, BACK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} of 3: 111" for rank in range(3)]
    assert "rank 1 exited with code 7; it is started again, 0 more times at most" in done.stderr


def test_ranks_are_started_again_so_often_and_rank_0_never(caplog: pytest.LogCaptureFixture) -> None:
    rejoining = Rejoining(2)
    assert [rejoining.again(rank, "ended") for rank in (0, 1, 2, 1)] == [False, True, True, False]
    assert rejoining.stuck() == ()
    assert len(caplog.records) == 2
