"""How ranks find each other: every rank publishes a few bytes in a store and collects what the others published."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from hostring.errors import HandshakeError, RendezvousError
from hostring.group.waiting import Waiting, names
from hostring.store.stores import Store

LAST_WORDS_S = 2.0  # how long rank 0 keeps the store up after a failed start, so that the others hear why
LOOK_S = 0.25  # how long one rank is waited for before the others are looked at
RETRY_PAUSE_S = 0.05  # before a store that is gone is tried again

ENDED_KEY = "launch/ended"
"""Under this key a launcher says which of its ranks have ended, and how."""

Read = Callable[[int, bytes], Any]
"""Decodes what a rank published."""


def tell_ended(store: Store, ended: Mapping[int, str]) -> None:
    """Keep ranks from waiting for those that have ended.

    Args:
        store: where the ranks meet.
        ended: how, in words, by rank: "exited with code 0".
    """
    store.set(ENDED_KEY, msgpack.packb({str(rank): how for rank, how in ended.items()}))


def exchange(
    store: Store,
    prefix: str,
    rank: int,
    world_size: int,
    payload: bytes,
    deadline: float,
    waiting: Waiting | None = None,
    read: Read = lambda rank, payload: payload,
    *,
    lingers: bool = True,
) -> list[Any]:
    """Publish `payload` and collect that of every rank.

    Each call of a rank under one `prefix` in one store starts a new generation, so that the second group that the same
    processes form never reads what the first one published. A store that comes back empty (rank 0 closed it and opened
    a new one on the same port) is filled again.

    Args:
        store: shared by all ranks.
        prefix: what to put before keys; the same on all ranks and of no other use.
        rank: this rank.
        world_size: number of ranks.
        payload: at most about 1 MB.
        deadline: monotonic time.
        waiting: is told who is missing.
        read: called with each rank and its payload as soon as it is there. If it raises HandshakeError, all ranks do.
        lingers: rank 0 runs the store and may `linger` in it.

    Returns:
        what `read` made of the payloads, by rank.

    Raises:
        RendezvousError: the deadline passed; names the ranks that did not come.
        HandshakeError: from `read`, here or on another rank.
    """
    waiting = waiting or Waiting(rank, deadline)
    collecting = _Collecting(store, prefix, rank, world_size, deadline, waiting, read, lingers)
    while True:
        try:
            return collecting.run(payload)
        except ConnectionError as exc:
            if isinstance(exc, (RendezvousError, HandshakeError)):
                raise
            if time.monotonic() + RETRY_PAUSE_S >= deadline:
                raise unreachable(rank, exc) from exc
            time.sleep(RETRY_PAUSE_S)


@dataclass
class _Collecting:
    """One rank's part in one exchange."""

    store: Store
    prefix: str
    rank: int
    world_size: int
    deadline: float
    waiting: Waiting
    read: Read
    lingers: bool
    generation: int = 0
    found: dict[int, Any] = field(default_factory=dict)

    def run(self, payload: bytes) -> list[Any]:
        self.found.clear()
        self.generation = self.store.add(f"{self.prefix}/{self.rank}/joins", 1)
        self.store.set(self._key(self.rank), payload)
        self._take(self.rank, payload)
        while missing := self._missing():
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise RendezvousError(self._in_vain(missing), missing[0])
            try:
                payloads = self.store.get_all([self._key(r) for r in missing], min(left, LOOK_S))
            except TimeoutError:
                self._look_around(missing)
            else:
                for r, theirs in zip(missing, payloads, strict=True):
                    self._take(r, theirs)
        self._tell_read()
        return [self.found[r] for r in range(self.world_size)]

    def _key(self, name: int | str) -> str:
        return f"{self.prefix}/{self.generation}/{name}"

    def _missing(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self.found]

    def _take(self, rank: int, payload: bytes) -> None:
        try:
            self.found[rank] = self.read(rank, payload)
        except HandshakeError as exc:
            self.store.set(self._key("failed"), str(exc).encode())
            self._tell_read()
            raise

    def _tell_read(self) -> None:
        if self.lingers:
            self.store.add(self._key("read"), 1)

    def _look_around(self, missing: list[int]) -> None:
        for r in missing:
            if self.store.check([self._key(r)]):
                self._take(r, self.store.get(self._key(r), 1.0))
        if self.store.check([self._key("failed")]):
            self._tell_read()
            raise HandshakeError(self.store.get(self._key("failed"), 1.0).decode())
        if missing := self._missing():
            self._check_ended(missing)
            self.waiting.tell(f"for {names(missing)}{self._doubt()}", f"{len(self.found)} of {self.world_size} here")

    def _check_ended(self, missing: Sequence[int]) -> None:
        """Don't wait for a rank whose process has ended, as its launcher says."""
        if not self.store.check([ENDED_KEY]):
            return
        ended = dict(msgpack.unpackb(self.store.get(ENDED_KEY, 1.0)))
        for r in missing:
            if str(r) in ended and not self.store.check([self._key(r)]):  # it may have come since we looked
                raise RendezvousError(
                    f"rank {self.rank} waits for rank {r}, which {ended[str(r)]} before it joined; "
                    f"every rank must call hostring.init",
                    r,
                )

    def _doubt(self) -> str:
        if self.generation == 1:
            return ""
        return (
            f" to start for the {self.generation}. time (unless another process, too, says that it is rank {self.rank})"
        )

    def _in_vain(self, missing: list[int]) -> str:
        return (
            f"rank {self.rank} waited in vain for {names(missing)}{self._doubt()}; {len(self.found)} of "
            f"{self.world_size} came. Start them with the same rendezvous and world size, or raise timeout= if they "
            f"are only late"
        )


def unreachable(rank: int, exc: BaseException) -> RendezvousError:
    """What to raise when the deadline has passed and there is no store."""
    return RendezvousError(
        f"rank {rank} could not reach the store in time; is rank 0 up, and MASTER_ADDR an address of its host? {exc}", 0
    )


def linger(store: Store, prefix: str, world_size: int) -> None:
    """Wait until all ranks have read what is in the store, or know of the failure, at most `LAST_WORDS_S`."""
    until = time.monotonic() + LAST_WORDS_S
    with contextlib.suppress(OSError):
        generation = store.add(f"{prefix}/0/joins", 0)
        while time.monotonic() < until and store.add(f"{prefix}/{generation}/read", 0) < world_size:
            time.sleep(0.05)
