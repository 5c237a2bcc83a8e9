"""What the page shows of the cluster: rates between the last two reports of all ranks."""

from __future__ import annotations

from typing import Any

from hostring.integrations.llm.serve.head import Snapshot
from hostring.integrations.llm.serve.http.service import Service
from hostring.integrations.llm.stats import waits_most_for

Report = dict[str, Any]
_SHORTEST_S = 0.05  # of an interval that gives rates


def cluster_view(service: Service) -> dict[str, Any]:
    """Figures of the server and of each rank, as JSON has them."""
    scheduler, cluster = service.scheduler, service.cluster
    running, waiting = scheduler.in_flight
    before, now = _interval(cluster.snapshots)
    seconds = max(_SHORTEST_S, now.at - before.at)
    return {
        "model": service.options.model_name,
        "world_size": cluster.world_size,
        "why_not": scheduler.why_not,
        "running": running,
        "waiting": waiting,
        "steps_per_s": (now.steps - before.steps) / seconds,
        "tokens_per_s": (now.generated - before.generated) / seconds,
        "generated_tokens": scheduler.totals.generated_tokens,
        "cached_tokens": scheduler.totals.cached_tokens,
        "tokens_per_step": scheduler.guessing.totals.tokens_per_step,
        "lost": sorted(cluster.lost),
        "events": list(cluster.events),
        "ranks": _ranks(before.reports, now.reports, seconds),
    }


def _interval(snapshots: tuple[Snapshot, ...]) -> tuple[Snapshot, Snapshot]:
    if not snapshots:
        return Snapshot(0.0, [], 0, 0), Snapshot(0.0, [], 0, 0)
    return snapshots[0], snapshots[-1]


def _ranks(before: list[Report], now: list[Report], seconds: float) -> list[Report]:
    held = sum(report["bytes_held"] for report in now)
    waited = {
        new["rank"]: {int(r): s - old["waited_for"].get(r, 0.0) for r, s in new["waited_for"].items()}
        for old, new in zip(before, now, strict=True)
    }
    found = []
    for old, new in zip(before, now, strict=True):
        of_time = {phase: max(0.0, s - old["seconds"].get(phase, 0.0)) / seconds for phase, s in new["seconds"].items()}
        of_time["rest"] = max(0.0, 1.0 - sum(of_time.values()))
        sent = {peer: max(0, n - old["sent"].get(peer, 0)) / seconds for peer, n in new["sent"].items()}
        shown = {name: new[name] for name in ("rank", "host", "device", "dtype", "bytes_held", "kv_bytes", "arrived")}
        part = {
            "share": new["bytes_held"] / held,
            "plan": new["share"],
            "waits_for": waits_most_for(new["rank"], waited)[0],
        }
        found.append({**shown, **part, "of_time": of_time, "sent_per_s": sent})
    return found
