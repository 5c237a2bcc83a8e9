"""Whether a measured run is what it claims to be, and whether tensor parallelism paid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def kind(run: dict[str, Any], devices: Sequence[str]) -> str:
    """What a rank computes in, and on what, when not all of `devices` are CPUs."""
    return str(run["dtype"]) if set(devices) <= {"cpu"} else f"{run['dtype']} {run['device']}"


def faults(result: dict[str, Any]) -> list[str]:
    """What makes a run invalid: ranks that disagree, or traffic that the schedules don't explain. Empty for a valid
    run."""
    found: list[str] = []
    for report in result["per_rank"]:
        found += _uncounted(report)
        if report.get("wrong_steps"):
            found.append(
                f"rank {report['rank']}: {report['wrong_steps']} steps computed with something else than "
                f"what was reduced"
            )
    stages = [report.get("stage", 0) for report in result["per_rank"]]
    found += _differing("this run", result["activation_sha256"], stages)
    same = result["controls"].get("same_dtype")
    if same:
        found += _differing("the same-dtype control", same["activation_sha256"], stages)
    for alone in result["controls"].get("one_rank", ()):
        if alone.get("logits_sha256") not in (None, result.get("logits_sha256")):
            found.append(f"rank {alone['rank']} alone gives other logits than {result['ranks']} ranks")
    return found


def _uncounted(report: dict[str, Any]) -> list[str]:
    """Where the traffic of one rank is not what the schedules say, over the prompt and over the decoded tokens."""
    pairs = [
        (f"{what} over the prompt", report[f"prefill_{what}"], report[f"expected_prefill_{what}"])
        for what in ("collectives", "bytes")
    ]
    if report["bytes_per_token"] is not None:  # a single token has no decode step to count
        pairs += [
            (f"{what} per token", report[f"{what}_per_token"], report[f"expected_{what}_per_token"])
            for what in ("collectives", "bytes")
        ]
    return [
        f"rank {report['rank']}: {counted:g} {what} counted, {expected:g} expected"
        for what, counted, expected in pairs
        if counted != expected
    ]


def _differing(run: str, hashes: list[str], stages: list[int]) -> list[str]:
    """Ranks that reduced something else than the first rank of their stage."""
    firsts = [stages.index(stage) for stage in stages]
    return [
        f"{run}: rank {r} has reduced other activations than rank {first}"
        for r, first in enumerate(firsts)
        if hashes[r] != hashes[first]
    ]


def statement(result: dict[str, Any], split: str = "tensor parallelism") -> str:
    """One sentence: the run against the fastest of its ranks alone on the same machine."""
    alone = [c for c in result["controls"].get("one_rank", ()) if c["decode_tokens_per_s"]]
    ours = result["decode_tokens_per_s"]
    if not alone or not ours:
        return ""
    best = max(alone, key=lambda c: float(c["decode_tokens_per_s"]))
    ratio = ours / best["decode_tokens_per_s"]
    ranks = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    control = f"one rank alone in {kind(best, result.get('devices', ()))} {best['decode_tokens_per_s']:,.1f}"
    said = f"{ranks} decode {ours:,.1f} tokens/s, {control}: "
    if ratio >= 1.05:
        return said + f"{split} wins here, it is {ratio:.2f} times as fast."
    if ratio > 0.95:
        return said + f"{split} neither wins nor loses here."
    return said + f"{split} loses here, it is {ratio:.2f} times as fast. {_where(result['per_rank'])}".rstrip()


def prompt_statement(result: dict[str, Any], split: str, alone: Sequence[int]) -> str:
    """The same for ways that divide the prompt and not the decoding: the time to the first token, against the fastest
    of the ranks `alone` that could do it all."""
    runs = [run for run in result["controls"].get("one_rank", ()) if run["rank"] in alone and run["ttft_s"]]
    if not runs or not result["ttft_s"]:
        return ""
    best = min(runs, key=lambda run: float(run["ttft_s"]))
    ratio = best["ttft_s"] / result["ttft_s"]
    ours, control = (f"{1e3 * run['ttft_s']:,.1f}" for run in (result, best))
    said = f"first token after {ours} ms, of rank {best['rank']} alone {control}: "
    if 0.95 < ratio < 1.05:
        return said + f"{split} neither wins nor loses here."
    return said + f"{split} {'wins' if ratio >= 1.05 else 'loses'} here, it is {ratio:.2f} times as fast."


def _where(reports: list[dict[str, Any]]) -> str:
    """The share of the decode time that went into communication, on the rank where it is smallest. An accelerator
    can't tell."""
    if any(r.get("device", "cpu") != "cpu" for r in reports):
        return ""
    own = ("compute", "rest")
    shares = [
        1 - sum(r["seconds"].get(name, 0.0) for name in own) / sum(r["seconds"].values())
        for r in reports
        if r["seconds"]
    ]
    return (
        f"At least {100 * min(shares):.0f} % of the time of every rank is communication and waiting." if shares else ""
    )
