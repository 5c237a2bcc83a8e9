"""A plan as a file: the shares that `--plan FILE` uses, and what was known when they were chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.shards import ShardPlan

KIND, VERSION = "hostring model plan", 1
_SHARES = ("kv_groups", "columns", "vocab")


@dataclass(frozen=True)
class PlanFile:
    """What demo and generate need of a plan.

    Attributes:
        plan: the shares. source: a path, or "even", "bytes", "auto".
        left_out: ranks that get nothing: number, name and reason.
        max_need: bytes that each rank needs; empty where nobody counted.
        fields: all of the file.
    """

    plan: ShardPlan
    source: str
    left_out: tuple[dict[str, Any], ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The JSON key `plan` of a run."""
        return {
            "source": self.source,
            **shares_json(self.plan),
            "left_out": list(self.left_out),
            "predicted": self.fields.get("predicted"),
        }


def shares_json(plan: ShardPlan) -> dict[str, Any]:
    heads = {"heads": list(plan.heads)} if plan.heads else {}
    experts = {"experts": list(plan.experts)} if plan.experts else {}
    return {**{name: list(getattr(plan, name)) for name in _SHARES}, **heads, **experts, "sha256": plan.sha256}


def as_lists(plan: ShardPlan) -> tuple[tuple[int, ...], ...]:
    """The arguments of `ShardPlan`, as they travel to rank processes."""
    return (plan.kv_groups, plan.columns, plan.vocab, plan.heads, plan.experts)


def read_plan(path: str | Path, config: ModelConfig) -> PlanFile:
    """Read what `hostring plan model --json` wrote, or an object with kv_groups, columns and vocab (and heads, where
    ranks share KV heads).

    Raises:
        FileNotFoundError: nothing there.
        ValueError: something else is in it, or the shares are not those of this model, or of another hash.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no plan at {path}; make one with: hostring plan model MODEL --ranks N --json {path}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{path}: can't be read as JSON: {exc}") from exc
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object")
    if found.get("version", VERSION) != VERSION:
        raise ValueError(f"{path} is of version {found['version']}; this program reads version {VERSION}")
    shares = found.get("shares", found)
    try:
        lists = [shares[name] for name in _SHARES] + [shares.get(name, []) for name in ("heads", "experts")]
        plan = ShardPlan(*(tuple(map(_whole, numbers)) for numbers in lists))
    except (KeyError, TypeError) as exc:
        raise ValueError(f"{path}: expected lists of whole numbers kv_groups, columns and vocab: {exc}") from exc
    try:
        plan.check(config)
    except ValueError as exc:
        raise ValueError(f"{path} is not for this model: {exc}") from exc
    told = shares.get("sha256", plan.sha256)
    if told != plan.sha256:
        raise ValueError(
            f"{path}: its shares have the hash {plan.sha256[:12]} and it says {str(told)[:12]}: they were changed by "
            "hand; remove sha256 if that was meant"
        )
    return PlanFile(plan, str(path), tuple(found.get("left_out", ())), found)


def _whole(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"{n!r} is no whole number")
    return n
