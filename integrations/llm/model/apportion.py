"""Whole units for each rank, as close to wished shares as possible."""

from __future__ import annotations

from collections.abc import Sequence


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Integers that add up to `total`, as close to `shares` as possible; ties go to the lower ranks."""
    if not sum(shares):
        shares = [1.0] * len(shares)
    weight = sum(shares)
    exact = [total * s / weight for s in shares]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(shares)), key=lambda r: (counts[r] - exact[r], r))
    for r in by_remainder[: total - sum(counts)]:
        counts[r] += 1
    return tuple(counts)


def level(held: Sequence[float], amount: float) -> list[float]:
    """Pour `amount` over ranks that already hold `held`, so that the lowest are raised to one level."""
    order = sorted(range(len(held)), key=lambda r: held[r])
    for lowest in range(len(held), 0, -1):
        height = (amount + sum(held[r] for r in order[:lowest])) / lowest
        if height >= held[order[lowest - 1]]:
            break
    return [max(0.0, height - h) for h in held]


def even_columns(n_columns: int, shares: Sequence[float]) -> tuple[int, ...]:
    """FFN columns of each rank, as close to `shares` as possible."""
    # Whole multiples of 32 columns keep block-quantised tensors from being read twice at the cuts.
    granule = 32 if n_columns % 32 == 0 and n_columns >= 256 * len(shares) else 1
    return tuple(granule * n for n in apportion(n_columns // granule, shares))
