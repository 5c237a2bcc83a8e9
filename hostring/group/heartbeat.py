"""Signs of life between the ranks of a group, beside its calls: a rank that stands still, or whose host is cut off,
closes no link, and a call could only wait for it until its timeout."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, Protocol

from hostring.store.stores import Store

NO_SIGN: Final = "no sign of life"  # how the reason begins why a silent rank is lost
BEATS: Final = 4  # signs of life in the time after which a rank counts as silent
STOP_WAIT_S: Final = 0.2
LEFT: Final = 1 << 40  # more than any number of beats: the rank has left in an orderly way


class Loses(Protocol):
    """A group that can lose a rank."""

    def lose(self, rank: int, reason: str) -> None:
        """Calls under way and later ones raise that `rank` is lost."""


@dataclass
class _Heard:
    """What was heard of one rank: the number of its last beat, 0 before the first, and when that was new."""

    beat: int = 0
    since: float = 0.0
    lost: bool = False


class Signs:
    """Judges by beats which ranks are silent. A rank that never beat is not judged, nor is one that has left."""

    def __init__(self, ranks: Iterable[int], silent_s: float) -> None:
        self._heard, self._silent_s = {rank: _Heard() for rank in ranks}, silent_s
        self._last = -1.0

    def silent(self, beats: Mapping[int, int], now: float) -> dict[int, float]:
        """Ranks that have become silent, and for how many seconds.

        Where this rank itself looked too late, because it was stopped or had no core, the others get all their time
        again.

        Args:
            beats: how often each rank has beaten by now, a monotonic time.
        """
        late, self._last = now - self._last > self._silent_s / 2, now
        found = {}
        for rank, heard in self._heard.items():
            beat = beats[rank]
            if beat != heard.beat or late or beat >= LEFT:
                heard.beat, heard.since = beat, now
            elif beat and not heard.lost and now - heard.since > self._silent_s:
                heard.lost, found[rank] = True, now - heard.since
        return found


class Heartbeat:
    """A thread that counts this rank's beats in the store, and looks at the counters of the others.

    A rank that is silent (see `Signs`) is lost for all groups that have it. Costs world_size small requests to the
    store every silent_s / 4 seconds.

    Args:
        store: of the group; any thread may use it. prefix: of keys, the same on all ranks and of no other use.
        store_host: the rank whose host runs the store, and is lost if the store does not answer.
    """

    def __init__(
        self, store: Store, prefix: str, rank: int, world_size: int, silent_s: float, store_host: int = 0
    ) -> None:
        self._store, self._prefix, self._rank, self._silent_s = store, prefix, rank, silent_s
        self._store_host = store_host
        self._others = [other for other in range(world_size) if other != rank]
        self._groups: list[tuple[weakref.ref[Loses], list[int]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostring-heartbeat", daemon=True)
        self._thread.start()

    def watch(self, group: Loses, ranks: Sequence[int]) -> None:
        """Tell `group` too when a rank is lost. ranks: those of the group, by their numbers here."""
        self._groups = [*(entry for entry in self._groups if entry[0]() is not None), (weakref.ref(group), list(ranks))]

    def stop(self) -> None:
        """This rank leaves: nobody is to miss it. Waits for the store at most `STOP_WAIT_S`."""
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        signs, answered = Signs(self._others, self._silent_s), monotonic()
        while not self._ended.is_set():
            try:
                self._store.add(self._key(self._rank), 1)
                beats = {other: self._store.add(self._key(other), 0) for other in self._others}
            except OSError as exc:
                if monotonic() - answered > self._silent_s:
                    if not self._ended.is_set() and self._rank != self._store_host:
                        self._lose(self._store_host, f"{NO_SIGN} from the store on its host ({exc})")
                    return
            else:
                answered = monotonic()
                for rank, seconds in signs.silent(beats, answered).items():
                    self._lose(rank, f"{NO_SIGN} for {seconds:.1f} s; it stands still, or its host is cut off")
            self._ended.wait(self._silent_s / BEATS)
        with contextlib.suppress(OSError):
            self._store.add(self._key(self._rank), LEFT)

    def _lose(self, rank: int, reason: str) -> None:
        for reference, ranks in self._groups:
            group = reference()
            if group is not None and rank in ranks:
                group.lose(ranks.index(rank), reason)

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/beat/{rank}"
