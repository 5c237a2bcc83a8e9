"""What ranks tell each other between prompts, and what became of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hostring import Comm
from hostring.integrations.llm.generate import HEAD_RANK, Generation

WAIT, ANSWER, CONTROLS, END = range(4)


@dataclass(frozen=True)
class Message:
    """What all ranks do next.

    Attributes:
        what: WAIT, ANSWER, CONTROLS or END.
        more: another prompt may come after this.
        fresh: the first prompt since the ranks came together.
        ids: the prompt.
    """

    what: int
    more: bool = False
    fresh: bool = False
    ids: tuple[int, ...] = ()


def share(comm: Comm, message: Message | None) -> Message:
    """The head rank's message, on every rank. A collective; others pass None.

    When it returns, every rank has a prompt: one that died while there was none fails this call, not the answer.
    """
    record = np.zeros(4, np.int64)
    if message is not None:
        record[:] = message.what, message.more, message.fresh, len(message.ids)
    comm.broadcast(record, root=HEAD_RANK)
    what, more, fresh, n_ids = record.tolist()
    ids = np.zeros(n_ids, np.int64) if message is None else np.array(message.ids, np.int64)
    if n_ids:
        comm.broadcast(ids, root=HEAD_RANK)
        comm.barrier()
    return Message(what, bool(more), bool(fresh), tuple(ids.tolist()))


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
            "ttft_s": None if stats is None else stats.ttft_s,
            "decode_tokens_per_s": None if stats is None else stats.decode_tokens_per_s,
        }
