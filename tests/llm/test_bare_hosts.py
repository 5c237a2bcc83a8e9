"""Two hosts, one of them bare: the head sends what it needs, over a link that breaks, and through restarts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_networks import can_cut, cut, ip, network

from hostring.integrations.llm.checkpoint.hf_config import config_from_hf
from hostring.integrations.llm.checkpoint.whole_model import save_hf
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.integrations.llm.model.qwen import Decoder

WHY_NOT = can_cut()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults,
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(not all(map(shutil.which, ("tc", "unshare"))), reason="needs tc and unshare"),
    pytest.mark.timeout(900),
]
DEADLINE_S = 150.0
RATE = "qdisc add dev net0 root tbf rate 40mbit burst 64kb latency 400ms"
HALF = 15_000_000
_ASK = """
import json, sys, urllib.request
body = json.dumps({"prompt": "In the beginning", "max_tokens": 6, "temperature": 0}).encode()
print(urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/v1/completions", body), timeout=60).read().decode())
"""
_SEE = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1] + '/cluster', timeout=60).read().decode())"


def wide_model(folder: Path) -> Path:
    """The bundled tokenizer with a random model of about 65 MB."""
    fields = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    fields |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    fields |= {"num_key_value_heads": 4, "head_dim": 64}
    torch.manual_seed(7)
    model = Decoder(config_from_hf(folder / "config.json", fields), 128)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05)
    save_hf(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return folder


class Host:
    """One side of a network, with a home of its own."""

    def __init__(self, network: str, side: str, home: Path, without: Path | None = None) -> None:
        self.space, self._home, self._without = f"{network}-{side}", home, without
        self._running: list[subprocess.Popen[str]] = []
        home.mkdir()

    def start(self, *argv: str) -> tuple[subprocess.Popen[str], Path]:
        log = self._home / f"{len(self._running)}.log"
        hide = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{self._without}" && exec "$@"', "sh"]
        command = ["ip", "netns", "exec", self.space, *(hide if self._without else []), sys.executable, *argv]
        env = {**os.environ, "HOME": str(self._home), "XDG_CACHE_HOME": str(self._home / "cache")}
        with log.open("w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, env=env, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
        self._running.append(process)
        return process, log

    def ask(self, program: str, url: str) -> Any:
        command = ["ip", "netns", "exec", self.space, sys.executable, "-c", program, url]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout)

    def received(self) -> int:
        command = ["ip", "netns", "exec", self.space, "cat", "/sys/class/net/net0/statistics/rx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout)

    def rank(self) -> int:
        """The process of the rank that `cluster join` has started last."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                named = b"serve.joined" in (folder / "cmdline").read_bytes()
                if named and str(self._home).encode() in (folder / "environ").read_bytes():
                    return int(folder.name)
        return 0

    def end(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait(20)


def until(what: Callable[[], Any], *logs: Path) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < end, "\n\n".join(log.read_text(encoding="utf-8") for log in logs)
        time.sleep(0.002)
    return found


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host, Path, str]]:
    model = wide_model(tmp_path / "model")
    with network() as name, contextlib.ExitStack() as stack:
        head, bare = Host(name, "a", tmp_path / "head"), Host(name, "b", tmp_path / "bare", without=model)
        stack.callback(head.end)
        stack.callback(bare.end)
        yield head, bare, model, name


def serve(head: Host, model: Path, kept: Path) -> tuple[subprocess.Popen[str], Path]:
    how = ["--machines", "2", "--port", "8000", "--device", "cpu", "--token-file", str(kept)]
    return head.start("-m", "hostring", "serve", str(model), *how)


def join(bare: Host, kept: Path, log: Path) -> Path:
    token = until(lambda: kept.exists() and kept.read_text(encoding="utf-8").strip(), log)
    return bare.start("-m", "hostring", "cluster", "join", token, "--name", "bare", "--device", "cpu")[1]


def listening(*logs: Path) -> str:
    return str(until(lambda: re.search(r"listening on (http://\S+)", logs[0].read_text(encoding="utf-8")), *logs)[1])


def text(head: Host, url: str, *logs: Path) -> str:
    """An answer. While the group is being rebuilt, there is none."""

    def answer() -> Any:
        with contextlib.suppress(subprocess.CalledProcessError):
            return head.ask(_ASK, url)["choices"][0]["text"]

    return str(until(answer, *logs))


def arrived(head: Host, url: str) -> dict[str, int]:
    ranks = until(lambda: head.ask(_SEE, url)["ranks"])
    return dict(ranks[1]["arrived"])


def pieces(bare: Path) -> tuple[Path, list[list[Any]]]:
    """The record of the cache, where there is one, and what it holds."""
    for record in bare.rglob("pieces.jsonl"):
        return record, [
            json.loads(line)
            for line in record.read_text(encoding="utf-8").splitlines(keepends=True)
            if line[-1] == "\n"
        ]
    return bare, []


def test_a_bare_host_serves_its_part_whatever_breaks(hosts: Any, tmp_path: Path) -> None:
    head, bare, model, name = hosts
    subprocess.run(["tc", "-n", f"{name}-a", *RATE.split()], check=True, timeout=20)
    running, log = serve(head, model, tmp_path / "token")
    before = bare.received()
    theirs = join(bare, tmp_path / "token", log)
    until(lambda: sum(w * n for _, _, w, _, n, _ in pieces(tmp_path / "bare")[1]) > HALF, log, theirs)
    cut(name)
    time.sleep(3.0)
    assert "listening" not in log.read_text(encoding="utf-8")
    ip("-n", f"{name}-b", "link", "set", "net0", "up")
    url = listening(log, theirs)
    said, figures, wire = text(head, url, log, theirs), arrived(head, url), bare.received() - before
    assert said
    assert figures["planned"] == figures["read"] == figures["shipped"] + figures["cached"]
    assert figures["planned"] <= wire <= 1.1 * figures["planned"] + 1e6

    record, known = pieces(tmp_path / "bare")
    _, offset, *_ = next(piece for piece in known if piece[2] * piece[4] > 100_000)
    with next((record.parent / "model").glob("*.safetensors")).open("r+b") as file:
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 1]))
    os.kill(bare.rank(), signal.SIGKILL)
    until(lambda: "is damaged at byte" in theirs.read_text(encoding="utf-8"), log, theirs)
    until(lambda: head.ask(_SEE, url)["why_not"] == "", log, theirs)
    assert text(head, url, log, theirs) == said
    until(lambda: arrived(head, url)["damaged"] == 1, log, theirs)

    os.killpg(running.pid, signal.SIGKILL)
    running.wait(20)
    _, log = serve(head, model, tmp_path / "token")
    url = listening(log, theirs)
    assert text(head, url, log, theirs) == said
    assert arrived(head, url)["shipped"] == 0
