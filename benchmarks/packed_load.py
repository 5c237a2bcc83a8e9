#!/usr/bin/env python3
"""What a packed rank's weights cost to load: bytes held, growth of memory, and seconds, for 1, 2 and 3 ranks.

    python benchmarks/packed_load.py MODEL.gguf

Every rank loads in a process of its own, one after another. Growth is the peak of resident memory over that of the
process with all code loaded, mapped pages of the file included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

MIB = 1 << 20


def load_rank(path: Path, rank: int, world_size: int) -> dict[str, float]:
    """Load one rank's weights in this process."""
    from hostring.integrations.llm.checkpoint.gguf_file import GgufCheckpoint
    from hostring.integrations.llm.packed.decoder import PackedDecoder, units_of
    from hostring.integrations.llm.packed.library import load

    load()
    checkpoint = GgufCheckpoint(path)
    units = units_of(checkpoint)
    plan = units.shares(checkpoint.config, world_size)
    before, started = _memory("VmRSS"), perf_counter()
    decoder = PackedDecoder(checkpoint, plan, units, rank)
    seconds = perf_counter() - started
    return {"held": decoder.nbytes_held, "grown": _memory("VmHWM") - before, "seconds": seconds}


def _memory(what: str) -> int:
    """Bytes, from /proc/self/status: VmRSS is resident now, VmHWM the most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(load_rank(options.model, *options.one)))
        return
    size = options.model.stat().st_size
    table = Table("ranks", "rank", "held, MiB", "of the file", "share", "growth, MiB", "over held", "load, s")
    for world_size in options.ranks:
        for rank in range(world_size):
            command = [sys.executable, __file__, str(options.model), "--one", str(rank), str(world_size)]
            one = json.loads(subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout)
            held, grown = one["held"], one["grown"]
            figures = [f"{held / MIB:.1f}", f"{held / size:.3f}", f"{1 / world_size:.3f}", f"{grown / MIB:.1f}"]
            table.add_row(str(world_size), str(rank), *figures, f"{grown / held:.2f}", f"{one['seconds']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
