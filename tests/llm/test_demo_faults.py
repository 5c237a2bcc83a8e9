"""A rank is lost in the middle of an answer: what was written stays, the rank is named, and the next prompt is answered."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from ranks import in_threads

import hostring
from hostring.group.rendezvous import MemoryStore
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.demo.board import Board
from hostring.integrations.llm.demo.job import BUNDLED, Job
from hostring.integrations.llm.demo.prompts import Prompts
from hostring.integrations.llm.demo.resume import how_to_come_back, nobody_restarts
from hostring.integrations.llm.demo.runs import measure
from hostring.integrations.llm.demo.screen import Screen

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
            found = self.changed.wait_for(
                lambda: what(self.out.decode(errors="replace"), self.err.decode(errors="replace")), left
            )
        assert found, self.shown()

    def rank(self, rank: int) -> int:
        """The process of a rank of this command, which is its child."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == self.process.pid and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(
                        b"\0"
                    ):
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

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def stop(self) -> None:
        for pipe in filter(None, [self.process.stdin]):
            pipe.close()
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
    demo = run(
        "demo", "--ranks", "3", *GREEDY, "--no-controls", "--max-tokens", str(MANY), "--json", str(file), *prompts
    )
    demo.wait_for(in_mid_answer)
    head, others = demo.rank(0), {rank: demo.rank(rank) for rank in (1, 2)}
    assert lose(demo, dead, signal.SIGKILL) < NOTICED
    demo.wait_for(
        lambda out, err: f"waiting up to 300 s for rank {dead} (float32) to come back; it is started again" in err
    )
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


def test_a_stopped_rank_is_ended_and_started_again(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path
) -> None:
    file, timeout = tmp_path / "out.json", 5.0
    args = ("--no-controls", "--max-tokens", str(MANY), "--json", str(file), "--timeout", str(timeout))
    demo = run("demo", "--ranks", "3", *GREEDY, *args, *[arg for prompt in PROMPTS for arg in ("--prompt", prompt)])
    demo.wait_for(in_mid_answer)
    stopped = demo.rank(1)
    assert lose(demo, 1, signal.SIGSTOP) < timeout + NOTICED
    assert demo.end() == 1, demo.shown()
    check_answers(json.loads(file.read_text()), answers, 1)
    assert not Path(f"/proc/{stopped}").exists()


def test_a_rank_that_dies_between_prompts_costs_no_answer(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    args = ("--chat", "--max-tokens", str(MANY), "--json", str(file))
    demo = run("demo", "--ranks", "3", *GREEDY, *args, stdin=subprocess.PIPE)
    demo.say(PROMPTS[0] + "\n")
    demo.wait_for(lambda out, err: answers[0][1] in out)
    before = time.monotonic()
    os.kill(demo.rank(2), signal.SIGKILL)
    demo.wait_for(lambda out, err: "rank 2 (float32) is lost" in err)
    assert time.monotonic() - before < NOTICED + 1  # the head speaks once a second
    demo.say(PROMPTS[1] + "\n")
    demo.wait_for(lambda out, err: answers[1][1] in out)
    demo.process.stdin.close()
    assert demo.end() == 0, demo.shown()
    result = json.loads(file.read_text())
    assert [(turn["tokens"], turn["text"]) for turn in result["turns"]] == answers
    assert result["controls"] == {}  # nobody waits for them after a talk


def test_the_death_of_the_head_ends_the_run_and_says_so(run: Callable[..., Running]) -> None:
    demo = run("demo", "--ranks", "3", *GREEDY, "--max-tokens", str(MANY), "--chat", stdin=subprocess.PIPE)
    demo.say(f"{PROMPTS[0]}\n{PROMPTS[1]}\n")
    demo.wait_for(in_mid_answer)
    os.kill(demo.rank(0), signal.SIGKILL)
    assert demo.end() == 1
    assert "rank 0, the head, was killed by SIGKILL; it holds the prompts, so the run ends here" in demo.err.decode()
    assert "rank 1: rank 0, the head, is lost" in demo.err.decode(), demo.shown()
    assert in_mid_answer(demo.out.decode(), "")


def test_the_only_prompt_keeps_its_partial_answer(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    demo = run("demo", "--ranks", "3", *GREEDY, "--max-tokens", str(MANY), "--json", str(file), "--prompt", PROMPTS[0])
    assert lose(demo, 2, signal.SIGKILL) < NOTICED
    assert demo.end() == 1
    result = json.loads(file.read_text())
    (turn,) = result["turns"]
    assert "rank 2 is lost" in result["error"]
    assert result["error"] in demo.err.decode()
    assert turn["lost"]["rank"] == 2
    assert turn["tokens"] == answers[0][0][: len(turn["tokens"])]
    assert turn["text"]
    assert PROMPTS[0] + turn["text"] in demo.out.decode()


def test_started_by_hand_a_rank_comes_back_by_the_line_that_is_printed(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path
) -> None:
    file, secret = tmp_path / "out.json", "known to the group alone"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "HOSTRING_SECRET": secret,
        "OMP_NUM_THREADS": "1",
    }
    args = ("generate", "--chat", "--temperature", "0", "--max-tokens", str(MANY), "--no-stats", "--json", str(file))
    head, dying, other = (
        run(*args, stdin=subprocess.PIPE if r == 0 else subprocess.DEVNULL, RANK=str(r), **place) for r in range(3)
    )
    head.say(PROMPTS[0] + "\n")
    head.wait_for(in_mid_answer)
    before = time.monotonic()
    dying.process.kill()
    head.wait_for(lambda out, err: "rank 1 (float32) is lost" in err)
    assert time.monotonic() - before < NOTICED
    head.wait_for(
        lambda out, err: "HOSTRING_REJOIN=1 " in err and err.partition("HOSTRING_REJOIN=1 ")[2].count("\n") > 0
    )
    line = next(line for line in head.err.decode().splitlines() if "HOSTRING_REJOIN=1" in line)
    assert secret not in head.shown()
    settings, _, rest = line.partition(" hostring ")
    words = dict(word.split("=", 1) for word in shlex.split(settings))
    assert (words["RANK"], words["WORLD_SIZE"], words["MASTER_PORT"]) == ("1", "3", port)
    assert shlex.split(rest) == list(args)
    back = run(*shlex.split(rest), **words, HOSTRING_SECRET=secret, OMP_NUM_THREADS="1")
    head.say(PROMPTS[1] + "\n")
    head.wait_for(lambda out, err: answers[1][1] in out)
    head.process.stdin.close()
    assert head.end() == 1, head.shown()  # an answer broke off
    assert (other.end(), back.end()) == (0, 0), other.shown() + back.shown()
    check_answers(json.loads(file.read_text()), answers, 1)


def test_hostring_launch_starts_ranks_again_when_it_is_told_to(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    args = ("--temperature", "0", "--max-tokens", str(MANY), "--no-stats", "--json", str(file))
    prompts = [arg for prompt in PROMPTS for arg in ("--prompt", prompt)]
    started = run("launch", "-n", "3", "--rejoin", "1", "-m", "hostring", "generate", *args, *prompts)
    assert lose(started, 2, signal.SIGKILL) < NOTICED
    assert started.end() == 1, started.shown()
    assert "hostring launch starts it again" in started.err.decode()
    check_answers(json.loads(file.read_text()), answers, 2)


# ------------------------------------------------------------------ ranks as threads


def job(*prompts: str, **changes: Any) -> Job:
    common = {
        "dtypes": ("float32",) * 3,
        "max_tokens": 24,
        "temperature": 0.0,
        "top_k": 40,
        "top_p": 0.95,
        "seed": 5,
        "controls": False,
    }
    return Job(model=str(BUNDLED), prompts=prompts, **{**common, **changes})


def silent(kind: str, value: Any) -> None:
    pass


def measured(what: Job) -> dict[str, Any]:
    """The figures of a run on ranks that are threads."""
    result = in_threads(what.ranks, lambda comm: measure(what, comm, silent))[0]
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_several_prompts_are_answered_as_if_each_were_alone(temperature: float) -> None:
    how = {"temperature": temperature, "dtypes": ("float16", "bfloat16")}
    alone = [measured(job(prompt, **how)) for prompt in PROMPTS]
    assert all("turns" not in result for result in alone)
    together = measured(job(*PROMPTS, PROMPTS[0], **how))
    turns = together.pop("turns")
    assert [turn["tokens"] for turn in turns] == [alone[i]["tokens"] for i in (0, 1, 0)]
    assert [turn["text"] for turn in turns] == [alone[i]["text"] for i in (0, 1, 0)]
    assert (
        together["activation_sha256"] == alone[0]["activation_sha256"]
    )  # figures of the last one, with an empty cache
    assert list(together) == list(alone[0])


def test_a_prompt_that_cant_be_answered_does_not_end_the_run() -> None:
    result = measured(job("so " * 600, PROMPTS[1]))
    first, second = result["turns"]
    assert (first["complete"], first["stop_reason"]) == (False, "refused")
    assert "don't fit the KV cache" in first["error"]
    assert second["tokens"] == measured(job(PROMPTS[1]))["tokens"]


@pytest.mark.parametrize("dead", [1, 2])
@pytest.mark.parametrize("topology", ["mesh", "ring", "star"])
def test_every_topology_goes_on(topology: str, dead: int) -> None:
    """Links end as those of a killed process; the one that comes back is a thread of its own."""
    store, gone, work = MemoryStore(), threading.Event(), job(*PROMPTS, patience=20.0)
    comms: dict[int, hostring.Comm] = {}
    told: list[tuple[str, Any]] = []
    results: dict[int, Any] = {}

    def tell(kind: str, value: Any) -> None:
        told.append((kind, value))
        if kind == "text" and not gone.is_set() and sum(k == "text" for k, _ in told) > 5:
            comms[dead].session.group.abort()
            gone.set()

    def body(who: int, rank: int, rejoins: bool) -> None:
        if rejoins:
            assert gone.wait(40)
        try:
            with hostring.init(
                rank, 3, store=store, transport="tcp", topology=topology, timeout=20, rejoin=rejoins
            ) as comm:
                comms.setdefault(rank, comm)
                stays = work if who != dead else replace(work, patience=0.0)
                results[who] = measure(stays, comm, tell if rank == 0 else silent)
        except Exception as exc:
            results[who] = exc

    threads = [
        threading.Thread(target=body, args=(*who, who[0] == 3), daemon=True)
        for who in ((0, 0), (1, 1), (2, 2), (3, dead))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), results
    assert isinstance(results.pop(dead), hostring.HostringError)
    result = results.pop(0)
    assert set(results.values()) == {None}, results
    first, second = result["turns"]
    assert first["lost"]["rank"] == dead
    assert 5 < len(first["tokens"]) < 24
    assert first["tokens"] == measured(job(PROMPTS[0]))["tokens"][: len(first["tokens"])]
    assert second["tokens"] == measured(job(PROMPTS[1]))["tokens"]
    assert [kind for kind, _ in told if kind in ("lost", "whole")] == ["lost", "whole"]


def test_a_rank_that_does_not_come_back_in_time_ends_the_run() -> None:
    store, work = MemoryStore(), job(*PROMPTS, dtypes=("float32",) * 2, patience=1.0)
    comms: dict[int, hostring.Comm] = {}
    lost: list[Any] = []

    def tell(kind: str, value: Any) -> None:
        if kind == "text":
            comms[1].session.group.abort()
        elif kind == "lost":
            lost.append(value)

    def body(comm: hostring.Comm) -> Any:
        comms[comm.rank] = comm
        comm.barrier()
        return measure(
            work if comm.rank == 0 else replace(work, patience=0.0), comm, tell if comm.rank == 0 else silent
        )

    result, other = in_threads(2, body, check=False, store=store, transport="tcp")
    assert isinstance(other, hostring.HostringError)
    assert "waited in vain for ranks to come back (1 here, at least 2 needed)" in result["error"]
    assert [turn["complete"] for turn in result["turns"]] == [False]
    assert result["turns"][0]["tokens"]
    assert (lost[0]["rank"], lost[0]["waits"]) == (1, True)


# ------------------------------------------------------------------ prompts, and the line to run


@pytest.fixture
def pipe() -> Iterator[tuple[int, Callable[[bytes], None], Callable[[], None]]]:
    reading, writing = os.pipe()
    opened = [reading, writing]

    def close() -> None:
        os.close(writing)
        opened.remove(writing)

    yield reading, lambda data: [os.write(writing, data)].clear(), close
    for fd in opened:
        os.close(fd)


def test_lines_are_prompts_as_they_come(pipe: Any) -> None:
    fd, write, close = pipe
    prompts = Prompts(("given",), fd)
    assert not prompts.interactive
    assert prompts.more
    assert prompts.next(0.0) == "given"
    assert prompts.next(0.01) is None
    assert prompts.more  # it may still come
    write(b"  one \r\n\n\n tw")
    assert prompts.next(5.0) == "one"
    assert prompts.next(0.01) is None
    write("o \u00e9\nthree\xff".encode("latin-1"))
    close()
    assert prompts.next(5.0) == "two \ufffd"
    assert prompts.more
    assert prompts.next(5.0) == "three\ufffd"
    assert not prompts.more
    with pytest.raises(EOFError):
        prompts.next(5.0)


def test_the_end_is_known_before_the_last_prompt_is_answered(pipe: Any) -> None:
    fd, write, close = pipe
    write(b"only\n\n")
    close()
    prompts = Prompts((), fd)
    assert prompts.next(5.0) == "only"
    assert not prompts.more


def test_a_closed_standard_input_holds_no_prompts() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    prompts = Prompts((), reading)
    assert not prompts.more


def test_who_starts_a_lost_rank_again() -> None:
    here = {
        "MASTER_ADDR": "fe80::1%eth0",
        "MASTER_PORT": "29500",
        "HOSTRING_SECRET": "s3cret",
        "HOSTRING_TOPOLOGY": "ring",
        "RANK": "0",
    }
    argv = ["/opt/x/bin/hostring", "generate", "--prompt", "it's a line\n"]
    said = how_to_come_back(2, 4, here, argv)
    assert "s3cret" not in said
    assert "HOSTRING_SECRET in its environment" in said
    line = said.partition("    ")[2]
    expected = [
        "HOSTRING_REJOIN=1",
        "RANK=2",
        "WORLD_SIZE=4",
        "MASTER_ADDR=fe80::1%eth0",
        "MASTER_PORT=29500",
        "HOSTRING_TOPOLOGY=ring",
    ]
    assert shlex.split(line) == [*expected, "hostring", *argv[1:]]
    joined = how_to_come_back(2, 4, {**here, "HOSTRING_CLUSTER": "1"}, argv)
    assert "s3cret" not in joined
    expected = ["hostring", "cluster", "join", "TOKEN", "--again", "-m", "--", "hostring", *argv[1:]]
    assert shlex.split(joined.partition("    ")[2]) == expected
    assert "(its own --device, not this)" in how_to_come_back(2, 4, here, [*argv, "--device=cuda"])
    assert not nobody_restarts(here)
    assert nobody_restarts({"HOSTRING_LAUNCH_REJOIN": "0"})
    assert "hostring launch starts it again" in how_to_come_back(2, 4, {"HOSTRING_LAUNCH_REJOIN": "3"}, argv)


class Told(Screen):
    """Shows nothing."""

    def handle(self, rank: int, kind: str, value: Any) -> None:
        pass


def test_the_board_starts_again_whoever_can_still_be_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(("127.0.0.1", 0), authkey=b"k") as listener:
        board = Board(listener, Told(job(*PROMPTS)))
        lost = {"rank": 1, "waits": True}
        assert not board.again(1, "exited with code 1")  # it never was ready
        for rank in range(3):
            board._note(rank, "stage", "ready")
        board._note(0, "prompt", {"more": True})
        assert [board.again(1, "exited with code 1") for _ in range(4)] == [
            True,
            True,
            True,
            False,
        ]  # it never gets ready
        board._note(1, "stage", "ready")
        board._note(0, "lost", lost)
        assert board.stuck() == []
        monkeypatch.setattr("hostring.integrations.llm.demo.board._STIRS_WITHIN", -1.0)
        assert board.stuck() == [1]
        board._note(1, "stage", "rebuilding")  # it lives: it was only slow
        assert board.stuck() == []
        board._note(0, "prompt", {"more": False})
        assert not board.again(2, "was killed by SIGKILL")
        assert not board.again(0, "was killed by SIGKILL")
        assert board.head_ended == "was killed by SIGKILL"
        board.finish()
