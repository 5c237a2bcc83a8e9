"""The figures of a run as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from hostring.integrations.llm.demo.verdict import kind
from hostring.integrations.llm.stats import waits_most_for

_FIGURES = (
    ("decode tokens/s", "decode_tokens_per_s", "{:,.1f}"),
    ("prefill tokens/s", "prefill_tokens_per_s", "{:,.1f}"),
)


def of(result: dict[str, Any]) -> Iterator[Table]:
    """Speed, traffic and time."""
    yield _runs(result)
    yield _traffic(result)
    if any(r["seconds"] for r in result["per_rank"]):
        yield _time(result)


def headline(result: dict[str, Any]) -> str:
    how = "greedy" if result["temperature"] == 0 else f"temperature {result['temperature']:g}, seed {result['seed']}"
    per_step = result["tokens_per_step"] or 1.0
    guessed = "" if per_step == 1 else f", {per_step:.2f} tokens per round trip"
    return (
        f"\n{result['ranks']} ranks, topology {result['topology']}, order {result['order']}; "
        f"{result['prompt_tokens']} prompt tokens, "
        f"{len(result['tokens'])} generated ({how}){guessed}"
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
    """Where the decode steps' time went. "rest" is neither computing nor a collective: choosing, printing, counting."""
    phases = ("compute", "stage", "wait", "transfer", "fold", "rest")
    steps = max(1, len(result["tokens"]) - 1)
    table = _table("\nµs per decoded token", *(f"\n{phase}" for phase in phases), "\nwaits most for")
    waits = {r["rank"]: {int(peer): s for peer, s in r["waited_for"].items()} for r in result["per_rank"]}
    for r in result["per_rank"]:
        peer, seconds = waits_most_for(r["rank"], waits)
        whom = "-" if peer is None else f"rank {peer} {1e6 * seconds / steps:,.0f}"
        table.add_row(
            _rank(r, result), *(f"{1e6 * r['seconds'].get(phase, 0.0) / steps:,.0f}" for phase in phases), whom
        )
    return table


def hashes(result: dict[str, Any]) -> str:
    names = [_rank(r, result) for r in result["per_rank"]]
    width = max(16, *map(len, names))
    lines = [f"{name:{width}}  {r['activation_sha256']}" for name, r in zip(names, result["per_rank"], strict=True)]
    if logits := result.get("logits_sha256"):
        lines += ["\n[bold]sha256 of all logits, the same for any number of ranks[/]", f"{'':{width}}  {logits}"]
    return "\n".join(["\n[bold]sha256 of all reduced activations[/]", *lines, ""])


def _rank(report: dict[str, Any], result: dict[str, Any]) -> str:
    return f"rank {report['rank']} {kind(report, result['devices'])}"
