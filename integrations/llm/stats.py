"""What one generation cost, from clocks and from the group's counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from hostring import Comm


@dataclass
class Stats:
    """What one generation cost. Rates are None where there is nothing to measure: a single token has no decode rate.

    Attributes:
        prompt_tokens, generated_tokens: counts.
        ttft_s: from the call to the first token on this rank, prefill included.
        prefill_tokens_per_s: prompt tokens over the time of the forward passes over them and the first decision.
        decode_tokens_per_s: tokens after the first over the time they took.
        collectives_per_token: counted over the decode steps; expected_collectives_per_token: 2 per layer and 1.
        bytes_per_token: payload that this rank sent, counted over the decode steps.
        expected_bytes_per_token: what the schedules say for the same calls.
        seconds: where the decode steps' time went: "compute", and the group's phases. An accelerator computes while it is
            waited for, before its sums are copied to the host: that is in "stage".
        waited_for: seconds of the decode steps' waiting by the rank that was waited for.
        activation_sha256: of all reduced hidden states of this generation, in order; None unless asked for.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    collectives_per_token: float | None = None
    expected_collectives_per_token: int = 0
    bytes_per_token: float | None = None
    expected_bytes_per_token: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    waited_for: dict[int, float] = field(default_factory=dict)
    activation_sha256: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@contextmanager
def measured(stats: Stats, comm: Comm) -> Iterator[None]:
    """Fill in the figures of the decode steps that run inside, all tokens but the first.

    `stats` must hold what is expected, and, at the end, the number of tokens.
    """
    before, begun = comm.counters.snapshot(), perf_counter()
    yield
    elapsed, after, steps = perf_counter() - begun, comm.counters.snapshot(), stats.generated_tokens - 1
    if steps < 1:
        return
    stats.decode_tokens_per_s = steps / elapsed
    stats.collectives_per_token = (sum(after["calls"].values()) - sum(before["calls"].values())) / steps
    stats.bytes_per_token = (after["payload_sent"] - before["payload_sent"]) / steps
    stats.seconds = {phase: s - before["seconds"].get(phase, 0.0) for phase, s in after["seconds"].items()}
    stats.seconds["compute"] = elapsed - sum(stats.seconds.values())
    stats.waited_for = {r: s - before["waited_for"].get(r, 0.0) for r, s in after["waited_for"].items()}


def expected_bytes(comm: Comm, hidden_size: int, reductions: int, decided_elements: int, head_rank: int) -> int:
    """Payload that this rank sends for one decoded token, from the schedules alone.

    Args:
        reductions: all-reduces of one f32 hidden state.
        decided_elements: int32 elements that each rank brings to the decision.
    """
    reduction = comm.expected_payload("all_reduce", hidden_size, "float32")
    return reductions * reduction + comm.expected_payload("decide", decided_elements, "int32", root=head_rank)
