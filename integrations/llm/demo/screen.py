"""What people see of a run: who is there, the text as it comes, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from hostring.integrations.llm.demo.job import Job
from hostring.integrations.llm.demo.verdict import kind

_NAMES = {
    "starting": "starting",
    "joining": "looking for the others",
    "loading": "loading",
    "ready": "ready",
    "rebuilding": "waiting",
    "missing": "missing",
}
_FIGURES = (
    ("decode tokens/s", "decode_tokens_per_s", "{:,.1f}"),
    ("prefill tokens/s", "prefill_tokens_per_s", "{:,.1f}"),
)


class Screen:
    """Fed with what ranks tell, see `runs.Tell`. Used by one thread at a time.

    Args:
        job: what runs.
        starting: show which ranks are there until all are ready.
        summary: show the figures at the end.
        comes_back: what makes a lost rank come back, in words.
    """

    def __init__(
        self, job: Job, *, starting: bool = True, summary: bool = True, comes_back: Callable[[int], str] | None = None
    ) -> None:
        self._job, self._starting, self._summary = job, starting, summary
        self._comes_back = comes_back or (lambda rank: "it is started again")
        self._console = Console(highlight=False)
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
                f"waiting up to {self._job.patience:g} s for {self._named(rank)} to come back; {self._comes_back(rank)}"
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
        on = "" if set(devices) <= {"cpu"} else f", {devices[rank]}"
        return f"rank {rank} ({self._job.dtypes[rank]}{on})"

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
        self._console.print(_headline(result), soft_wrap=True)
        self._console.print(_runs(result))
        self._console.print(_traffic(result))
        if any(r["seconds"] for r in result["per_rank"]):
            self._console.print(_time(result))
        self._console.print(_hashes(result), soft_wrap=True)
        if result["statement"]:
            self._console.print(result["statement"], soft_wrap=True)
        for fault in result["faults"]:
            self._console.print(f"INVALID RUN: {fault}", style="bold red", markup=False, soft_wrap=True)


def _headline(result: dict[str, Any]) -> str:
    how = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}, seed {result['seed']}"
    return (
        f"\n{result['ranks']} ranks, topology {result['topology']}, order {result['order']}; {result['prompt_tokens']} prompt tokens, "
        f"{len(result['tokens'])} generated ({how})"
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(title, no_wrap=True, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _runs(result: dict[str, Any]) -> Table:
    """The run beside its controls."""
    columns = [("\nthis run", result)]
    columns += [
        (f"rank {c['rank']} alone\n{kind(c, result['devices'])}", c) for c in result["controls"].get("one_rank", ())
    ]
    same = result["controls"].get("same_dtype")
    if same and not same["is_the_run_itself"]:
        columns.append((f"all ranks\n{same['dtype']}", same))
    table = _table("\nspeed", *(name for name, _ in columns))
    for name, key, form in _FIGURES:
        table.add_row(name, *("-" if run[key] is None else form.format(run[key]) for _, run in columns))
    table.add_row("time to first token, ms", *(f"{1000 * run['ttft_s']:.1f}" for _, run in columns))
    if len(columns) > 1:
        total = len(result["tokens"])
        table.add_row(
            "same tokens from the start", "", *(f"{run['tokens_in_common']} of {total}" for _, run in columns[1:])
        )
    return table


def _traffic(result: dict[str, Any]) -> Table:
    """Counted beside what the schedules say."""
    table = _table("\nper decoded token", "\ncollectives", "\nexpected", "\nbytes sent", "\nexpected")
    for r in result["per_rank"]:
        counted = (
            r["collectives_per_token"],
            r["expected_collectives_per_token"],
            r["bytes_per_token"],
            r["expected_bytes_per_token"],
        )
        table.add_row(_rank(r, result), *("-" if n is None else f"{n:,g}" if n < 1e5 else f"{n:,.0f}" for n in counted))
    return table


def _time(result: dict[str, Any]) -> Table:
    """Where the decode steps' time went. "compute" is all that is not in a collective."""
    phases = ("compute", "stage", "wait", "transfer", "fold")
    steps = max(1, len(result["tokens"]) - 1)
    table = _table("\nµs per decoded token", *(f"\n{phase}" for phase in phases), "\nwaits most for")
    for r in result["per_rank"]:
        peer, seconds = max(r["waited_for"].items(), key=lambda item: item[1], default=(None, 0.0))
        whom = f"rank {peer} {1e6 * seconds / steps:,.0f}" if seconds > 0 else "-"
        table.add_row(
            _rank(r, result), *(f"{1e6 * r['seconds'].get(phase, 0.0) / steps:,.0f}" for phase in phases), whom
        )
    return table


def _hashes(result: dict[str, Any]) -> str:
    names = [_rank(r, result) for r in result["per_rank"]]
    width = max(16, *map(len, names))
    lines = [f"{name:{width}}  {r['activation_sha256']}" for name, r in zip(names, result["per_rank"], strict=True)]
    return "\n".join(["\n[bold]sha256 of all reduced activations[/]", *lines, ""])


def _rank(report: dict[str, Any], result: dict[str, Any]) -> str:
    return f"rank {report['rank']} {kind(report, result['devices'])}"
