"""Making a group whole again: who is still there or has come back, and which rank each of them gets.

The rule for ranks: members are ordered by the rank they held or ask for, then by arrival, and numbered from 0 without gaps.
So survivors keep their order, and a process that comes back as rank k stands where rank k stood.

A generation is one attempt. Whoever wants to be in it registers under the next free number and shows from time to time that
it is still there; the first survivor to register leads: it waits until enough are there, and writes the list of those. A
generation whose leader falls silent is given up for the next one. A rank that dies after the list was written spoils the
generation when its links are made; whoever is left meets again in a later one. Where every rank of the group asks to come back,
nobody is left to open a generation: then the one that asks for rank 0 does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from hostring.errors import RendezvousError
from hostring.group.rendezvous import Progress
from hostring.store.stores import Store

_PAUSE = 0.02
_BEAT_SECONDS = 0.1  # between two signs of life

SILENT_SECONDS = 3.0
"""Without a sign of life for so long, a process that takes part is taken for dead."""

GATHER_SECONDS = 3.5
"""How long newcomers are waited for where it isn't sure who is left: longer than the dead are taken for living."""


@dataclass(frozen=True)
class Seat:
    """A place in the new group."""

    rank: int
    world_size: int
    generation: int


class _Pulse:
    """Signs of life of one process: a counter in the store. Here they are counted, and there watched."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._value = -1
        self._changed = time.monotonic()
        self._due = 0.0
        self._heard = False

    def beat(self) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _BEAT_SECONDS
            self._store.add(self._key, 1)

    def silent(self) -> bool:
        """Whether nothing was heard for long, as far as this watcher has listened."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _BEAT_SECONDS
            value = self._store.add(self._key, 0)
            if value != self._value:
                self._heard = self._value >= 0  # what was there before proves nothing
                self._value, self._changed = value, now
        return now - self._changed > SILENT_SECONDS

    def lives(self) -> bool:
        """Whether it was heard since this watcher listens, and not too long ago."""
        return not self.silent() and self._heard


class Regrouping:
    """One rank's part in forming the next generation of a group through the group's store.

    Args:
        prefix: the group's name in the store.
        claim: the rank that this process held, or asks for.
        min_ranks: how many must be there. Every survivor should name the same number.
        survivors: how many other members of the old group are known to be alive, asked again and again; None when nobody knows.
        deadline: monotonic time.
        expected: how many the old group had; where nobody knows who survives, nobody is waited for beyond that, and as many
            newcomers know that nobody survived.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        claim: int,
        min_ranks: int,
        survivors: Callable[[], int] | None,
        deadline: float,
        expected: int = 0,
    ) -> None:
        self._store, self._prefix, self._claim = store, f"{prefix}/again", claim
        self._min_ranks, self._survivors, self._deadline = min_ranks, survivors, deadline
        self._expected = max(expected, min_ranks)
        self._progress = Progress(claim, deadline)

    def survive(self, generation: int) -> Seat:
        """Take part as a member of the generation before `generation`, in that one or a later one.

        Raises:
            RendezvousError: too few ranks came in time, or the group was formed without this rank. The message says which.
        """
        while True:
            try:
                generation = self._latest(generation)
                self._store.set(f"{self._prefix}/{generation}/open", b"")
                self._store.set(f"{self._prefix}/opened", str(generation).encode())
                leads = self._store.add(f"{self._prefix}/{generation}/survivors", 1) == 1
                if (seat := self._register(generation, leads)) is not None:
                    return seat
                if self._store.check([f"{self._prefix}/{generation}/list"]):
                    raise RendezvousError(
                        f"rank {self._claim} came too late: generation {generation} was formed without it"
                    )
                generation += 1  # its leader is gone
            except ConnectionError as exc:
                if isinstance(exc, RendezvousError):
                    raise
                self._wait_a_little(f"for the store to come back ({exc})")

    def come_back(self) -> Seat:
        """Take part as a process that was not a member: in a generation that the survivors open, or one that all newcomers form.

        Raises:
            RendezvousError: none was opened in time.
        """
        tried = 0
        lobby = [_Pulse(self._store, f"{self._prefix}/lobby/{claim}") for claim in range(self._expected)]
        while True:
            try:
                generation = self._latest(tried)
                if generation > tried:
                    tried = generation
                    if (seat := self._register(generation)) is not None:
                        return seat
                if self._claim < len(lobby):
                    lobby[self._claim].beat()
                if (
                    self._claim == 0 and sum(pulse.lives() for pulse in lobby[1:]) == len(lobby) - 1
                ):  # each is asked, to be heard
                    self._min_ranks = self._expected
                    return self.survive(generation + 1)
            except ConnectionError as exc:
                if isinstance(exc, RendezvousError):
                    raise
            self._wait_a_little("for the others to rebuild the group")

    def _latest(self, generation: int) -> int:
        """The latest generation that was opened, or `generation` where that is later."""
        hint = f"{self._prefix}/opened"  # never too high; that it may be too low costs a few questions
        known = int(self._store.get(hint, 1.0)) if self._store.check([hint]) else 0
        latest = max(generation, known)
        while self._store.check([f"{self._prefix}/{latest + 1}/open"]):
            latest += 1
        if latest > max(generation, known):
            self._store.set(hint, str(latest).encode())
        return latest

    def _register(self, generation: int, leads: bool = False) -> Seat | None:
        """Come in, and wait for the list of members. None when this one is not on it, or nobody leads any more."""
        base = f"{self._prefix}/{generation}"
        if self._store.check([f"{base}/list"]):
            return None
        number = self._store.add(f"{base}/count", 1)
        mine, leader = _Pulse(self._store, f"{base}/{number}/here"), _Pulse(self._store, f"{base}/leader")
        self._store.set(f"{base}/{number}", msgpack.packb(self._claim))
        if leads:
            self._lead(base, number, mine, leader)
        while not self._store.check([f"{base}/list"]):
            if leader.silent():
                return None
            mine.beat()
            self._wait_a_little(f"for the others to rebuild the group (at least {self._min_ranks})")
        members: list[list[int]] = msgpack.unpackb(self._store.get(f"{base}/list", 5.0))
        order = [arrival for _, arrival in sorted((claim, arrival) for claim, arrival in members)]
        return Seat(order.index(number), len(order), generation) if number in order else None

    def _lead(self, base: str, number: int, mine: _Pulse, leader: _Pulse) -> None:
        """Wait until enough ranks came, and all known survivors among them, then close the list."""
        pulses: dict[int, _Pulse] = {}
        claims: dict[int, int] = {}
        newest = time.monotonic()
        while True:
            mine.beat()
            leader.beat()
            count = self._store.add(f"{base}/count", 0)
            for k in range(len(pulses) + 1, count + 1):
                newest = time.monotonic()
                pulses[k] = _Pulse(self._store, f"{base}/{k}/here")
                claims[k] = self._claim_of(f"{base}/{k}")
            here = [k for k, pulse in pulses.items() if k == number or pulse.lives()]
            known = 0 if self._survivors is None else self._survivors()
            twice = len({claims[k] for k in here}) < len(here)  # one of the two may be dead: it will fall silent
            sure = not twice and (self._survivors is not None or len(here) >= self._expected)
            if len(here) >= max(self._min_ranks, 1 + known) and (sure or time.monotonic() > newest + GATHER_SECONDS):
                break
            self._wait_a_little("for ranks to come back", f"{len(here)} here, at least {self._min_ranks} needed")
        self._store.set(f"{base}/list", msgpack.packb([[claims[k], k] for k in here]))

    def _claim_of(self, key: str) -> int:
        try:
            claim: int = msgpack.unpackb(self._store.get(key, 1.0))
        except TimeoutError:  # it died before it could say so, and will never be heard
            return -1
        return claim

    def _wait_a_little(self, what: str, state: str = "") -> None:
        self._progress.waits(what, state)
        if time.monotonic() > self._deadline:
            raise RendezvousError(f"rank {self._claim} waited in vain {what}{f' ({state})' if state else ''}")
        time.sleep(_PAUSE)
