"""What the ranks agree on when they load a model: who computes packed, and that all cut it in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hostring import Comm

_HASH_NBYTES = 8  # of each sha256; ranks that differ by accident differ in these


@dataclass(frozen=True)
class Able:
    """Whether a rank can decode packed: `why_not` is empty when it can and may."""

    why_not: str
    asked_for: bool


@dataclass(frozen=True)
class ShareHashes:
    """sha256 of what a rank cuts the model by, in hexadecimal; empty where it has none.

    Attributes:
        exact: of the plan, where no rank computes packed. packed: of the plan, where one does.
        units: of the borders of units, on a packed rank.
    """

    exact: str = ""
    packed: str = ""
    units: str = ""

    def encode(self) -> bytes:
        width = 2 * _HASH_NBYTES
        return b"".join(bytes.fromhex(text[:width].ljust(width, "0")) for text in (self.exact, self.packed, self.units))

    @staticmethod
    def decode(encoded: bytes) -> ShareHashes:
        words = [encoded[at : at + _HASH_NBYTES] for at in range(0, 3 * _HASH_NBYTES, _HASH_NBYTES)]
        return ShareHashes(*(word.hex() if any(word) else "" for word in words))


def agree(comm: Comm, mine: Able, hashes: ShareHashes) -> list[bool]:
    """Which ranks compute packed. A collective.

    Raises:
        ValueError: a rank was told to and can't, or cuts the model by another plan; on every rank.
    """
    row = bytes([not mine.why_not, mine.asked_for]) + hashes.encode()
    rows = [one.tobytes() for one in comm.all_gather(np.frombuffer(row, np.int8)).reshape(comm.world_size, -1)]
    if mine.asked_for and mine.why_not:
        raise ValueError(f"rank {comm.rank} can't compute packed: {mine.why_not}")
    refused = [rank for rank, (can, asked, *_) in enumerate(rows) if asked and not can]
    if refused:
        raise ValueError(f"rank {refused[0]} was told to compute packed and can't; its own error says why")
    ways = [bool(row[0]) for row in rows]
    told = [ShareHashes.decode(row[2:]) for row in rows]
    _check_alike(
        [one.packed if any(ways) else one.exact for one in told], "another plan", "give all ranks the same --plan"
    )
    borders = [one.units if way else "" for one, way in zip(told, ways, strict=True)]
    _check_alike(borders, "other unit borders", "give all ranks the same model file and the same release of hostring")
    return ways


def _check_alike(hashes: Sequence[str], what: str, advice: str) -> None:
    """Refuse, by name, the ranks that differ from most. Those with nothing to say differ from none."""
    told = [text for text in hashes if text]
    usual = Counter(told).most_common(1)[0][0] if told else ""
    odd = [rank for rank, text in enumerate(hashes) if text and text != usual]
    if odd:
        rank, other = odd[0], hashes.index(usual)
        raise ValueError(f"rank {rank} has {what} ({hashes[rank]}) than rank {other} ({usual}); {advice}")
