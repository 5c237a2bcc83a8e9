"""What the head rank asks for: checked there, then known on every rank, or refused on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import index
from typing import Any

from hostring import Comm
from hostring.integrations.llm.model.sampling import Sampling

HEAD_RANK = 0


@dataclass(frozen=True)
class Request:
    """One generation: ids of the prompt, how to choose, how many tokens at most, and how many may be guessed for one
    step."""

    ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    guesses: int = 0

    @staticmethod
    def checked(ids: Sequence[int], sampling: Sampling, max_tokens: int, vocab_size: int, guesses: int = 0) -> Request:
        """A request that the model can answer, but for its length.

        Raises:
            TypeError: the prompt is no list of whole numbers.
            ValueError: the prompt is empty or has an id outside the vocabulary, or no token is asked for.
        """
        if not isinstance(ids, list | tuple | range):
            raise TypeError(
                f"the prompt is a {type(ids).__name__}; give text or a list of ids, such as prompt.tolist()"
            )
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        try:
            whole = tuple(index(i) for i in ids)
        except TypeError:
            raise TypeError(f"the prompt holds something that is no whole number: {str(list(ids))[:80]}") from None
        for position, i in enumerate(whole):
            if not 0 <= i < vocab_size:
                raise ValueError(
                    f"id {i} at position {position} of the prompt is outside the vocabulary; ids are 0 to "
                    f"{vocab_size - 1}"
                )
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; ask for at least 1")
        return Request(whole, sampling, max_tokens, guesses)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Request:
        return Request(**{**fields, "ids": tuple(fields["ids"]), "sampling": Sampling(**fields["sampling"])})


def share_request(comm: Comm, make: Callable[[], Request]) -> Request:
    """The head rank's request on every rank, so that no rank can run with other options.

    Args:
        make: called on the head rank alone. What it refuses is refused on every rank.

    Raises:
        ValueError, TypeError: see `Request.checked`.
    """
    record: dict[str, Any] = {}
    if comm.rank == HEAD_RANK:
        try:
            record["request"] = make().to_json()
        except (ValueError, TypeError) as exc:
            record["refused"], record["misuse"] = str(exc), isinstance(exc, TypeError)
    record = json.loads(comm.broadcast_bytes(json.dumps(record).encode(), root=HEAD_RANK))
    if "refused" in record:
        raise (TypeError if record["misuse"] else ValueError)(record["refused"])
    return Request.from_json(record["request"])


def check_fit(n_ids: int, max_seq: int, taken: int) -> None:
    """Refuse a prompt that a KV cache of `max_seq` positions, `taken` of them filled, has no room for."""
    if taken + n_ids > max_seq:
        raise ValueError(
            f"the prompt's {n_ids} tokens don't fit the KV cache of {max_seq} positions, {taken} of them taken; "
            "raise max_seq or shorten the prompt"
        )
