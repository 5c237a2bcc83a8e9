"""What one generation cost, from clocks and from the group's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any

from hostring import Comm
from hostring.integrations.llm.model.audit import Clock
from hostring.integrations.llm.model.expected import Expected
from hostring.integrations.llm.model.shards import Boundaries

Counts = Callable[[], dict[str, Any]]
"""What a rank's groups have counted so far, see `LocalModel.counts`."""


@dataclass
class Stats:
    """What one generation cost. Rates are None where there is nothing to measure: a single token has no decode rate.

    Attributes:
        prompt_tokens, generated_tokens: counts. reused_tokens: of the prompt, those that were in the cache already.
        ttft_s: from the call to the first token on this rank, prefill included.
        prefill_tokens_per_s: prompt tokens that were not reused over the time of the forward passes over them and the
            first decision.
        decode_tokens_per_s: tokens after the first over the time they took.
        collectives_per_token: counted over the decode steps; expected_collectives_per_token: 2 per layer and 1.
        bytes_per_token: payload that this rank sent, counted over the decode steps.
        expected_bytes_per_token: what the schedules say for the same calls.
        boundary_bytes_per_token: what this rank sent to the next stage of a pipeline, headers included.
        prefill_collectives, prefill_bytes: the same, over the prompt and the first decision;
            expected_prefill_collectives,
            expected_prefill_bytes: what the schedules say.
        seconds: where the decode steps' time went: "compute" by a clock that runs from step to step and stands still in
            collectives, the group's phases, and the "rest". An accelerator computes while it is waited for, before its
            sums are copied to the host: that is in "stage".
        decode_steps: forward passes after the prompt; tokens_per_step: what each of them gave.
        waited_for: seconds of the decode steps' waiting by the rank that was waited for.
        activation_sha256: of all reduced hidden states of this generation, and of the residual stream at the end of
            each
            step, in order; None unless asked for.
        logits_sha256: of the logits of every step, gathered in the order of the vocabulary, on the head rank; None
            unless asked for.
        wrong_steps: forward passes whose residual stream was not the sum of what was reduced; None unless asked for.
        handover: what it cost to hand keys and values over to the rank that decodes; None where none were.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_tokens: int = 0
    ttft_s: float = 0.0
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    decode_steps: int = 0
    collectives_per_token: float | None = None
    expected_collectives_per_token: float = 0
    bytes_per_token: float | None = None
    expected_bytes_per_token: float = 0
    boundary_bytes_per_token: float | None = None
    prefill_collectives: int = 0
    expected_prefill_collectives: int = 0
    prefill_bytes: int = 0
    expected_prefill_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    waited_for: dict[int, float] = field(default_factory=dict)
    activation_sha256: str | None = None
    logits_sha256: str | None = None
    wrong_steps: int | None = None
    handover: dict[str, Any] | None = None

    @property
    def tokens_per_step(self) -> float | None:
        return (self.generated_tokens - 1) / self.decode_steps if self.decode_steps else None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tokens_per_step": self.tokens_per_step}


def waits_most_for(rank: int, waited_for: Mapping[int, Mapping[int, float]]) -> tuple[int | None, float]:
    """The rank that kept `rank` waiting longest, and for how many seconds; (None, 0.0) when none did.

    What two ranks waited for each other cancels, so that of two at most one is named.

    Args:
        waited_for: of each rank, as in `Stats`.
    """
    net = {peer: s - waited_for.get(peer, {}).get(rank, 0.0) for peer, s in waited_for.get(rank, {}).items()}
    peer, seconds = max(net.items(), key=lambda item: item[1], default=(None, 0.0))
    return (peer, seconds) if seconds > 0 else (None, 0.0)


@contextmanager
def prefill_measured(stats: Stats, counts: Counts, started: float) -> Iterator[None]:
    """Fill in the figures of the forward passes over the prompt and of the first decision, which run inside.

    Args:
        started: when the call began, by `perf_counter`.
    """
    before, begun = counts(), perf_counter()
    yield
    now, after = perf_counter(), counts()
    stats.ttft_s = now - started
    stats.prefill_tokens_per_s = (stats.prompt_tokens - stats.reused_tokens) / (now - begun)
    stats.prefill_collectives = sum(after["calls"].values()) - sum(before["calls"].values())
    stats.prefill_bytes = after["payload_sent"] - before["payload_sent"]


@contextmanager
def decode_measured(stats: Stats, counts: Counts, clock: Clock) -> Iterator[None]:
    """Fill in the figures of the decode steps that run inside, all tokens but the first.

    `stats` must hold what is expected, and, at the end, the number of tokens. `clock` runs while this rank computes.
    """
    before, begun, computed = counts(), perf_counter(), clock.seconds
    yield
    elapsed, after, steps = perf_counter() - begun, counts(), stats.generated_tokens - 1
    if steps < 1:
        return
    stats.decode_tokens_per_s = steps / elapsed
    stats.collectives_per_token = (sum(after["calls"].values()) - sum(before["calls"].values())) / steps
    stats.bytes_per_token = (after["payload_sent"] - before["payload_sent"]) / steps
    stats.boundary_bytes_per_token = (after["boundary_sent"] - before["boundary_sent"]) / steps
    stats.seconds = {phase: s - before["seconds"].get(phase, 0.0) for phase, s in after["seconds"].items()}
    stats.seconds["compute"] = clock.seconds - computed
    stats.seconds["rest"] = max(0.0, elapsed - sum(stats.seconds.values()))
    stats.waited_for = {r: s - before["waited_for"].get(r, 0.0) for r, s in after["waited_for"].items()}


@dataclass(frozen=True)
class Traffic:
    """What forward passes cost on this rank, from the schedules alone.

    Attributes:
        comm: the group that decides. reducing: the one that reduces: that of this rank's stage, in a pipeline.
        reduced_elements: f32 elements of each all-reduce of one position's forward pass.
        boundaries: what crosses the borders of a stage for each position.
        decided: int32 elements that each rank brings to the decision after the last of the passes, and those of the
            decision.
        head_rank: who decides.
        gathered_elements: f32 elements of the logits that each rank brings to be hashed, where they are, for each row
            whose logits are wanted.
    """

    comm: Comm
    reducing: Comm
    reduced_elements: Sequence[int]
    boundaries: Boundaries
    decided: tuple[int, int]
    head_rank: int
    gathered_elements: int = 0

    def collectives(self, passes: Sequence[int]) -> int:
        """Calls for forward passes over these numbers of positions, and one decision."""
        per_pass = len(self.reduced_elements) + (self.boundaries.shared > 0) + len(self.boundaries.merged)
        return len(passes) * per_pass + 1 + (self.gathered_elements > 0)

    def nbytes(self, passes: Sequence[int], wanted: int = 1) -> int:
        """Payload that this rank sends for them, when the logits of so many rows are wanted."""
        expected, summed = self.comm.expected_payload, self.reducing.expected_payload
        counts = Counter(n * each for n in passes for each in self.reduced_elements)
        reduced = sum(times * summed("all_reduce", n, "float32") for n, times in counts.items())
        decided = expected("decide", self.decided, "int32", root=self.head_rank)
        gathered = expected("gather", wanted * self.gathered_elements, "float32", root=self.head_rank)
        shared = sum(summed("broadcast", n * self.boundaries.shared, "float32") for n in passes)
        merging = self.boundaries.merging
        merges = Counter(n * each for n in passes for each in self.boundaries.merged)
        merged = sum(times * merging.expected_payload("all_to_all", n, "float32") for n, times in merges.items())
        return int(reduced + decided + gathered + shared + merged + 4 * sum(passes) * self.boundaries.sent)

    def of_guesses(self, stats: Stats, rows: Sequence[int], decided: Callable[[int], tuple[int, int]]) -> None:
        """Fill in what is expected of decode steps that had so many rows each. `decided`: of the decision after such a
        step."""
        tokens = stats.generated_tokens - 1
        if tokens < 1:
            return
        nbytes = {n: replace(self, decided=decided(n)).nbytes([n], n) for n in set(rows)}
        stats.expected_collectives_per_token = len(rows) * self.collectives([1]) / tokens
        stats.expected_bytes_per_token = sum(nbytes[n] for n in rows) / tokens


def expected_stats(expected: Expected, prompt_tokens: int, passes: Sequence[int]) -> Stats:
    """What is expected of a generation that reads its prompt in these forward passes."""
    return Stats(
        prompt_tokens=prompt_tokens,
        reused_tokens=prompt_tokens - sum(passes),
        expected_collectives_per_token=expected.collectives([1]),
        expected_bytes_per_token=expected.nbytes([1]),
        expected_prefill_collectives=expected.collectives(passes),
        expected_prefill_bytes=expected.nbytes(passes),
    )
