"""One prompt at the head rank, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hostring.integrations.llm.generation import Generation


@dataclass
class Turn:
    """One prompt at the head rank, and what came of it.

    Attributes:
        tokens, pieces: what was generated, as far as it came.
        generation, reports: of a complete answer.
        lost: who was lost in the middle of it, and how: "rank" and "reason".
        error: why it was refused.
    """

    prompt: str
    ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    generation: Generation | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)
    lost: dict[str, Any] | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON. `text` and `tokens` of an answer that broke off are those that had come."""
        whole = self.generation
        stats = None if whole is None else whole.stats
        return {
            "prompt": self.prompt,
            "prompt_tokens": len(self.ids),
            "tokens": self.tokens,
            "text": "".join(self.pieces) if whole is None else whole.text,
            "complete": whole is not None,
            "stop_reason": whole.stop_reason if whole is not None else "refused" if self.lost is None else "lost",
            "lost": self.lost,
            "error": self.error,
            "reused_tokens": None if stats is None else stats.reused_tokens,
            "ttft_s": None if stats is None else stats.ttft_s,
            "decode_tokens_per_s": None if stats is None else stats.decode_tokens_per_s,
            "tokens_per_step": None if stats is None else stats.tokens_per_step,
        }
