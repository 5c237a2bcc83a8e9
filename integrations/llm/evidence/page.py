"""A pack as one page of HTML: tables and plots, light and dark, without any request."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from hostring.integrations.llm.evidence.cells import Cell
from hostring.integrations.llm.evidence.charts import Bar, chart

MAX_QUIET_LOAD = 0.25  # processes per core before the run, above which its times are not to be believed

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5a6575; --paper: #ffffff; --line: #d8dee6;
  --ours: #2f6fb0; --wait: #e0a030; --other: #8a94a3; --good: #1d7a46; --bad: #b3372f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9f0; --soft: #9aa6b6; --paper: #141a22; --line: #303a47;
  --ours: #6aa9e8; --wait: #e7b65a; --other: #7b8798; --good: #5fc98c; --bad: #f0857c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
p.verdict { font-size: 1.05rem; } .good { color: var(--good); } .bad { color: var(--bad); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
table.about td, th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
.absent { color: var(--soft); font-style: italic; } code { font-size: .85em; overflow-wrap: anywhere; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); } svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 13px; } svg .name { text-anchor: end; } svg .value { fill: var(--soft); }
rect.ours { fill: var(--ours); } rect.other { fill: var(--other); } rect.split.part0 { fill: var(--ours); }
rect.split.part1 { fill: var(--wait); }
"""


def page(pack: dict[str, Any]) -> str:
    """The page of a checked pack."""
    model, group = pack["model"], pack["group"]
    compute = ", ".join(group["compute"])
    words = ("valid", "good") if pack["valid"] else ("not valid", "bad")
    promoted = "good" if pack["promoted"] else "bad"
    parts = [
        f"<h1>{escape(model['file'])} on {group['ranks']} ranks</h1>",
        f"<p>{escape(compute)}; topology {escape(group['topology'])}, order {escape(group['order'])}, "
        f"wire {escape(group['wire'])}, transport {escape(group['transport'])}</p>",
        f'<p class="verdict"><strong class="{words[1]}">{words[0]}</strong>: collectives, bytes and hashes of prefill '
        f'and decoding; <strong class="{promoted}">{escape(pack["promotion"])}</strong></p>',
        _load(pack["host"]),
        *(f'<p class="bad">{escape(fault)}</p>' for fault in pack["faults"]),
        "<h2>Speed</h2>",
        _speed(pack),
        _lengths(pack),
        "<h2>Where a token's time goes</h2>",
        _regions(pack),
        "<h2>Beside a single node</h2>",
        _nodes(pack),
        "<h2>What was run</h2>",
        _about(pack),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(model['file'])}</title>"
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>\n' + "\n".join(
        [*parts, "</body></html>\n"]
    )


def _load(host: dict[str, Any]) -> str:
    """A warning, where other work ran beside the run."""
    load, cores = host.get("load_at_start"), host["cores"]
    if load is None or load <= MAX_QUIET_LOAD * cores:
        return ""
    return (
        f'<p class="bad">{load:g} processes wanted the {cores} cores of this machine before the run began: the times '
        "below are those of a busy machine, and say little of an idle one.</p>"
    )


def show(cell: Cell, scale: float = 1.0, digits: int = 1) -> str:
    """A cell for people. What was not measured says so."""
    if cell["kind"] == "absent":
        return f'<span class="absent" title="{escape(cell["why"])}">absent</span>'
    figure = f"{cell['value'] * scale:,.{digits}f}"
    if cell["kind"] == "predicted":
        return f'<span class="absent" title="predicted {figure}">{figure}</span>'
    spread = cell.get("samples", [])
    title = f"samples: {', '.join(f'{s * scale:,.{digits}f}' for s in spread)}" if spread else "derived"
    return f'<span title="{escape(title)}">{figure}</span>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _speed(pack: dict[str, Any]) -> str:
    """Decoding at the longest prompt, beside what one node does."""
    last = pack["lengths"][-1]
    offers = [(f"hostring, {pack['group']['ranks']} ranks", last["decode_tokens_per_s"], "ours")]
    offers += [
        (f"hostring, rank {a['rank']} alone ({a['dtype']})", a["decode_tokens_per_s"], "other")
        for a in pack["one_rank"]
    ]
    if isinstance(pack["llama_cpp"], list):
        at = [p for p in pack["llama_cpp"] if p["prompt_tokens"] == last["prompt_tokens"]]
        words = {p["threads"]: f"{p['threads']} thread{'s' * (p['threads'] > 1)}" for p in at}
        offers += [(f"llama.cpp, {words[p['threads']]}", p["decode_tokens_per_s"], "other") for p in at]
    bars = [
        Bar(name, [cell["value"]], f"{cell['value']:,.1f}", kind)
        for name, cell, kind in offers
        if cell["kind"] != "absent"
    ]
    return chart(f"decode, tokens per second, after a prompt of {last['prompt_tokens']} tokens", bars)


def _lengths(pack: dict[str, Any]) -> str:
    heads = ["prompt tokens", "decode tokens/s", "predicted", "prefill tokens/s", "predicted", "first token, ms"]
    heads += ("collectives, % of time", "exposed transfer, ms/token", "hidden transfer")
    rows = [
        [
            f"{one['prompt_tokens']:,}",
            show(one["decode_tokens_per_s"]),
            show(one["predicted_decode_tokens_per_s"]),
            show(one["prefill_tokens_per_s"]),
            show(one["predicted_prefill_tokens_per_s"]),
            show(one["ttft_s"], 1e3),
            show(one["collective_fraction"], 100),
            show(one["exposed_transfer_s_per_token"], 1e3, 2),
            show(one["hidden_transfer_s_per_token"], 1e3, 2),
        ]
        for one in pack["lengths"]
    ]
    return _table(heads, rows)


def _regions(pack: dict[str, Any]) -> str:
    """Computing and reducing, by rank and region: what a rank waits is in its reductions."""
    bars, rows = [], []
    for one in pack["regions"]:
        compute, reduce = one["compute_s_per_token"], one["reduce_s_per_token"]
        name = f"rank {one['rank']}, {one['region']}"
        values = [1e3 * compute["value"], 1e3 * reduce["value"]]
        bars.append(Bar(name, values, f"{values[0]:.1f} + {values[1]:.1f} ms", "split"))
        rows.append([name, show(compute, 1e3, 2), show(reduce, 1e3, 2), show(one["predicted_s_per_token"], 1e3, 2)])
    return chart("milliseconds per decoded token in all layers: computing, then reducing", bars) + _table(
        ("rank and region", "computing, ms", "reducing, ms", "predicted"), rows
    )


def _nodes(pack: dict[str, Any]) -> str:
    best = pack["best_single_node"]
    rows = [
        ["best single node", escape(best["what"])],
        ["its decode tokens/s", show(best["decode_tokens_per_s"])],
        ["this run, times as fast", show(pack["against_best_single_node"], digits=2)],
        [f"scaling efficiency on {pack['group']['ranks']} ranks", show(pack["scaling_efficiency"], digits=2)],
        ["all ranks in one dtype, decode tokens/s", show(pack["same_dtype"]["decode_tokens_per_s"])],
        ["watts", show(pack["watts"])],
        ["cost", show(pack["cost"])],
    ]
    return _table(("", ""), rows)


def _about(pack: dict[str, Any]) -> str:
    host, plan = pack["host"], pack["plan"]
    output = pack["outputs"][-1]
    rows = [
        ["command", f"<code>{escape(pack['command'])}</code>"],
        ["machine", escape(f"{host['processor']}, {host['cores']} cores, {host['system']} {host['machine']}")],
        ["versions", escape(", ".join(f"{name} {number}" for name, number in pack["versions"].items()))],
        [
            "plan",
            escape(
                f"{plan['source']}: KV groups {plan['kv_groups']}, columns {plan['columns']}, "
                f"vocabulary {plan['vocab']}"
            ),
        ],
        ["sha256 of the plan", f"<code>{plan['sha256']}</code>"],
        ["sha256 of the weights", f"<code>{pack['model']['sha256']}</code>"],
        ["sha256 of the config", f"<code>{pack['model']['config_sha256']}</code>"],
        ["sha256 of the last answer", f"<code>{output['tokens_sha256']}</code>"],
        ["sha256 of its activations, all ranks", f"<code>{output['ranks'][0]['activation_sha256']}</code>"],
        ["sha256 of its logits", f"<code>{output['logits_sha256'] or 'not hashed: use --same-bits'}</code>"],
    ]
    return _table(("", ""), rows).replace("<table>", '<table class="about">')
