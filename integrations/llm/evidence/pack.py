"""From what the ranks found to an evidence pack, and whether a pack is what it claims."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hostring.integrations.llm.demo.verdict import faults
from hostring.integrations.llm.evidence.cells import Cell, absent, measured, predicted, ratio, wrong

FORMAT = "hostring evidence 1"
_PHASES = ("stage", "wait", "transfer", "fold")  # of a collective
_COUNTS = ("collectives", "bytes")


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of a pack."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "schema.json").read_text(encoding="utf-8"))
    return found


def build(
    found: dict[str, Any], llama_cpp: dict[int, list[dict[str, Any]]] | str, about: dict[str, Any]
) -> dict[str, Any]:
    """A pack.

    Args:
        found: of `rank.run_rank`.
        llama_cpp: of `llama_cpp.measure`, by threads; or why it took no part.
        about: "command", "model", "host", "versions", "dtypes", "watts", "cost".
    """
    lengths = [_length(found, length) for length in dict.fromkeys(run["length"] for run in found["runs"])]
    alone = [_alone(control) for control in found["controls"]["one_rank"]]
    peers = (
        llama_cpp if isinstance(llama_cpp, str) else [_peer(t, one) for t, rows in llama_cpp.items() for one in rows]
    )
    ours, best = lengths[-1]["decode_tokens_per_s"], _best(alone, peers, lengths[-1]["prompt_tokens"])
    pack = {
        "format": FORMAT,
        **about,
        "group": found["group"] | {"compute": [r["dtype"] for r in found["runs"][0]["ranks"]]},
        "plan": found["plan"],
        "lengths": lengths,
        "regions": list(_regions(found)),
        "one_rank": alone,
        "same_dtype": _same_dtype(found["controls"]["same_dtype"]),
        "llama_cpp": absent(peers) if isinstance(peers, str) else peers,
        "best_single_node": best,
        "against_best_single_node": ratio(ours, best["decode_tokens_per_s"], "times"),
        "scaling_efficiency": _efficiency(ours, alone, found["group"]["ranks"]),
        "outputs": [_output(run) for run in found["runs"]],
    }
    pack["faults"] = faults_of(pack, found["controls"])
    pack["valid"] = not pack["faults"]
    pack["promoted"], pack["promotion"] = promotion(pack)
    check(pack)
    return pack


def check(pack: dict[str, Any]) -> None:
    """Refuse a pack whose cells were filled by hand, or that claims more than it shows.

    Raises:
        ValueError: says which cell or claim, and why.
    """
    import jsonschema

    try:
        jsonschema.validate(pack, schema())
    except jsonschema.ValidationError as exc:
        raise ValueError(f"the pack is not as its schema says, at {exc.json_path}: {exc.message[:300]}") from None
    for where, cell in cells(pack):
        if why := wrong(cell):
            raise ValueError(f"{where} was not measured so: {why}")
    if pack["valid"] and (found := [*pack["faults"], *_faults_of_outputs(pack)]):
        raise ValueError(f"the pack says that it is valid, and is not: {found[0]}")
    if pack["promoted"] and not promotion(pack)[0]:
        raise ValueError(f"the pack says that it is promoted, and is not: {promotion(pack)[1]}")


def cells(node: Any, where: str = "$") -> Iterator[tuple[str, Cell]]:
    """Every cell of a pack, with its place."""
    if isinstance(node, dict):
        if "kind" in node:
            yield where, node
            return
        for name, value in node.items():
            yield from cells(value, f"{where}.{name}")
    elif isinstance(node, list):
        for n, value in enumerate(node):
            yield from cells(value, f"{where}[{n}]")


def promotion(pack: dict[str, Any]) -> tuple[bool, str]:
    """Whether the run is worth its ranks: valid, and at least as fast as the best single node."""
    against, best = pack["against_best_single_node"], pack["best_single_node"]["what"]
    if not pack["valid"]:
        return False, "not promoted: the run is not valid"
    if not isinstance(pack["llama_cpp"], list):
        return False, f"not promoted: llama.cpp on the same file was not measured ({pack['llama_cpp']['why']})"
    if against["kind"] == "absent":
        return False, f"not promoted: {against['why']}"
    if against["value"] < 1:
        return False, f"not promoted: {against['value']:.2f} times as fast as the best single node, {best}"
    return True, f"promoted: {against['value']:.2f} times as fast as the best single node, {best}"


def faults_of(pack: dict[str, Any], controls: dict[str, Any]) -> list[str]:
    """What makes the run invalid."""
    found = _faults_of_outputs(pack)
    last = pack["outputs"][-1]
    result = {"per_rank": [], "activation_sha256": [], "controls": controls, "ranks": pack["group"]["ranks"]}
    return found + faults(result | {"logits_sha256": last["logits_sha256"]})


def _faults_of_outputs(pack: dict[str, Any]) -> list[str]:
    """Counts that the schedules don't explain, hashes that differ between ranks, or between rounds of one prompt."""
    found: list[str] = []
    tokens: dict[int, set[str]] = {}
    for n, output in enumerate(pack["outputs"]):
        hashes = [r["activation_sha256"] for r in output["ranks"]]
        result = {"per_rank": output["ranks"], "activation_sha256": hashes, "controls": {}}
        found += [f"prompt {n} of {output['prompt_tokens']} tokens: {fault}" for fault in faults(result)]
        tokens.setdefault(output["prompt_tokens"], set()).add(output["tokens_sha256"])
    return found + [f"{n} tokens of prompt gave {len(t)} different answers" for n, t in tokens.items() if len(t) > 1]


def _length(found: dict[str, Any], length: int) -> dict[str, Any]:
    """The figures of one prompt length."""
    runs = [run for run in found["runs"] if run["length"] == length]
    stats = [run["stats"] for run in runs]
    rate = _rate([s["decode_tokens_per_s"] for s in stats], "tokens/s")
    told = (found["planned"].get("predicted") or {}) if found["planned"] else {}
    return {
        "prompt_tokens": length,
        "generated_tokens": stats[0]["generated_tokens"],
        "decode_tokens_per_s": rate,
        "predicted_decode_tokens_per_s": _predicted(told.get("decode_tokens_per_s")),
        "prefill_tokens_per_s": _rate([s["prefill_tokens_per_s"] for s in stats], "tokens/s"),
        "predicted_prefill_tokens_per_s": _predicted(told.get("prefill_tokens_per_s")),
        "ttft_s": _rate([s["ttft_s"] for s in stats], "s"),
        "collective_fraction": _of_all_ranks(runs, lambda s: _share(s, _PHASES)),
        "exposed_transfer_s_per_token": _of_all_ranks(runs, lambda s: _per_token(s, ("wait", "transfer")), "s"),
        "hidden_transfer_s_per_token": absent("reductions of decoding are never beside computing, so none is hidden"),
    }


def _rate(samples: Sequence[float | None], unit: str) -> Cell:
    try:
        return measured(samples, unit)
    except ValueError:
        return absent("a single token has no decode rate")


def _predicted(told: Any) -> Cell:
    return (
        absent("the plan predicts nothing: use --plan auto") if not told else predicted(told["predicted"], told["unit"])
    )


def _of_all_ranks(runs: Sequence[dict[str, Any]], of: Any, unit: str = "of the time") -> Cell:
    """The mean over ranks, a sample per round."""
    samples = []
    for run in runs:
        each = [of(report) for report in run["ranks"]]
        if any(one is None for one in each):
            return absent("a single token has no decode step")
        samples.append(sum(each) / len(each))
    return measured(samples, unit)


def _share(report: dict[str, Any], phases: Sequence[str]) -> float | None:
    seconds = report["seconds"]
    return sum(seconds.get(p, 0.0) for p in phases) / sum(seconds.values()) if seconds else None


def _per_token(report: dict[str, Any], phases: Sequence[str]) -> float | None:
    steps = report["generated_tokens"] - 1
    return sum(report["seconds"].get(p, 0.0) for p in phases) / steps if steps > 0 else None


def _regions(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rank, regions in enumerate(found["regions"]):
        for name, seconds in regions.items():
            yield {
                "rank": rank,
                "region": name,
                "compute_s_per_token": measured(seconds["compute"], "s"),
                "reduce_s_per_token": measured(seconds["reduce"], "s"),
                "predicted_s_per_token": absent("the plan predicts lanes, not regions of a run"),
            }


def _alone(control: dict[str, Any]) -> dict[str, Any]:
    names = {"decode_tokens_per_s": "tokens/s", "prefill_tokens_per_s": "tokens/s"}
    figures = {name: _rate([control[name]], unit) for name, unit in names.items()}
    about = {name: control[name] for name in ("rank", "dtype", "device", "tokens_in_common", "logits_sha256")}
    return about | figures


def _same_dtype(control: dict[str, Any]) -> dict[str, Any]:
    same = {name: control[name] for name in ("dtype", "is_the_run_itself", "activation_sha256", "tokens_in_common")}
    return same | {"decode_tokens_per_s": _rate([control["decode_tokens_per_s"]], "tokens/s")}


def _peer(threads: int, one: dict[str, Any]) -> dict[str, Any]:
    rates = {f"{name}_tokens_per_s": measured(one[name], "tokens/s") for name in ("decode", "prefill")}
    return {"threads": threads, "prompt_tokens": one["length"], **rates}


def _best(alone: list[dict[str, Any]], peers: list[dict[str, Any]] | str, length: int) -> dict[str, Any]:
    """The fastest single node: hostring on one rank, or llama.cpp on as many threads as were tried."""
    offers = [(f"hostring on one rank ({a['dtype']})", a["decode_tokens_per_s"]) for a in alone]
    if not isinstance(peers, str):
        at = [p for p in peers if p["prompt_tokens"] == length]
        offers += [
            (f"llama.cpp on {p['threads']} thread{'s' * (p['threads'] > 1)}", p["decode_tokens_per_s"]) for p in at
        ]
    offers = [offer for offer in offers if offer[1]["kind"] == "measured"]
    if not offers:
        return {"what": "none was measured", "decode_tokens_per_s": absent("no single node was measured")}
    what, cell = max(offers, key=lambda offer: float(offer[1]["value"]))
    return {"what": what, "decode_tokens_per_s": cell}


def _efficiency(ours: Cell, alone: list[dict[str, Any]], ranks: int) -> Cell:
    """Tokens per second of a rank, beside what the fastest rank makes alone."""
    rates = [a["decode_tokens_per_s"] for a in alone if a["decode_tokens_per_s"]["kind"] == "measured"]
    if not rates:
        return absent("no rank was measured alone")
    best = max(rates, key=lambda cell: float(cell["value"]))
    return ratio(ours, {**best, "kind": "derived", "value": best["value"] * ranks}, f"of {ranks} times one rank alone")


def _output(run: dict[str, Any]) -> dict[str, Any]:
    """Counts and hashes of one answer."""
    phases = [f"{prefix}prefill_{what}" for what in _COUNTS for prefix in ("", "expected_")]
    phases += [f"{prefix}{what}_per_token" for what in _COUNTS for prefix in ("", "expected_")]
    names = ("rank", "activation_sha256", "wrong_steps", *phases)
    return {
        "prompt_tokens": run["length"],
        "tokens_sha256": hashlib.sha256(json.dumps(run["tokens"]).encode()).hexdigest(),
        "logits_sha256": run["stats"]["logits_sha256"],
        "ranks": [{name: report[name] for name in names} for report in run["ranks"]],
    }
