"""What is known of the ranks that a plan is for: speed in each phase, memory and the pool that it comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hostring.integrations.llm.planning.footprint import ITEM_NBYTES, Way
from hostring.integrations.llm.planning.model_file import Matrices, ModelFile

COMPUTES = ("packed", "exact")


@dataclass(frozen=True)
class Line:
    """Seconds of n units: nothing for none, else `fixed` + n * `each`."""

    fixed: float
    each: float

    def seconds(self, n: float) -> float:
        return self.fixed + n * self.each if n else 0.0


@dataclass(frozen=True)
class PhaseCost:
    """Seconds per token while a rank computes.

    Attributes:
        attention: of a layer, by KV-head groups. mlp: of a layer, by FFN columns. head: by vocabulary rows.
    """

    attention: Line
    mlp: Line
    head: Line

    def as_json(self) -> dict[str, list[float]]:
        return {name: [line.fixed, line.each] for name, line in vars(self).items()}

    @staticmethod
    def from_json(fields: Mapping[str, Sequence[float]]) -> PhaseCost:
        return PhaseCost(*(Line(*map(float, fields[name])) for name in ("attention", "mlp", "head")))


@dataclass(frozen=True)
class RankSpec:
    """One rank.

    Attributes:
        name: for people. way: how it computes.
        pool: which memory it uses; ranks with the same pool share it. memory_nbytes: what that offers; None: unknown.
        decode, prefill: seconds for one token's part; None where nobody measured or said it.
        duty: the part of the time that it is allowed to run, as under a CPU quota: it banks the rest while it waits.
        collective_cpu_s: processor time of one reduction, which a quota counts too.
        stream_rate: bytes/s that it reads from memory. warm_rate: the same from its cache. flop_rate: operations/s.
        cache_nbytes: of its last-level cache.
    """

    name: str
    way: Way = field(default_factory=Way)
    pool: str = ""
    memory_nbytes: int | None = None
    decode: PhaseCost | None = None
    prefill: PhaseCost | None = None
    duty: float = 1.0
    collective_cpu_s: float = 0.0
    stream_rate: float | None = None
    warm_rate: float | None = None
    flop_rate: float | None = None
    cache_nbytes: int = 0

    def as_json(self) -> dict[str, Any]:
        phases = {
            phase: cost and cost.as_json() for phase, cost in (("decode", self.decode), ("prefill", self.prefill))
        }
        return {**vars(self), "way": vars(self.way), **phases}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> RankSpec:
        """What `as_json` gave."""
        phases = {name: fields[name] and PhaseCost.from_json(fields[name]) for name in ("decode", "prefill")}
        return RankSpec(**{**fields, "way": Way(**fields["way"]), **phases})


_KEYS = ("name", "host", "memory_gb", "compute", "dtype", "device", "decode_gb_per_s", "prefill_gflop_per_s")
_MORE_KEYS = ("overhead_us", "duty", "probed")


def alike(n: int, way: Way, memory: Sequence[int] = ()) -> list[RankSpec]:
    """`n` ranks of one speed that nobody knows.

    Args:
        memory: bytes that each offers; none, one for all, or one per rank.

    Raises:
        ValueError: another number of budgets.
    """
    ranks = [RankSpec(f"rank {rank}", way, pool=f"rank {rank}") for rank in range(n)]
    if not memory:
        return ranks
    if len(memory) not in (1, n):
        raise ValueError(f"{len(memory)} memory budgets for {n} ranks; name one for all, or one per rank")
    budgets = list(memory) if len(memory) == n else list(memory) * n
    return [replace(rank, memory_nbytes=nbytes) for rank, nbytes in zip(ranks, budgets, strict=True)]


def read_ranks(path: str | Path, model: ModelFile, default: Way) -> tuple[list[RankSpec], dict[str, Any]]:
    """Read a RANKS file: a JSON object with "ranks", a list, and perhaps "collective_us" and "links".

        {"ranks": [{"name": "desk", "decode_gb_per_s": 20, "prefill_gflop_per_s": 300, "memory_gb": 16},
                   {"name": "pi", "decode_gb_per_s": 4, "memory_gb": 4, "host": "pi.local"}],
         "collective_us": 150}

    Ranks of one "host" share its memory. What `hostring plan model --ranks live` measured is in "probed".

    Returns:
        the ranks, and the rest of the object.

    Raises:
        ValueError: names the file and the key.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{path}: can't be read as JSON: {exc}") from exc
    rows = found.get("ranks") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: expected a JSON object with a list of ranks")
    return [_rank(path, n, row, model, default) for n, row in enumerate(rows)], found


def _rank(path: str | Path, n: int, row: dict[str, Any], model: ModelFile, default: Way) -> RankSpec:
    where = f"{path}: ranks[{n}]"
    if "probed" in row:
        return RankSpec.from_json(row["probed"])
    wrong = [key for key in row if key not in (*_KEYS, *_MORE_KEYS)]
    if wrong:
        raise ValueError(f"{where}: unknown key {wrong[0]}; possible are {', '.join((*_KEYS, *_MORE_KEYS))}")
    for key in ("memory_gb", "decode_gb_per_s", "prefill_gflop_per_s", "duty"):
        value = row.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"{where}: {key} is {value!r}; expected a number above 0")
    way = Way(*(row.get(key, getattr(default, key)) for key in ("compute", "dtype", "device")))
    if way.compute not in COMPUTES or way.dtype not in ITEM_NBYTES:
        raise ValueError(
            f"{where}: compute {way.compute!r} with dtype {way.dtype!r}: use {' or '.join(COMPUTES)}, with "
            f"{', '.join(ITEM_NBYTES)}"
        )
    name = str(row.get("name", f"rank {n}"))
    rate, flops = row.get("decode_gb_per_s"), row.get("prefill_gflop_per_s")
    overhead = 1e-6 * row.get("overhead_us", 0.0)
    return RankSpec(
        name,
        way,
        pool=str(row.get("host", name)),
        memory_nbytes=round(1e9 * row["memory_gb"]) if "memory_gb" in row else None,
        decode=rate and cost_of_stream(model, way, 1e9 * rate, overhead),
        prefill=flops and cost_of_flops(model, 1e9 * flops),
        duty=row.get("duty", 1.0),
        stream_rate=rate and 1e9 * rate,
        flop_rate=flops and 1e9 * flops,
    )


def cost_of_stream(model: ModelFile, way: Way, rate: float, overhead: float = 0.0) -> PhaseCost:
    """Decoding where reading the weights at `rate` bytes/s is all, and `overhead` seconds per region."""

    def nbytes(*kinds: Matrices) -> float:
        packed = way.compute == "packed"
        return sum(kind.nbytes if packed else kind.elements * ITEM_NBYTES[way.dtype] for kind in kinds) / rate

    return _cost(model, nbytes, overhead)


def cost_of_flops(model: ModelFile, rate: float) -> PhaseCost:
    """Prefill where arithmetic at `rate` operations/s is all."""
    return _cost(model, lambda *kinds: sum(2 * kind.elements for kind in kinds) / rate, 0.0)


def _cost(model: ModelFile, seconds: Any, overhead: float) -> PhaseCost:
    config = model.config
    layers = config.num_hidden_layers
    return PhaseCost(
        Line(overhead, seconds(model.attention_in, model.attention_out) / layers / config.num_key_value_heads),
        Line(overhead, model.read_share * seconds(model.mlp_in, model.mlp_out) / layers / config.intermediate_size),
        Line(overhead, seconds(model.head) / config.vocab_size),
    )
