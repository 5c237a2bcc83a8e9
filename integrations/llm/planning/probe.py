"""How fast this rank is: a few layers of the model itself, with the kernels that it will use, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from hostring.integrations.llm.packed.library import Unavailable, load
from hostring.integrations.llm.planning.few_layers import (
    FewLayers,
    Seconds,
    Sizes,
    layer_nbytes,
    layer_read_nbytes,
    usual_regions,
    whole_of,
)
from hostring.integrations.llm.planning.footprint import Way
from hostring.integrations.llm.planning.limits import INT8_GAIN, measured_limits
from hostring.integrations.llm.planning.memory_pool import find_pool, last_cache_nbytes
from hostring.integrations.llm.planning.model_file import ModelFile, read_model_file
from hostring.integrations.llm.planning.ranks import Line, PhaseCost, RankSpec
from hostring.integrations.llm.sharded import DTYPES

MAX_PROBED_NBYTES = 192 << 20  # of weights; enough to leave every cache
MIN_PROBED_LAYERS = 2
PREFILL_TOKENS = 64
DECODE_SECONDS = 0.6  # several periods of a CPU quota
MAX_DECODE_STEPS = 200
ALWAYS_RUNS = 0.9  # the part of the time that a rank computes in, when nothing stops it


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
    wide, narrow = probed_sizes(model, way)
    timings = [_time(path, model, way, device, sizes, n_ranks) for sizes in dict.fromkeys((wide, narrow))]
    decode = _cost([(t.sizes, t.decode) for t in timings], timings[0].slower)
    prefill = _cost([(t.sizes, t.prefill) for t in timings], 1.0)
    stream, warm, flops = measured_limits(device, DTYPES[dtype])
    config = model.config
    layer = decode.attention.seconds(config.num_key_value_heads) + decode.mlp.seconds(config.intermediate_size)
    seen = layer_read_nbytes(model, way) / layer
    if way.compute == "packed":
        flops *= INT8_GAIN
    cache = last_cache_nbytes() if device.type == "cpu" else 0
    return RankSpec(
        name,
        way,
        pool,
        offers,
        decode,
        prefill,
        duty=min(t.duty for t in timings),
        stream_rate=max(stream, seen if layer_nbytes(model, way) > cache else 0.0),
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


def probed_sizes(model: ModelFile, way: Way) -> tuple[Sizes, Sizes]:
    """The whole width of the model, or as much as a probe may read, and about a half of that: two points for a line."""
    width = min(1.0, MAX_PROBED_NBYTES / (MIN_PROBED_LAYERS * layer_nbytes(model, way)))
    return _part(model, way, width), _part(model, way, width / 2)


def _part(model: ModelFile, way: Way, width: float) -> Sizes:
    groups, columns, vocab = (max(1, round(width * size)) for size in whole_of(model.config))
    if way.compute == "packed" and model.units is not None:
        groups, columns = _border(model.units.groups, groups), _border(model.units.columns, columns)
    return groups, columns, vocab


def _border(units: Sequence[range], near: int) -> int:
    return min((unit.stop for unit in units), key=lambda stop: abs(stop - near))


def _time(path: str | Path, model: ModelFile, way: Way, device: torch.device, sizes: Sizes, n_ranks: int) -> _Timing:
    n_layers = _probed_layers(model, way, n_ranks)
    few = FewLayers(path, way, device, sizes, n_layers)
    n = min(PREFILL_TOKENS, few.max_seq // 2)
    few.step(n)
    prefill = []
    for _ in range(3):
        few.forget()
        prefill.append(few.step(n))
    few.step(1)
    begun = perf_counter()
    decode = _decode(few)
    took = perf_counter() - begun
    usual = median(sum(spans) for spans in decode)
    best = _best_of([usual_regions(spans) for spans in decode])
    ran = sum(map(sum, decode)) / took  # on an accelerator nothing is stopped, and this is nearly 1
    return _Timing(
        sizes,
        best,
        _best_of([(a / n, m / n, h) for a, m, h in map(usual_regions, prefill)]),
        max(1.0, usual / (n_layers * (best[0] + best[1]) + best[2])),
        1.0 if ran > ALWAYS_RUNS else ran,
    )


def _decode(few: FewLayers) -> list[list[float]]:
    found: list[list[float]] = []
    until = perf_counter() + DECODE_SECONDS
    while len(found) < 3 or (perf_counter() < until and len(found) < MAX_DECODE_STEPS):
        found.append(few.step(1))
    return found


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
    most = max(MIN_PROBED_LAYERS, int(MAX_PROBED_NBYTES / layer_nbytes(model, way)))
    return min(layers, most, max(MIN_PROBED_LAYERS, -(-layers // n_ranks)))
