"""How fast this rank is: a few layers of the model itself, with the kernels that it will use, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from hostring.integrations.llm.checkpoint.weights import open_checkpoint
from hostring.integrations.llm.compute import build_local
from hostring.integrations.llm.model.config import ModelConfig
from hostring.integrations.llm.model.local_model import LocalModel
from hostring.integrations.llm.model.shards import ShardPlan
from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.planning.footprint import ITEM_NBYTES, Way
from hostring.integrations.llm.planning.memory_pool import find_pool, last_cache_nbytes
from hostring.integrations.llm.planning.model_file import ModelFile, read_model_file
from hostring.integrations.llm.planning.ranks import Line, PhaseCost, RankSpec
from hostring.integrations.llm.sharded import DTYPES

MAX_PROBED_NBYTES = 192 << 20  # of weights; enough to leave every cache
MIN_PROBED_LAYERS = 2
PREFILL_TOKENS = 64
DECODE_SECONDS = 0.6  # several periods of a CPU quota
MAX_DECODE_STEPS = 200
QUOTA_RATIO = 1.25  # the mean of a region's times over their median; a smaller one is noise
_INT8_GAIN = 4  # 8-bit products that a CPU makes in the time of one f32 product, at most

Sizes = tuple[int, int, int]  # KV-head groups, FFN columns, vocabulary rows
Seconds = tuple[float, float, float]  # of attention and MLP in one layer, and of the head


class Stopwatch:
    """Stands in for the group of a part of the model: adds nothing, and notes the time of every reduction."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size, self.order = 0, world_size, "rank"
        self.spans: list[float] = []
        self._since = 0.0

    def begin(self) -> None:
        self.spans, self._since = [], perf_counter()

    def all_reduce(self, x: Any, /) -> Any:
        if isinstance(x, torch.Tensor) and not x.is_cpu:
            x.cpu()  # as a group's staging does: waits for what computes it
        self._stamp()
        return x

    def end(self, logits: torch.Tensor) -> list[float]:
        """Seconds of each region, and of the head."""
        logits.cpu()
        self._stamp()
        return self.spans

    def _stamp(self) -> None:
        now = perf_counter()
        self.spans.append(now - self._since)
        self._since = now


@dataclass(frozen=True)
class _Timing:
    """Of a part of the model.

    Attributes:
        decode, prefill: seconds of a layer's attention and MLP and of the head, for one token, at their best.
        slower: how many times as long a decode step usually takes.
        duty: the part of the time that a step isn't stopped in.
    """

    sizes: Sizes
    decode: Seconds
    prefill: Seconds
    slower: float
    duty: float


def probe(path: str | Path, compute: str, dtype: str, device: torch.device, name: str, n_ranks: int) -> RankSpec:
    """Measure this rank. All ranks of a host do so at the same time, as they will compute.

    Args:
        compute: "auto", "packed" or "exact". n_ranks: of the group, whose even share the probe resembles.
    """
    pool, offers = find_pool(device.type, device.index or 0)  # before anything is loaded
    model = read_model_file(path)
    way = Way(_way(model, compute, device), dtype, device.type)
    whole, part = _sizes(model, way)
    timings = [_time(path, model, way, device, sizes, n_ranks) for sizes in dict.fromkeys((whole, part))]
    decode = _cost([(t.sizes, t.decode) for t in timings], timings[0].slower)
    prefill = _cost([(t.sizes, t.prefill) for t in timings], 1.0)
    stream, warm, flops = _limits(device, DTYPES[dtype])
    config = model.config
    layer = decode.attention.seconds(config.num_key_value_heads) + decode.mlp.seconds(config.intermediate_size)
    seen = _layer_nbytes(model, way) / layer
    if way.compute == "packed":
        flops *= _INT8_GAIN
    cache = last_cache_nbytes() if device.type == "cpu" else 0
    return RankSpec(
        name,
        way,
        pool,
        offers,
        decode,
        prefill,
        duty=min(t.duty for t in timings),
        stream_rate=max(stream, seen if _layer_nbytes(model, way) > cache else 0.0),
        warm_rate=max(warm, seen),
        flop_rate=flops,
        cache_nbytes=cache,
    )


def _way(model: ModelFile, compute: str, device: torch.device) -> str:
    """Whether this rank will compute packed or exact."""
    if compute != "auto":
        return compute
    if model.units is None or device.type != "cpu":
        return "exact"
    try:
        load()
    except Unavailable:
        return "exact"
    return "packed"


def _sizes(model: ModelFile, way: Way) -> tuple[Sizes, Sizes]:
    """The whole model, and about a half of it: two points for a line."""
    config = model.config
    groups, columns = max(1, config.num_key_value_heads // 2), max(1, config.intermediate_size // 2)
    if way.compute == "packed" and model.units is not None:
        groups = _border(model.units.groups, groups)
        columns = _border(model.units.columns, columns)
    whole = (config.num_key_value_heads, config.intermediate_size, config.vocab_size)
    return whole, (groups, columns, max(1, config.vocab_size // 2))


def _border(units: Sequence[range], near: int) -> int:
    return min((unit.stop for unit in units), key=lambda stop: abs(stop - near))


def _time(path: str | Path, model: ModelFile, way: Way, device: torch.device, sizes: Sizes, n_ranks: int) -> _Timing:
    checkpoint = open_checkpoint(path)
    n_layers = _probed_layers(model, way, n_ranks)
    checkpoint.config = replace(checkpoint.config, num_hidden_layers=n_layers)
    rest = tuple(t - s for t, s in zip(_whole(model.config), sizes, strict=True))
    shares = zip(sizes, rest, strict=True) if rest[0] else ((size,) for size in _whole(model.config))
    plan = ShardPlan(*shares)
    watch: Any = Stopwatch(plan.world_size)
    part, _ = build_local(
        checkpoint, watch, way.compute, device, plan=plan, max_seq=min(512, model.config.max_position_embeddings),
        hash_activations=False, compile=False, packed_ranks=[way.compute == "packed"] * plan.world_size,
        dtype=DTYPES[way.dtype],
    )  # fmt: skip
    prompt = torch.zeros(1, min(PREFILL_TOKENS, part.max_seq // 2), dtype=torch.long)
    cache = part.new_cache()
    _step(part, watch, prompt, cache)
    prefill = []
    for _ in range(3):
        cache.truncate(0)
        prefill.append(_step(part, watch, prompt, cache))
    decode = _decode(part, watch, cache)
    n = prompt.numel()
    typical, mean = (sum(kind(column) for column in zip(*decode, strict=True)) for kind in (median, fmean))
    best = _best_of([_regions(spans) for spans in decode])
    usual = n_layers * (best[0] + best[1]) + best[2]
    return _Timing(
        (plan.kv_groups[0], plan.columns[0], plan.vocab[0]),
        best,
        _best_of([(a / n, m / n, h) for a, m, h in map(_regions, prefill)]),
        max(1.0, typical / usual),
        1.0 if mean / typical < QUOTA_RATIO else typical / mean,
    )


def _decode(part: LocalModel, watch: Stopwatch, cache: Any) -> list[list[float]]:
    token = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(2):
        _step(part, watch, token, cache)
    found: list[list[float]] = []
    until = perf_counter() + DECODE_SECONDS
    while len(found) < 3 or (perf_counter() < until and len(found) < MAX_DECODE_STEPS):
        if cache.length + 1 >= cache.max_seq:
            cache.truncate(PREFILL_TOKENS)
        found.append(_step(part, watch, token, cache))
    return found


def _step(part: LocalModel, watch: Stopwatch, tokens: torch.Tensor, cache: Any) -> list[float]:
    watch.begin()
    return watch.end(part.step(tokens.to(part.forward.device), cache))


def _regions(spans: Sequence[float]) -> Seconds:
    """Seconds of attention and of MLP of a usual layer, and of the head."""
    return median(spans[:-1:2]), median(spans[1:-1:2]), spans[-1]


def _best_of(rows: Sequence[Seconds]) -> Seconds:
    attention, mlp, head = zip(*rows, strict=True)
    return min(attention), min(mlp), min(head)


def _cost(points: Sequence[tuple[Sizes, Seconds]], slower: float) -> PhaseCost:
    """Lines through the best times, which say how work scales; then as slow as the whole usually is."""
    lines = (_line([(sizes[at], seconds[at]) for sizes, seconds in points]) for at in range(3))
    return PhaseCost(*(Line(slower * line.fixed, slower * line.each) for line in lines))


def _line(points: Sequence[tuple[int, float]]) -> Line:
    """Through the largest point, as steep as the smallest says; never falling, never from below nothing."""
    (n, seconds), (few, less) = points[0], points[-1]
    each = max(0.0, (seconds - less) / (n - few)) if n > few else seconds / n
    each = min(each, seconds / n) or 1e-3 * seconds / n
    return Line(seconds - n * each, each)


def _probed_layers(model: ModelFile, way: Way, n_ranks: int) -> int:
    """As many as an even share has bytes, so that the probe finds the caches as the run will."""
    layers = model.config.num_hidden_layers
    most = max(MIN_PROBED_LAYERS, int(MAX_PROBED_NBYTES / _layer_nbytes(model, way)))
    return min(layers, most, max(MIN_PROBED_LAYERS, -(-layers // n_ranks)))


def _layer_nbytes(model: ModelFile, way: Way) -> float:
    """Of the matrices of one layer."""
    matrices = (model.attention_in, model.attention_out, model.mlp_in, model.mlp_out)
    packed = way.compute == "packed"
    total = sum(one.nbytes if packed else one.elements * ITEM_NBYTES[way.dtype] for one in matrices)
    return total / model.config.num_hidden_layers


def _whole(config: ModelConfig) -> Sizes:
    return config.num_key_value_heads, config.intermediate_size, config.vocab_size


def _limits(device: torch.device, dtype: torch.dtype) -> tuple[float, float, float]:
    """Bytes per second from memory and from the cache, and floating-point operations per second."""
    large, small = (_stream_rate(n, device) for n in (16 << 20, 64 << 10))
    side = 512
    a = torch.rand(side, side, device=device).to(dtype if device.type != "cpu" else torch.float32)
    return large, max(large, small), 2 * side**3 / _best(lambda: torch.mm(a, a), device)


def _stream_rate(n_elements: int, device: torch.device) -> float:
    matrix = torch.rand(n_elements // 1024, 1024, device=device)
    vector = torch.rand(1024, device=device)
    return 4 * n_elements / _best(lambda: torch.mv(matrix, vector), device)


def _best(run: Any, device: torch.device) -> float:
    """The shortest time of a few."""
    times = []
    for _ in range(6):
        begun = perf_counter()
        run().flatten()[:1].cpu()
        times.append(perf_counter() - begun)
    return min(times)
