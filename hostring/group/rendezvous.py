"""How ranks find each other: every rank publishes a few bytes in a store and collects what the others published."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack

from hostring.errors import HandshakeError, RendezvousError
from hostring.store.client import StoreRefusedError, TcpStore
from hostring.store.stores import MemoryStore, Store, TorchStore

__all__ = [
    "MemoryStore",
    "Progress",
    "Store",
    "StoreRefusedError",
    "TcpStore",
    "TorchStore",
    "exchange",
    "linger",
    "names",
]

log = logging.getLogger("hostring")

FIRST_NEWS, MORE_NEWS = 2.0, 10.0
"""Seconds of waiting before the first and between further lines of progress."""

LAST_WORDS = 2.0
"""Seconds that rank 0 keeps the store up after a failed start, so that the others hear why."""

ENDED = "launch/ended"
"""Under this key a launcher says which of its ranks have ended, and how."""

Inspect = Callable[[int, bytes], None]


def tell_ended(store: Store, ended: Mapping[int, str]) -> None:
    """Keep ranks from waiting for those that have ended.

    Args:
        store: where the ranks meet.
        ended: how, in words, by rank: "exited with code 0".
    """
    store.set(ENDED, msgpack.packb({str(rank): how for rank, how in ended.items()}))


class Progress:
    """Says who is waited for, at WARNING level so that a person sees it without having set up logging."""

    def __init__(self, rank: int, deadline: float) -> None:
        self.speaks = True
        self.rank = rank
        self._start = time.monotonic()
        self._deadline = deadline
        self._due = self._start + FIRST_NEWS

    def waits(self, what: str, state: str = "") -> None:
        """To be called often: prints a line when one is due.

        Args:
            what: "for rank 1, 3".
            state: "2 of 4 here".
        """
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + MORE_NEWS
        if self.speaks:
            times = f"{now - self._start:.0f} s of {self._deadline - self._start:.0f} s"
            log.warning("hostring: rank %d waits %s (%s)", self.rank, what, f"{state}, {times}" if state else times)

    def next_phase(self) -> None:
        """Something else is waited for from now on, by every rank alone."""
        self.speaks = True
        self._due = max(self._due, time.monotonic() + FIRST_NEWS)

    def until_due(self) -> float:
        """Seconds until the next line is due."""
        return max(0.0, self._due - time.monotonic())


def names(ranks: Iterable[int]) -> str:
    """ "rank 1, 3", with a long list shortened."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:16]))
    return f"rank {shown}" + (f" and {len(listed) - 16} more" if len(listed) > 16 else "")


def exchange(
    store: Store,
    prefix: str,
    rank: int,
    world_size: int,
    payload: bytes,
    deadline: float,
    progress: Progress | None = None,
    inspect: Inspect | None = None,
) -> list[bytes]:
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
        progress: told who is missing.
        inspect: called with each rank and payload as it comes. When it raises HandshakeError, all ranks raise that.

    Returns:
        The payloads by rank.

    Raises:
        RendezvousError: the deadline passed; names the ranks that did not come.
        HandshakeError: from `inspect`, here or on another rank.
    """
    progress = progress or Progress(rank, deadline)
    while True:
        try:
            generation = store.add(f"{prefix}/{rank}/joins", 1)
            collecting = _Collecting(
                store, f"{prefix}/{generation}", rank, world_size, deadline, progress, inspect, generation
            )
            return collecting.run(payload)
        except ConnectionError as exc:
            if isinstance(exc, (RendezvousError, HandshakeError)):
                raise
            if time.monotonic() + 0.05 >= deadline:
                raise unreachable(rank, exc) from exc
            time.sleep(0.05)


def unreachable(rank: int, exc: BaseException) -> RendezvousError:
    """What to raise when the deadline has passed and there is no store."""
    return RendezvousError(
        f"rank {rank} could not reach the store in time; is rank 0 up, and MASTER_ADDR an address of its host? {exc}", 0
    )


@dataclass
class _Collecting:
    """One generation of one exchange."""

    store: Store
    base: str
    rank: int
    world_size: int
    deadline: float
    progress: Progress
    inspect: Inspect | None
    generation: int
    found: dict[int, bytes] = field(default_factory=dict)

    def run(self, payload: bytes) -> list[bytes]:
        self.store.set(f"{self.base}/{self.rank}", payload)
        self.found[self.rank] = payload
        while missing := self._missing():
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise RendezvousError(self._in_vain(missing), missing[0])
            try:
                self._take(missing[0], min(left, self.progress.until_due(), 1.0))
            except TimeoutError:
                self._look_around(missing[1:])
        self.store.add(f"{self.base}/read", 1)
        return [self.found[r] for r in range(self.world_size)]

    def _missing(self) -> list[int]:
        return [r for r in range(self.world_size) if r not in self.found]

    def _take(self, rank: int, timeout: float) -> None:
        self.found[rank] = self.store.get(f"{self.base}/{rank}", timeout)
        if self.inspect is not None:
            try:
                self.inspect(rank, self.found[rank])
            except HandshakeError as exc:
                self.store.set(f"{self.base}/failed", str(exc).encode())
                self.store.add(f"{self.base}/read", 1)
                raise

    def _look_around(self, others: Iterable[int]) -> None:
        for r in others:
            if self.store.check([f"{self.base}/{r}"]):
                self._take(r, 1.0)
        if self.store.check([f"{self.base}/failed"]):
            self.store.add(f"{self.base}/read", 1)
            raise HandshakeError(self.store.get(f"{self.base}/failed", 1.0).decode())
        if missing := self._missing():
            self._check_ended(missing)
            self.progress.waits(f"for {names(missing)}{self._doubt()}", f"{len(self.found)} of {self.world_size} here")

    def _check_ended(self, missing: Sequence[int]) -> None:
        """Don't wait for a rank whose process has ended, as its launcher says."""
        if not self.store.check([ENDED]):
            return
        ended = dict(msgpack.unpackb(self.store.get(ENDED, 1.0)))
        for r in missing:
            if str(r) in ended and not self.store.check([f"{self.base}/{r}"]):  # it may have come since we looked
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
            f"rank {self.rank} waited in vain for {names(missing)}{self._doubt()}; {len(self.found)} of {self.world_size} came. "
            f"Start them with the same rendezvous and world size, or raise timeout= if they are only late"
        )


def linger(store: Store, prefix: str, world_size: int) -> None:
    """Wait a moment until all ranks have read what is in the store, or know of the failure, before it goes away."""
    until = time.monotonic() + LAST_WORDS
    with contextlib.suppress(OSError):
        generation = store.add(f"{prefix}/0/joins", 0)
        while time.monotonic() < until and store.add(f"{prefix}/{generation}/read", 0) < world_size:
            time.sleep(0.05)
