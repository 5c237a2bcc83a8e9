"""Rebuilding a group: which processes survived or rejoin, and which rank each of them gets.

The rule for ranks: processes are ordered by the rank they held or ask for, then by arrival, and numbered from 0 without
gaps. So survivors keep their order, and a process that rejoins as rank k takes the place of rank k.

A generation is one attempt. Every process that wants to be in it registers under the next free number and then sends
signs of life. The first survivor to register leads: it waits until enough processes are there, and writes the list of
them. If the leader falls silent, the generation is given up for the next one. If a process dies after the list was
written, the links of that generation fail, and the others try a later one. If every rank of the group asks to rejoin,
no survivor can open a generation; then the process that asks for rank 0 opens it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from hostring.errors import RendezvousError
from hostring.group.pulse import Pulse
from hostring.group.waiting import Waiting
from hostring.store.stores import Store

PAUSE_S = 0.02  # between two looks at the store
SILENT_S = 3.0  # without a sign of life, after which a process counts as dead
GATHER_S = 3.5  # how long newcomers are waited for if it isn't sure who survived; more than SILENT_S


@dataclass(frozen=True)
class NewRank:
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
        survivors: how many other ranks of the old group are known to be alive, called again and again; None if unknown.
        deadline: monotonic time.
        expected: how many ranks the old group had. If it is unknown who survived, no more than these are waited for.
            If all of them rejoin, nobody survived.
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
        self._store, self._prefix, self._claim = store, f"{prefix}/rebuild", claim
        self._min_ranks, self._survivors, self._deadline = min_ranks, survivors, deadline
        self._expected = max(expected, min_ranks)
        self._waiting = Waiting(claim, deadline)

    def survive(self, generation: int) -> NewRank:
        """Take part as a survivor of the generation before `generation`, in that one or a later one.

        Raises:
            RendezvousError: too few ranks came in time, or the group was formed without this rank.
        """
        while True:
            try:
                generation = self._latest(generation)
                self._store.set(f"{self._prefix}/{generation}/open", b"")
                self._store.set(f"{self._prefix}/opened", str(generation).encode())
                leads = self._store.add(f"{self._prefix}/{generation}/survivors", 1) == 1
                if (new := self._register(generation, leads)) is not None:
                    return new
                if self._store.check([f"{self._prefix}/{generation}/list"]):
                    raise RendezvousError(
                        f"rank {self._claim} came too late: generation {generation} was formed without it"
                    )
                generation += 1  # its leader is gone
            except ConnectionError as exc:
                if isinstance(exc, RendezvousError):
                    raise
                self._wait_a_little(f"for the store to come back ({exc})")

    def rejoin(self) -> NewRank:
        """Take part as a new process: in a generation that the survivors open, or in one that new processes form.

        Raises:
            RendezvousError: none was opened in time.
        """
        tried = 0
        lobby = [self._pulse(f"lobby/{claim}") for claim in range(self._expected)]
        while True:
            try:
                generation = self._latest(tried)
                if generation > tried:
                    tried = generation
                    if (new := self._register(generation)) is not None:
                        return new
                if self._claim < len(lobby):
                    lobby[self._claim].beat()
                # `lives` is called for every one, since it listens only while it is called
                if self._claim == 0 and sum(pulse.lives() for pulse in lobby[1:]) == len(lobby) - 1:
                    self._min_ranks = self._expected
                    return self.survive(generation + 1)
            except ConnectionError as exc:
                if isinstance(exc, RendezvousError):
                    raise
            self._wait_a_little("for the others to rebuild the group")

    def _latest(self, generation: int) -> int:
        """The latest generation that was opened, or `generation` where that is later."""
        hint = f"{self._prefix}/opened"  # never too high, but it may be too low
        known = int(self._store.get(hint, 1.0)) if self._store.check([hint]) else 0
        latest = max(generation, known)
        while self._store.check([f"{self._prefix}/{latest + 1}/open"]):
            latest += 1
        if latest > max(generation, known):
            self._store.set(hint, str(latest).encode())
        return latest

    def _register(self, generation: int, leads: bool = False) -> NewRank | None:
        """Register, and wait for the list. None if this process is not on it, or nobody leads any more."""
        base = f"{self._prefix}/{generation}"
        if self._store.check([f"{base}/list"]):
            return None
        number = self._store.add(f"{base}/count", 1)
        mine, leader = self._pulse(f"{generation}/{number}/here"), self._pulse(f"{generation}/leader")
        self._store.set(f"{base}/{number}", msgpack.packb(self._claim))
        if leads:
            self._lead(generation, number, mine, leader)
        while not self._store.check([f"{base}/list"]):
            if leader.silent():
                return None
            mine.beat()
            self._wait_a_little(f"for the others to rebuild the group (at least {self._min_ranks})")
        listed: list[list[int]] = msgpack.unpackb(self._store.get(f"{base}/list", 5.0))
        order = [arrival for _, arrival in sorted((claim, arrival) for claim, arrival in listed)]
        return NewRank(order.index(number), len(order), generation) if number in order else None

    def _pulse(self, key: str) -> Pulse:
        return Pulse(self._store, f"{self._prefix}/{key}", SILENT_S)

    def _lead(self, generation: int, number: int, mine: Pulse, leader: Pulse) -> None:
        """Wait until enough processes came, with all known survivors, then write the list."""
        base = f"{self._prefix}/{generation}"
        pulses: dict[int, Pulse] = {}
        claims: dict[int, int] = {}
        newest = time.monotonic()
        while True:
            mine.beat()
            leader.beat()
            count = self._store.add(f"{base}/count", 0)
            for k in range(len(pulses) + 1, count + 1):
                newest = time.monotonic()
                pulses[k] = self._pulse(f"{generation}/{k}/here")
                claims[k] = self._claim_of(f"{base}/{k}")
            here = [k for k, pulse in pulses.items() if k == number or pulse.lives()]
            known = 0 if self._survivors is None else self._survivors()
            twice = len({claims[k] for k in here}) < len(here)  # one of the two may be dead, and will fall silent
            sure = not twice and (self._survivors is not None or len(here) >= self._expected)
            if len(here) >= max(self._min_ranks, 1 + known) and (sure or time.monotonic() > newest + GATHER_S):
                break
            self._wait_a_little("for ranks to come back", f"{len(here)} here, at least {self._min_ranks} needed")
        self._store.set(f"{base}/list", msgpack.packb([[claims[k], k] for k in here]))

    def _claim_of(self, key: str) -> int:
        try:
            claim: int = msgpack.unpackb(self._store.get(key, 1.0))
        except TimeoutError:  # it died before it could say which
            return -1
        return claim

    def _wait_a_little(self, what: str, state: str = "") -> None:
        self._waiting.tell(what, state)
        if time.monotonic() > self._deadline:
            raise RendezvousError(f"rank {self._claim} waited in vain {what}{f' ({state})' if state else ''}")
        time.sleep(PAUSE_S)
