"""The smallest useful program: every rank brings a vector, every rank gets the same sum, bit for bit.

Run it under whatever starts your ranks:

    hostring launch -n 2 examples/all_reduce.py
    torchrun --nproc-per-node 2 examples/all_reduce.py
    mpirun -n 2 python examples/all_reduce.py
    RING_CONFIG=ring0.json python examples/all_reduce.py     # ring1.json on the other machine
"""

import hashlib

import numpy as np

import hostring

with hostring.init() as comm:
    dtype = [np.float16, np.float32][comm.rank % 2]  # unlike ranks: each brings its own precision
    x = np.random.default_rng(comm.rank).standard_normal(1000).astype(dtype)
    total = comm.all_reduce(x.astype(np.float32))
    digests = comm.all_gather(np.frombuffer(hashlib.sha256(total).digest(), np.uint8))
    if comm.rank == 0:
        for rank, digest in enumerate(digests):
            print(f"rank {rank} of {comm.world_size}: sha256 {bytes(digest).hex()[:16]}…")
