"""What the demo's ranks report, and whether one of them is started again."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from time import monotonic
from typing import Any

from hostring.integrations.llm.demo.screen import Screen

_MAX_STARTS = 3  # of a rank that never gets ready: whatever ends it, another try won't help
SILENCE_S = 2.0  # after which a rank that the others gave up, and that reports nothing, is ended


class RankMonitor:
    """Passes the ranks' reports to the screen, in threads of its own. Also the `Revival` of their launch.

    Attributes:
        head_ended: how, in words, when it failed after the start.
    """

    def __init__(self, listener: Listener, screen: Screen) -> None:
        self._listener, self._screen = listener, screen
        self._result: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._accepting = True
        self._prompts_left = False  # another prompt may come
        self._starts: dict[int, int] = {}  # again, since the rank was last ready; a rank that never was has no entry
        self._rebuilding: set[int] = set()  # ranks that take part in rebuilding the group
        self._given_up: dict[int, float] = {}  # when, by the others
        self.head_ended: str | None = None
        threading.Thread(target=self._accept, name="hostring-demo", daemon=True).start()

    def finish(self) -> dict[str, Any] | None:
        """The result, once all that was sent has been read."""
        self._accepting = False
        for reader in self._readers:
            reader.join(5.0)
        return self._result

    def again(self, rank: int, how: str) -> bool:
        """Whether to start a rank again: while prompts are left, but not when it ends before it is
        ready, each time."""
        with self._lock:
            if rank == 0 and rank in self._starts:
                self.head_ended = how
            if rank == 0 or not self._prompts_left or self._starts.get(rank, _MAX_STARTS) >= _MAX_STARTS:
                return False
            self._starts[rank] += 1
            self._rebuilding.discard(rank)
            self._given_up.pop(rank, None)
            return True

    def stuck(self) -> Collection[int]:
        """Ranks that the others gave up and that report nothing: stopped, or in a long computation."""
        with self._lock:
            late = monotonic() - SILENCE_S
            return [rank for rank, since in self._given_up.items() if since < late and rank not in self._rebuilding]

    def note(self, rank: int, kind: str, value: Any) -> None:
        """A rank reports something; see `loop.Tell`."""
        if kind == "result":
            self._result = value
        elif kind == "stage" and value == "rebuilding":
            self._rebuilding.add(rank)
        elif kind == "stage" and value == "ready":
            self._starts[rank] = 0
            self._rebuilding.discard(rank)
            self._given_up.pop(rank, None)
        elif kind == "ask":
            self._prompts_left = True
        elif kind == "prompt":
            self._prompts_left = value["more"]
        elif kind == "lost":
            self._prompts_left = value["waits"]
            if self._starts.get(value["rank"]) == 0:  # else it has been started again by now
                self._given_up[value["rank"]] = monotonic()

    def _accept(self) -> None:
        while self._accepting:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, OSError, EOFError):  # a stranger, or the end
                continue
            reader = threading.Thread(target=self._read, args=(connection,), name="hostring-demo-rank", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                rank, kind, value = json.loads(connection.recv_bytes())
                with self._lock:
                    self.note(rank, kind, value)
                    self._screen.handle(rank, kind, value)
        except (EOFError, OSError):
            connection.close()
