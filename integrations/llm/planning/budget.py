"""What one token may cost: time per layer, collectives, bytes, and the bound that no machine can beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hostring.integrations.llm.planning.predicted import LowerBound, Predicted

COLLECTIVES_PER_LAYER = 2


@dataclass(frozen=True)
class Budget:
    """One token's time at a wanted rate.

    Attributes:
        tokens_per_s: wanted. n_layers: of the model. collective_s: of one reduction; None where nobody knows it.
    """

    tokens_per_s: float
    n_layers: int
    collective_s: float | None = None

    @property
    def token_s(self) -> float:
        return 1 / self.tokens_per_s

    @property
    def layer_s(self) -> float:
        """For computing and communication of one layer."""
        return self.token_s / self.n_layers

    @property
    def collectives(self) -> int:
        """One after the other, each waits for the one before."""
        return COLLECTIVES_PER_LAYER * self.n_layers

    @property
    def communication_s(self) -> float | None:
        """Of all reductions of a token."""
        return None if self.collective_s is None else self.collectives * self.collective_s

    @property
    def communication_share(self) -> float | None:
        """Of the token's time."""
        return None if self.communication_s is None else self.communication_s / self.token_s

    @property
    def feasible(self) -> bool:
        """Whether communication alone leaves any time to compute in."""
        return self.communication_share is None or self.communication_share < 1

    def in_words(self) -> str:
        head = (
            f"{self.tokens_per_s:g} tokens/s leave {1e3 * self.token_s:.4g} ms per token, "
            f"{1e6 * self.layer_s:.0f} us per layer, for {self.collectives} collectives one after the other"
        )
        if self.communication_s is None or self.communication_share is None or self.collective_s is None:
            return f"{head}; each must stay well below {1e6 * self.token_s / self.collectives:.0f} us"
        told = (
            f"{head}; at {1e6 * self.collective_s:.4g} us each they take {1e3 * self.communication_s:.4g} ms, "
            f"{100 * self.communication_share:.1f} % of it"
        )
        return told if self.feasible else f"{told}: INFEASIBLE, even if computing took no time"

    def as_json(self) -> dict[str, Any]:
        share = self.communication_share
        return {
            "tokens_per_s": self.tokens_per_s,
            "per_token": Predicted(self.token_s, "s").as_json(),
            "per_layer": Predicted(self.layer_s, "s").as_json(),
            "collectives": self.collectives,
            "communication_share": None if share is None else Predicted(share, "of the token's time").as_json(),
            "feasible": self.feasible,
        }


def boundary_nbytes(hidden_size: int, n_tokens: int = 1, itemsize: int = 4) -> int:
    """Bytes of hidden state that one boundary makes whole. Partial sums travel as f32 unless `itemsize` says else."""
    return n_tokens * hidden_size * itemsize


def token_nbytes(hidden_size: int, n_layers: int, n_tokens: int = 1, itemsize: int = 4) -> int:
    """The same over all boundaries of a forward pass."""
    return COLLECTIVES_PER_LAYER * n_layers * boundary_nbytes(hidden_size, n_tokens, itemsize)


def lower_bound(
    fresh_nbytes: float, flops: float, bandwidth: float | None, flop_rate: float | None, communication_s: float = 0.0
) -> LowerBound:
    """max(B_fresh / BW, F / P) + C(N): what memory and arithmetic of one rank, and the group's collectives, allow.

    Args:
        fresh_nbytes: that must come from memory, once. flops: floating-point operations.
        bandwidth, flop_rate: the rank's best, in bytes and operations per second; None leaves that term out.
        communication_s: of all collectives.
    """
    stream = fresh_nbytes / bandwidth if bandwidth else 0.0
    arithmetic = flops / flop_rate if flop_rate else 0.0
    return LowerBound(max(stream, arithmetic) + communication_s)
