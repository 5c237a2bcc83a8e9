"""Ten seconds of the soak; `benchmarks/soak.py --minutes 20` is the long one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_random_deaths_never_make_a_result_wrong(tmp_path: Path) -> None:
    log = tmp_path / "ranks.log"
    command = [
        sys.executable,
        "benchmarks/soak.py",
        "--minutes",
        "0.17",
        "--ranks",
        "3",
        "--pause",
        "2",
        "--log",
        str(log),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, cwd=ROOT)
    last = done.stdout.strip().splitlines()[-1]
    found = {name: float(value) for name, value in re.findall(r"(\w+)=([\d.]+)", last)}
    said = log.read_text(errors="replace", encoding="utf-8")[-3000:]
    assert done.returncode == 0, f"{last}\n{said}"
    assert found["wrong"] == found["hangs"] == 0
    assert found["kills"] >= 1
    assert found["rejoins"] >= 1
    assert found["ops"] > 20
    before, after = re.findall(r"fds=(\d+)->(\d+)", last)[0]
    assert int(after) <= int(before) + 2
