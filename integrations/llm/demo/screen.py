"""What people see of a run: who is there, the text as it comes, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

from hostring.integrations.llm.demo import tables
from hostring.integrations.llm.demo.job import Job

_NAMES = {
    "starting": "starting",
    "joining": "looking for the others",
    "loading": "loading",
    "ready": "ready",
    "rebuilding": "waiting",
    "missing": "missing",
}

_TABLE_COLUMNS = 200  # a narrow terminal folds lines; figures are never cut


class Screen:
    """Fed with what ranks tell, see `loop.Tell`. Used by one thread at a time.

    Args:
        job: what runs.
        starting: show which ranks are there until all are ready.
        summary: show the figures at the end.
        rejoins: what brings a lost rank back, in words.
    """

    def __init__(
        self, job: Job, *, starting: bool = True, summary: bool = True, rejoins: Callable[[int], str] | None = None
    ) -> None:
        self._job, self._starting, self._summary = job, starting, summary
        self._rejoins = rejoins or (lambda rank: "it is started again")
        self._console = Console(highlight=False)
        self._tables = Console(highlight=False, width=max(_TABLE_COLUMNS, self._console.width))
        self._aside = Console(highlight=False, stderr=True)  # what is neither text nor figures
        self._stages = ["missing"] * job.ranks
        self._status: Status | None = None
        self._in_line = False

    def __enter__(self) -> Screen:
        if self._starting:
            self._wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self._stop_status()

    def handle(self, rank: int, kind: str, value: Any) -> None:
        """One thing that `rank` tells."""
        if kind == "stage":
            self._stage(rank, value)
            return
        head_tells: dict[str, Callable[[Any], None]] = {
            "ask": self._ask,
            "prompt": self._prompt,
            "text": self._write,
            "answered": lambda value: self._end_line(),
            "restarted": lambda value: self._say("a new conversation"),
            "refused": lambda value: self._say(f"this prompt can't be answered: {value}"),
            "lost": self._lost,
            "whole": lambda value: self._say(f"all {self._job.ranks} ranks are here again"),
            "result": self._result,
        }
        if rank == 0:
            head_tells[kind](value)

    def _ask(self, value: None) -> None:
        self._end_line()
        self._write("> ")
        self._in_line = False  # whoever types ends it

    def _prompt(self, prompt: dict[str, Any]) -> None:
        if "number" in prompt:
            self._end_line()
            if not prompt["typed"] and not prompt["continued"]:
                self._write(f"> {prompt['text']}\n")
        if prompt["continued"]:
            self._write(prompt["text"])

    def _lost(self, loss: dict[str, Any]) -> None:
        rank, tokens = loss["rank"], loss["tokens"]
        who = "the group has failed" if rank is None else f"{self._named(rank)} is lost"
        kept = "" if tokens is None else f"; the answer stops after {tokens} tokens, which are kept"
        self._say(f"{who}: {loss['reason']}{kept}")
        if loss["waits"]:
            self._say(
                f"waiting up to {self._job.patience:g} s for {self._named(rank)} to come back; {self._rejoins(rank)}"
            )
            self._stages[rank] = "missing"
            if self._starting:
                self._wait()

    def _result(self, result: dict[str, Any]) -> None:
        self._stop_status()
        if self._summary:
            self._show(result)
        if "error" in result:
            self._say(f"the run ends here: {result['error']}")

    def _stage(self, rank: int, stage: str) -> None:
        if stage == "controls":
            if rank == 0:
                self._write("\n")
                self._status = self._console.status("the controls: one rank alone, and one dtype on all ranks")
                self._status.start()
            return
        self._stages[rank] = _NAMES[stage]
        if self._status is None:
            return
        self._status.update(self._who())
        if stage == "ready" and not self._console.is_terminal:
            self._console.print(f"{self._named(rank)}: ready")
        if set(self._stages) == {"ready"}:
            self._stop_status()

    def _wait(self) -> None:
        """Show who is there until all are ready."""
        self._status = self._console.status(self._who())
        self._status.start()

    def _named(self, rank: int) -> str:
        devices = self._job.devices
        known = [self._job.computes_in(rank), "" if set(devices) <= {"cpu"} else devices[rank]]
        words = ", ".join(filter(None, known))
        return f"rank {rank} ({words})" if words else f"rank {rank}"

    def _who(self) -> str:
        return ", ".join(f"{self._named(rank)}: {stage}" for rank, stage in enumerate(self._stages))

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _write(self, text: str) -> None:
        self._stop_status()
        sys.stdout.write(text)
        sys.stdout.flush()
        self._in_line = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._in_line:
            self._write("\n")

    def _say(self, text: str) -> None:
        """A line beside the text."""
        self._end_line()
        self._aside.print(text, markup=False, soft_wrap=True)

    def _show(self, result: dict[str, Any]) -> None:
        if not result["controls"]:
            self._write("\n")
        if not result["per_rank"]:  # no prompt was answered to the end
            return
        self._console.print(tables.headline(result), soft_wrap=True)
        for table in tables.of(result):
            self._tables.print(table)
        self._console.print(tables.hashes(result), soft_wrap=True)
        if result["statement"]:
            self._console.print(result["statement"], soft_wrap=True)
        for fault in result["faults"]:
            self._console.print(f"INVALID RUN: {fault}", style="bold red", markup=False, soft_wrap=True)
