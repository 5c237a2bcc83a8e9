"""Rotary frequencies, and how they are stretched for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for long contexts.

    `kind` is "none", "linear" (divide by `factor`), "llama3" (Llama 3.1's smooth band) or "table"
    (divide each frequency by `divisors`, which is how GGUF ships Llama 3.1's band).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    divisors: tuple[float, ...] = ()


UNSCALED = RopeScaling()


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Radians per position for each of the head_dim / 2 pairs, after scaling."""
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "table":
        return [f / d for f, d in zip(plain, scaling.divisors, strict=True)]
    if scaling.kind == "llama3":
        return [_llama3(f, scaling) for f in plain]
    return plain


def _llama3(frequency: float, s: RopeScaling) -> float:
    """Long wavelengths are divided by the factor, short ones are kept, those between are blended."""
    rotations = s.original_max_positions * frequency / (2 * math.pi)  # over the original context
    if rotations < s.low_freq_factor:
        return frequency / s.factor
    if rotations > s.high_freq_factor:
        return frequency
    blend = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - blend) * frequency / s.factor + blend * frequency
