"""Where prompts come from, and who starts a lost rank again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from typing import Any

import pytest
from demo_jobs import PROMPTS, job

from hostring.integrations.llm.demo.monitor import RankMonitor
from hostring.integrations.llm.demo.prompts import Prompts
from hostring.integrations.llm.demo.rejoin import how_to_rejoin, nobody_restarts
from hostring.integrations.llm.demo.screen import Screen


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
    said = how_to_rejoin(2, 4, here, argv)
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
    joined = how_to_rejoin(2, 4, {**here, "HOSTRING_CLUSTER": "1"}, argv)
    assert "s3cret" not in joined
    expected = ["hostring", "cluster", "join", "TOKEN", "--again", "-m", "--", "hostring", *argv[1:]]
    assert shlex.split(joined.partition("    ")[2]) == expected
    assert "(its own --device, not this)" in how_to_rejoin(2, 4, here, [*argv, "--device=cuda"])
    assert not nobody_restarts(here)
    assert nobody_restarts({"HOSTRING_LAUNCH_REJOIN": "0"})
    assert "hostring launch starts it again" in how_to_rejoin(2, 4, {"HOSTRING_LAUNCH_REJOIN": "3"}, argv)


class Told(Screen):
    """Shows nothing."""

    def handle(self, rank: int, kind: str, value: Any) -> None:
        pass


def test_the_monitor_starts_again_whoever_can_still_be_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with Listener(("127.0.0.1", 0), authkey=b"k") as listener:
        monitor = RankMonitor(listener, Told(job(*PROMPTS)))
        lost = {"rank": 1, "waits": True}
        assert not monitor.again(1, "exited with code 1")  # it never was ready
        for rank in range(3):
            monitor.note(rank, "stage", "ready")
        monitor.note(0, "prompt", {"more": True})
        assert [monitor.again(1, "exited with code 1") for _ in range(4)] == [
            True,
            True,
            True,
            False,
        ]  # it never gets ready
        monitor.note(1, "stage", "ready")
        monitor.note(0, "lost", lost)
        assert monitor.stuck() == []
        monkeypatch.setattr("hostring.integrations.llm.demo.monitor.SILENCE_S", -1.0)
        assert monitor.stuck() == [1]
        monitor.note(1, "stage", "rebuilding")  # it lives: it was only slow
        assert monitor.stuck() == []
        monitor.note(0, "prompt", {"more": False})
        assert not monitor.again(2, "was killed by SIGKILL")
        assert not monitor.again(0, "was killed by SIGKILL")
        assert monitor.head_ended == "was killed by SIGKILL"
        monitor.finish()
