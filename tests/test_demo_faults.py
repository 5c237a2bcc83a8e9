"""A rank is lost in the middle of an answer: what was written stays, the rank is named, and the next prompt is answered."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.comeback import how_to_come_back, nobody_restarts
from hostring.integrations.llm.job import BUNDLED
from hostring.integrations.llm.prompts import Prompts

DEADLINE = 100.0
NOTICED = 2.0  # seconds from the death of a rank to the line that names it
PROMPTS = ("In the beginning", "And God said unto them,")
MANY = 240  # takes seconds, so that a rank can be ended in the middle
GREEDY = ("--dtypes", "f32", "--temperature", "0")


class Running:
    """A command whose output is read as it comes. `env` is added to the environment."""

    def __init__(self, *args: str, stdin: int = subprocess.DEVNULL, **env: str) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hostring", *args],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self.out, self.err = bytearray(), bytearray()
        self.changed = threading.Condition()
        streams = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in streams]
        for reader in self.readers:
            reader.start()

    def _read(self, pipe: Any, into: bytearray) -> None:
        while chunk := os.read(pipe.fileno(), 4096):
            with self.changed:
                into += chunk
                self.changed.notify_all()
        pipe.close()

    def shown(self) -> str:
        return f"--- stdout\n{self.out.decode(errors='replace')}\n--- stderr\n{self.err.decode(errors='replace')}"

    def wait_for(self, what: Callable[[str, str], bool]) -> None:
        """Until `what(stdout, stderr)`."""
        with self.changed:
            left = self.started + DEADLINE - time.monotonic()
            found = self.changed.wait_for(lambda: what(self.out.decode(errors="replace"), self.err.decode(errors="replace")), left)
        assert found, self.shown()

    def rank(self, rank: int) -> int:
        """The process of a rank of this command, which is its child."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == self.process.pid and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        return int(entry.name)
                except OSError:
                    continue
        raise AssertionError(f"no process of rank {rank}\n{self.shown()}")

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        code = self.process.wait(max(0.1, self.started + DEADLINE - time.monotonic()))
        for reader in self.readers:
            reader.join(5)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # it ends its ranks
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture
def run() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*args: str, **kwargs: Any) -> Running:
        started.append(Running(*args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def undisturbed(comm: hostring.Comm) -> list[tuple[list[int], str]]:
    model = load_model(BUNDLED, comm)
    found = [model.generate(prompt, Sampling(temperature=0.0), max_tokens=MANY) for prompt in PROMPTS]
    return [(one.tokens, one.text) for one in found]


@pytest.fixture(scope="module")
def answers() -> list[tuple[list[int], str]]:
    """What three ranks, as threads of one process, answer to each prompt alone."""
    from conftest import in_threads

    found: list[list[tuple[list[int], str]]] = in_threads(3, undisturbed, timeout=60.0)
    return found[0]


def in_mid_answer(out: str, err: str) -> bool:
    return len(out.partition(PROMPTS[0])[2]) > 40


def lose(demo: Running, rank: int, number: int) -> float:
    """End or stop a rank in the middle of the first answer. Returns the seconds until it was named."""
    demo.wait_for(in_mid_answer)
    os.kill(demo.rank(rank), number)
    before = time.monotonic()
    demo.wait_for(lambda out, err: f"rank {rank} (float32) is lost" in err)
    return time.monotonic() - before


def check_answers(result: dict[str, Any], answers: list[tuple[list[int], str]], lost: int) -> None:
    """The first broke off, the second is whole."""
    first, second = result["turns"]
    assert (first["complete"], first["stop_reason"], first["lost"]["rank"]) == (False, "lost", lost)
    assert 0 < len(first["tokens"]) < MANY
    assert first["tokens"] == answers[0][0][: len(first["tokens"])]
    assert first["text"]
    assert answers[0][1].startswith(first["text"])
    assert (second["complete"], second["lost"]) == (True, None)
    assert (second["tokens"], second["text"]) == answers[1]
    assert (result["tokens"], result["text"]) == answers[1]  # the figures are those of the last whole answer
    assert result["faults"] == []
    assert "error" not in result


@pytest.mark.parametrize("dead", [1, 2])
def test_a_killed_rank_is_named_and_the_next_prompt_is_answered(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path, dead: int
) -> None:
    file = tmp_path / "out.json"
    prompts = [arg for prompt in PROMPTS for arg in ("--prompt", prompt)]
    demo = run("demo", "--ranks", "3", *GREEDY, "--no-controls", "--max-tokens", str(MANY), "--json", str(file), *prompts)
    demo.wait_for(in_mid_answer)
    head, others = demo.rank(0), {rank: demo.rank(rank) for rank in (1, 2)}
    assert lose(demo, dead, signal.SIGKILL) < NOTICED
    demo.wait_for(lambda out, err: f"waiting up to 300 s for rank {dead} (float32) to come back; it is started again" in err)
    demo.wait_for(lambda out, err: len(out.partition(PROMPTS[1])[2]) > 20)
    assert demo.rank(0) == head
    assert {rank for rank in others if demo.rank(rank) != others[rank]} == {dead}
    assert demo.end() == 1, demo.shown()  # an answer broke off
    result = json.loads(file.read_text())
    check_answers(result, answers, dead)
    shown = demo.out.decode()
    assert PROMPTS[0] + result["turns"][0]["text"] + "\n" in shown  # the partial text is whole
    assert demo.err.decode().count("is lost") == 1  # one line names it
    assert "all 3 ranks are here again" in demo.err.decode()
