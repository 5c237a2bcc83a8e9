"""Rotary frequencies, and how they are stretched for long contexts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for long contexts.

    `kind` is "none", "linear" (divide by `factor`), "llama3" (Llama 3.1's smooth band), "yarn", or "table"
    (divide each frequency by `divisors`, which is how GGUF ships Llama 3.1's band).

    Attributes:
        low_freq_factor, high_freq_factor: the borders of llama3's band, in turns over the original context.
        original_max_positions: the original context.
        beta_fast, beta_slow: the borders of yarn's band, in turns over the original context.
        whole_pairs: whether yarn's band is widened to whole pairs of dimensions.
        divisors: one per pair of dimensions.
        attention_factor: what rotated queries and keys are multiplied by.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    whole_pairs: bool = True
    divisors: tuple[float, ...] = ()
    attention_factor: float = 1.0


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
    if scaling.kind == "yarn":
        return _yarn(plain, head_dim, theta, scaling)
    return plain


def rotary_divisors(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """What each of the head_dim / 2 unscaled frequencies is divided by."""
    plain, scaled = (rotary_frequencies(head_dim, theta, s) for s in (UNSCALED, scaling))
    return [f / g for f, g in zip(plain, scaled, strict=True)]


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What rotated queries and keys are multiplied by, where a model says nothing else."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(frequency: float, s: RopeScaling) -> float:
    """Long wavelengths are divided by the factor, short ones are kept, those between are blended."""
    rotations = s.original_max_positions * frequency / (2 * math.pi)  # over the original context
    if rotations < s.low_freq_factor:
        return frequency / s.factor
    if rotations > s.high_freq_factor:
        return frequency
    blend = (rotations - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    return (1 - blend) * frequency / s.factor + blend * frequency


def _yarn(plain: list[float], head_dim: int, theta: float, s: RopeScaling) -> list[float]:
    """As llama3, blended over pairs of dimensions, not over frequencies.

    Source: Peng et al., YaRN, arXiv:2309.00071.
    """

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(s.original_max_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(s.beta_fast), pair_that_turns(s.beta_slow)
    if s.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    blends = [min(max((i - first) / width, 0.0), 1.0) for i in range(len(plain))]
    return [f / s.factor * blend + f * (1 - blend) for f, blend in zip(plain, blends, strict=True)]
