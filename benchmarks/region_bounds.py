#!/usr/bin/env python3
"""Are measured region times ever below the lower bound? Attention, MLP and head of one rank, for 1 to 128 rows at once.

    python benchmarks/region_bounds.py MODEL --compute exact --json rows.json --svg docs/images/region-bounds.svg

Each region's best time over several steps stands beside max(B_fresh / BW, F / P): the bytes of its weights over the
bandwidth, or its operations over the rate, whichever takes longer. Bandwidth and rate are the best of many tries,
before and after the steps. Keys and values are left out of the bound, which makes it lower still. Times are those of
the processor, which other processes disturb less than the clock. Exit code 1 when one is below its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from hostring.integrations.llm.planning.budget import lower_bound
from hostring.integrations.llm.planning.few_layers import FewLayers, layer_nbytes, usual_regions, whole_of
from hostring.integrations.llm.planning.footprint import ITEM_NBYTES, Way
from hostring.integrations.llm.planning.limits import INT8_GAIN, measured_limits
from hostring.integrations.llm.planning.memory_pool import last_cache_nbytes
from hostring.integrations.llm.planning.model_file import Matrices, ModelFile, read_model_file

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
REGIONS = ("attention", "mlp", "head")
CPU = torch.device("cpu")


def best_limits(way: Way, tries: int) -> tuple[float, float]:
    """The largest bandwidth and rate that anything showed."""
    found = [measured_limits(CPU, torch.float32) for _ in range(tries)]
    gain = INT8_GAIN if way.compute == "packed" else 1
    return max(max(one[:2]) for one in found), gain * max(one[2] for one in found)


def amounts(model: ModelFile, way: Way) -> list[tuple[float, float]]:
    """Bytes, and operations for one row, of each region."""
    config = model.config
    layers = config.num_hidden_layers

    def of(layers: int, *kinds: Matrices) -> tuple[float, float]:
        elements = sum(kind.elements for kind in kinds) / layers
        packed = sum(kind.nbytes for kind in kinds) / layers
        return packed if way.compute == "packed" else elements * ITEM_NBYTES[way.dtype], 2 * elements

    return [of(layers, model.attention_in, model.attention_out), of(layers, model.mlp_in, model.mlp_out),
            of(1, model.head)]  # fmt: skip


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    model = read_model_file(options.model)
    way = Way(options.compute, "float32")
    n_layers = min(model.config.num_hidden_layers, options.layers)
    few = FewLayers(options.model, way, CPU, whole_of(model.config), n_layers)
    few.step(1)
    limits = [best_limits(way, options.tries)]
    times = {}
    for batch in BATCHES:
        few.forget()
        few.step(batch)
        regions = [usual_regions(few.step(batch)) for _ in range(options.steps)]
        times[batch] = [min(one[at] for one in regions) for at in range(3)]
    limits.append(best_limits(way, options.tries))
    bandwidth, rate = (max(one[at] for one in limits) for at in range(2))
    print(
        f"{Path(options.model).name}: {options.compute}, {n_layers} layers of {layer_nbytes(model, way) / 1e6:.1f} MB"
    )
    print(f"{bandwidth / 1e9:.1f} GB/s, {rate / 1e9:.0f} GFLOP/s, last cache {last_cache_nbytes() >> 20} MB")
    rows = []
    for batch, measured in times.items():
        for region, seconds, (nbytes, flops) in zip(REGIONS, measured, amounts(model, way), strict=True):
            rows_of_head = 1 if region == "head" else batch  # the head takes the last row only
            bound = lower_bound(nbytes, flops * rows_of_head, bandwidth, rate).seconds
            rows.append({"batch": batch, "region": region, "seconds": seconds, "bound": bound})
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """As a table for the documentation, in microseconds."""
    print("| rows | " + " | ".join(f"{region} | bound" for region in REGIONS) + " |")
    print("|---|" + "---|---|" * len(REGIONS))
    for batch in BATCHES:
        mine = [row for row in rows if row["batch"] == batch]
        cells = [f"{1e6 * row[key]:,.0f}" for row in mine for key in ("seconds", "bound")]
        print(f"| {batch} | " + " | ".join(cells) + " |")


def draw(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hostring", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for color, region in zip(("C0", "C1", "C2"), REGIONS, strict=True):
        mine = [row for row in rows if row["region"] == region]
        batches = [row["batch"] for row in mine]
        axes.loglog(batches, [1e6 * r["seconds"] for r in mine], color, marker="o", markersize=4, label=region)
        axes.loglog(batches, [1e6 * r["bound"] for r in mine], color, linestyle="--", label=f"{region}, lower bound")
    axes.set(xlabel="rows at once", ylabel="µs, of one layer")
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, ncols=3)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--compute", choices=("exact", "packed"), default="exact")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tries", type=int, default=12)
    parser.add_argument("--json", default="")
    parser.add_argument("--svg", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    show(rows)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.svg:
        draw(rows, options.svg)
    below = [row for row in rows if row["seconds"] < row["bound"]]
    for row in below:
        print(f"below the bound: {row}")
    sys.exit(1 if below else 0)


if __name__ == "__main__":
    main()
