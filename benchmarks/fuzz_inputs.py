"""Good inputs that were damaged (bits, lengths, cuts, splices), or plain noise."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_EVIL = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


def damaged(seeds: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Endless inputs."""
    while True:
        kind = rng.random()
        if kind < 0.05:
            yield rng.randbytes(rng.randrange(200))
            continue
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            at = rng.randrange(len(data) + 1)
            how = rng.randrange(7)
            if how == 0 and at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            elif how == 1 and at < len(data):
                data[at] = rng.randrange(256)
            elif how == 2:
                width = rng.choice((1, 2, 4, 8))
                data[at : at + width] = (rng.choice(_EVIL) & ((1 << 8 * width) - 1)).to_bytes(
                    width, rng.choice(("little", "big"))
                )
            elif how == 3:
                del data[at:]
            elif how == 4:
                del data[at : at + rng.randrange(1, 9)]
            elif how == 5:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            else:
                start = rng.randrange(len(data) + 1)
                data[at:at] = data[start : start + rng.randrange(1, 40)] * rng.choice((1, 1, 30))
        yield bytes(data)
