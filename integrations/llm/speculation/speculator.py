"""The head rank's guesses for the next step, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from hostring import Comm
from hostring.integrations.llm.checkpoint.chat_tokenizer import ChatTokenizer
from hostring.integrations.llm.request import HEAD_RANK
from hostring.integrations.llm.speculation.depth import Depth
from hostring.integrations.llm.speculation.draft import DraftModel, load_draft
from hostring.integrations.llm.speculation.lookup import PromptLookup
from hostring.integrations.llm.speculation.wish import LOOKUP, Speculation


class Guesser:
    """Guesses for one text."""

    def __init__(self, lookup: bool, draft: DraftModel | None, ids: Sequence[int]) -> None:
        self._lookup = PromptLookup() if lookup else None
        self._draft, self._ids = draft, list[int]()
        self.extend(ids)
        if draft is not None:
            draft.guesses(self._ids, 0)

    @property
    def length(self) -> int:
        """Ids of the text so far."""
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """The text goes on with these ids."""
        self._ids += ids
        if self._lookup is not None:
            self._lookup.extend(ids)

    def guesses(self, count: int) -> list[int]:
        """At most so many ids that may come next."""
        if count < 1:
            return []
        found = self._lookup.guesses(count) if self._lookup is not None else []
        if not found and self._draft is not None:
            found = self._draft.guesses(self._ids, count)
        return found


class Speculator:
    """Guesses for all texts that a head rank writes, and how many pay.

    Args:
        computed: seconds that this rank has computed so far.

    Attributes:
        wish: what was wanted.
        most: guesses for a text in one step.
    """

    def __init__(self, wish: Speculation, draft: DraftModel | None, computed: Callable[[], float]) -> None:
        self.wish, self._draft, self._computed = wish, draft, computed
        self.most = wish.most
        self._depths: dict[int, Depth] = {}  # by candidates, which take time on the wire; see `_depth`
        self._since: tuple[float, float] | None = None

    def text(self, ids: Sequence[int], n_candidates: int = 1) -> Guesser:
        """For a new text, which begins with these ids, and brings so many candidates for each choice."""
        self._depth(n_candidates).begin_text()
        return Guesser(self.wish.kind == LOOKUP, self._draft, ids)

    def pause(self) -> None:
        """The step that runs tells nothing: it reads a prompt, or there was a wait before it."""
        self._since = None

    def _depth(self, n_candidates: int) -> Depth:
        """What is measured of texts that bring about so many candidates: from one power of two to the next."""
        return self._depths.setdefault(n_candidates.bit_length(), Depth(self.wish.most, self.wish.always))

    def noted(self, sequences: int, guesses: int, tokens: int, n_candidates: int = 1) -> None:
        """A step is done, and the next one begins; see `Depth.note`. n_candidates: the most of a text."""
        now = perf_counter(), self._computed()
        if self._since is not None:
            self._depth(n_candidates).note(sequences, guesses, tokens, now[0] - self._since[0], now[1] - self._since[1])
        self._since = now

    def depth(self, sequences: int = 1, n_candidates: int = 1) -> int:
        """Guesses for each of so many texts in the next step. n_candidates: the most of a text."""
        return self._depth(n_candidates).choose(sequences)


def load_speculator(
    wish: Speculation,
    comm: Comm,
    tokenizer: ChatTokenizer,
    max_seq: int,
    computed: Callable[[], float],
    before: Speculator | None = None,
) -> Speculator | None:
    """The head rank's guesses; None on the others, and where none are wanted. A collective.

    Args:
        wish: the head rank's counts. max_seq: positions of a KV cache.
        before: what this rank has loaded before, which stays if the wish is the same.

    Raises:
        ValueError: the draft model can't be used; on every rank.
    """
    found, refused = None, ""
    if comm.rank == HEAD_RANK and before is not None and before.wish == wish:
        found = before
    elif comm.rank == HEAD_RANK and wish.on:
        try:
            draft = load_draft(wish.draft, tokenizer, max_seq) if wish.draft else None
            found = Speculator(wish, draft, computed)
        except ValueError as exc:
            refused = str(exc)
    if refused := comm.broadcast_bytes(refused.encode(), root=HEAD_RANK).decode():
        raise ValueError(refused)
    return found
