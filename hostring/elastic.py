"""Making a group whole again: who is still there or has come back, and which rank each of them gets.

The rule for ranks: members are ordered by the rank they held or ask for, then by arrival, and numbered from 0 without gaps.
So survivors keep their order, and a process that comes back as rank k stands where rank k stood.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from .errors import RendezvousError
from .rendezvous import Progress
from .store import Store

_PAUSE = 0.02


@dataclass(frozen=True)
class Seat:
    """A place in the new group."""

    rank: int
    world_size: int
    generation: int


class Regrouping:
    """One rank's part in forming the next generation of a group through the group's store.

    Args:
        prefix: the group's name in the store.
        claim: the rank that this process held, or asks for.
        min_ranks: how many must be there. Every survivor should name the same number.
        survivors: how many other members of the old group are known to be alive; asked again and again.
        deadline: monotonic time.
    """

    def __init__(self, store: Store, prefix: str, claim: int, min_ranks: int, survivors: Callable[[], int], deadline: float) -> None:
        self._store, self._prefix, self._claim = store, f"{prefix}/again", claim
        self._min_ranks, self._survivors, self._deadline = min_ranks, survivors, deadline
        self._progress = Progress(claim, deadline)

    def survive(self, generation: int) -> Seat:
        """Take part as a member of the generation before `generation`.

        Raises:
            RendezvousError: too few ranks came in time. The message says how many.
        """
        while True:
            try:
                self._store.set(f"{self._prefix}/open", str(generation).encode())
                seat = self._register(generation, self._store.add(f"{self._prefix}/{generation}/survivors", 1) == 1)
            except ConnectionError as exc:
                if isinstance(exc, RendezvousError):
                    raise
                self._wait_a_little(f"for the store to come back ({exc})")
                continue
            if seat is None:
                raise RendezvousError(f"rank {self._claim} came too late: generation {generation} was formed without it")
            return seat

    def come_back(self) -> Seat:
        """Take part as a process that was not a member: in the next generation that the survivors open.

        Raises:
            RendezvousError: none was opened in time.
        """
        tried = 0
        while True:
            try:
                generation = self._opened()
                if generation > tried:
                    tried = generation
                    if (seat := self._register(generation)) is not None:
                        return seat
            except ConnectionError as exc:
                if isinstance(exc, RendezvousError):
                    raise
            self._wait_a_little("for the others to rebuild the group")

    def _opened(self) -> int:
        if not self._store.check([f"{self._prefix}/open"]):
            return 0
        return int(self._store.get(f"{self._prefix}/open", 1.0))

    def _register(self, generation: int, leads: bool = False) -> Seat | None:
        """Come in, and wait for the list of members, which the first survivor writes. None when this one is not on it."""
        base = f"{self._prefix}/{generation}"
        if self._store.check([f"{base}/list"]):
            return None
        number = self._store.add(f"{base}/count", 1)
        self._store.set(f"{base}/{number}", msgpack.packb(self._claim))
        if leads:
            self._lead(base)
        while not self._store.check([f"{base}/list"]):
            self._wait_a_little(f"for the others to rebuild the group (at least {self._min_ranks})")
        members: list[list[int]] = msgpack.unpackb(self._store.get(f"{base}/list", 5.0))
        order = [arrival for _, arrival in sorted((claim, arrival) for claim, arrival in members)]
        return Seat(order.index(number), len(order), generation) if number in order else None

    def _lead(self, base: str) -> None:
        """Wait until enough ranks came, and all known survivors among them, then close the list."""
        while True:
            count = self._store.add(f"{base}/count", 0)
            if count >= max(self._min_ranks, 1 + self._survivors()):
                break
            self._wait_a_little("for ranks to come back", f"{count} here, at least {self._min_ranks} needed")
        members = [[msgpack.unpackb(self._store.get(f"{base}/{k}", 5.0)), k] for k in range(1, count + 1)]
        self._store.set(f"{base}/list", msgpack.packb(members))

    def _wait_a_little(self, what: str, state: str = "") -> None:
        self._progress.waits(what, state)
        if time.monotonic() > self._deadline:
            raise RendezvousError(f"rank {self._claim} waited in vain {what}{f' ({state})' if state else ''}")
        time.sleep(_PAUSE)
