"""A process of the demo is lost in the middle of an answer: what was written stays, the rank is named, and the next
prompt is answered."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_jobs import PROMPTS
from ranks import in_threads
from running import Running

import hostring
from hostring.integrations.llm import Sampling, load_model
from hostring.integrations.llm.demo.job import BUNDLED
from hostring.launch.silence import DEFAULT_SILENCE_S

pytestmark = pytest.mark.faults

NOTICED = 2.0  # seconds from the death of a rank to the line that names it
MANY = 140  # takes a second or more, so that a rank can be ended in the middle
GREEDY = ("--dtypes", "f32", "--temperature", "0")


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


@pytest.mark.parametrize(
    ("dead", "plan"),
    [
        (2, "even"),
        pytest.param(1, "even", marks=pytest.mark.slow),
        *[pytest.param(dead, "pp=3", marks=pytest.mark.slow) for dead in (1, 2)],
    ],
)
def test_a_killed_rank_is_named_and_the_next_prompt_is_answered(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path, dead: int, plan: str
) -> None:
    file = tmp_path / "out.json"
    prompts = [arg for prompt in PROMPTS for arg in ("--prompt", prompt)]
    demo = run(
        "demo", "--ranks", "3", *GREEDY, "--no-controls", "--max-tokens", str(MANY), "--json", str(file),
        "--plan", plan, *prompts,
    )  # fmt: skip
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
    result = json.loads(file.read_text(encoding="utf-8"))
    check_answers(result, answers, dead)
    shown = demo.out.decode()
    assert PROMPTS[0] + result["turns"][0]["text"] + "\n" in shown  # the partial text is whole
    assert demo.err.decode().count("is lost") == 1  # one line names it
    assert "all 3 ranks are here again" in demo.err.decode()


def test_a_stopped_rank_is_ended_and_started_again(
    run: Callable[..., Running], answers: list[tuple[list[int], str]], tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    args = ("--no-controls", "--max-tokens", str(MANY), "--json", str(file))
    demo = run("demo", "--ranks", "3", *GREEDY, *args, *[arg for prompt in PROMPTS for arg in ("--prompt", prompt)])
    demo.wait_for(in_mid_answer)
    stopped = demo.rank(1)
    assert lose(demo, 1, signal.SIGSTOP) < DEFAULT_SILENCE_S + NOTICED
    assert demo.end() == 1, demo.shown()
    check_answers(json.loads(file.read_text(encoding="utf-8")), answers, 1)
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
    demo.say("/new\n" + PROMPTS[1] + "\n")
    demo.wait_for(lambda out, err: answers[1][1] in out)
    demo.process.stdin.close()
    assert demo.end() == 0, demo.shown()
    result = json.loads(file.read_text(encoding="utf-8"))
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
    result = json.loads(file.read_text(encoding="utf-8"))
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
    check_answers(json.loads(file.read_text(encoding="utf-8")), answers, 1)


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
    check_answers(json.loads(file.read_text(encoding="utf-8")), answers, 2)
