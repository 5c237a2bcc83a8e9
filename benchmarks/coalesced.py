#!/usr/bin/env python3
"""Small arrays in one all-reduce against one each, in turns: `hostring launch -n 2 benchmarks/coalesced.py`."""

from __future__ import annotations

import statistics
from time import perf_counter

import numpy as np

import hostring
from hostring.launch.cores import pin

ROUNDS = 300


def main() -> None:
    with hostring.init() as comm:
        pin(comm.rank)
        for count, n_elements in ((32, 256), (8, 1024), (8, 4096)):
            arrays = [np.ones(n_elements, np.float32) for _ in range(count)]
            each, together = [], []
            for _ in range(ROUNDS):
                began = perf_counter()
                for x in arrays:
                    comm.all_reduce(x, "max")
                each.append(perf_counter() - began)
                began = perf_counter()
                comm.all_reduce_coalesced(arrays, "max")
                together.append(perf_counter() - began)
            if comm.rank == 0:
                apart, joined = (1e6 * statistics.median(seconds) for seconds in (each, together))
                print(
                    f"{count:3} of {4 * n_elements:5} bytes: {apart:7.1f} us apart, {joined:7.1f} us together "
                    f"({joined / apart:.2f})"
                )


if __name__ == "__main__":
    main()
