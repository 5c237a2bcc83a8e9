"""Which message goes to which receive: matched by source and tag, in the order in which both came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

from hostring.arrays.casting import cast
from hostring.arrays.dtypes import CODES, DTYPES, NAMES, Array, kind_code
from hostring.engine.frames import Header
from hostring.engine.work import Driver, Work
from hostring.errors import CollectiveMismatch


class MessageWork(Work):
    """A send or a receive under way. `src` is the rank that a receive was served by, once it is done."""

    __slots__ = ("deadline", "into", "owner", "put_back", "result", "seconds", "src", "tag", "wanted")

    def __init__(self, what: str, seconds: float, driver: Driver | None = None) -> None:
        super().__init__(what, driver)
        self.seconds = seconds
        self.deadline = perf_counter() + seconds
        self.into: Array | None = None
        self.wanted: int | None = None  # the rank asked for, or None for any
        self.src: int | None = None
        self.tag = 0
        self.result: Any = None
        self.owner: Any = None  # of the memory that is being sent, which a view of a tensor doesn't keep alive
        self.put_back: Callable[[], Any] | None = None

    def deliver(self, src: int, body: Array | None) -> None:
        """End a receive: `body` is what came when it did not come straight into place."""
        assert self.into is not None
        if body is not None:
            cast(self.into, body)
        self.src = src
        self.finish(self.put_back() if self.put_back is not None else self.result)


class Matching:
    """Receives that wait for their message, as `posted`, and messages that came before their receive, by sender.

    `CollectiveMismatch` is raised where a message doesn't fit its receive.
    """

    def __init__(self, peers: Iterable[int]) -> None:
        self.posted: list[MessageWork] = []
        self._unexpected: dict[int, deque[tuple[Header, Array]]] = {peer: deque() for peer in peers}

    def post(self, work: MessageWork) -> None:
        """Serve a receive with the first message that is here for it, or let it wait for one."""
        for rank, messages in self._unexpected.items():
            if work.wanted not in (None, rank):
                continue
            for k, (header, body) in enumerate(messages):
                if _tag(header) == work.tag:
                    del messages[k]
                    _check(work, header, rank)
                    work.deliver(rank, body)
                    return
        self.posted.append(work)

    def claim(self, rank: int, header: Header) -> MessageWork | None:
        """Take away the receive that waits for the message with this header from `rank`; None when none does."""
        tag = _tag(header)
        work = next((w for w in self.posted if w.tag == tag and w.wanted in (None, rank)), None)
        if work is not None:
            _check(work, header, rank)
            self.posted.remove(work)
        return work

    def keep(self, rank: int, header: Header, body: Array) -> None:
        """Take a message that no receive waited for when it began: one may have been posted since."""
        work = self.claim(rank, header)
        if work is None:
            self._unexpected[rank].append((header, body))
        else:
            work.deliver(rank, body)


def _tag(header: Header) -> int:
    return header.round << 32 | header.detail


def _check(work: MessageWork, header: Header, rank: int) -> None:
    """Refuse a message that doesn't fit its receive: a longer one, a shorter one, or one of another kind of dtype."""
    into = work.into
    assert into is not None
    if header.n_elements != into.size or kind_code(DTYPES[header.payload_dtype]) != kind_code(into.dtype):
        sent = f"rank {rank} sent {header.n_elements} elements of {header.dtype_name()}"
        raise CollectiveMismatch(
            f"{work.what}: {sent}, this rank expects {into.size} of {NAMES[CODES[into.dtype]]}", rank
        )
