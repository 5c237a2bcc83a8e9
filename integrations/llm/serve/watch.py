"""Which ranks of `hostring serve --local` are started again, and which that do nothing any more are ended first."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from time import monotonic
from typing import Any

log = logging.getLogger("hostring")

MAX_STARTS = 5  # of a rank, since all were last together: whatever ends it, another try won't help
SILENCE_S = 2.0  # after which a rank that the head has given up, and that has not ended, is ended


class RankWatch:
    """The `Revival` of the launch. The head tells it, through `listener`, which rank is lost and when all are there."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._starts: dict[int, int] | None = None  # since all were together; None before they were for the first time
        self._given_up: dict[int, float] = {}
        threading.Thread(target=self._read, name="hostring-serve-watch", daemon=True).start()

    def again(self, rank: int, how: str) -> bool:
        """See `Revival`: any rank but the head, when it has been ready before."""
        with self._lock:
            if rank == 0 or self._starts is None or self._starts.get(rank, 0) >= MAX_STARTS:
                return False
            self._starts[rank] = self._starts.get(rank, 0) + 1
            self._given_up.pop(rank, None)
        log.warning("hostring: rank %d %s; it is started again", rank, how)
        return True

    def stuck(self) -> Collection[int]:
        """See `Revival`."""
        with self._lock:
            late = monotonic() - SILENCE_S
            return [rank for rank, since in self._given_up.items() if since < late]

    def note(self, kind: str, value: Any) -> None:
        """The head tells something; see `head.Tell`."""
        with self._lock:
            if kind == "whole":
                self._starts, self._given_up = {}, {}
            elif kind == "lost" and not (self._starts or {}).get(value):
                self._given_up[value] = monotonic()

    def _read(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                break
            except (AuthenticationError, EOFError):  # a stranger
                continue
            except OSError:  # the end
                return
        try:
            while True:
                self.note(*json.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            connection.close()


class WatchChannel:
    """The head's way to a `RankWatch`."""

    def __init__(self, port: int, key: bytes) -> None:
        self._connection = Client(("127.0.0.1", port), authkey=key)

    def tell(self, kind: str, value: Any) -> None:
        """See `head.Tell`."""
        self._connection.send_bytes(json.dumps([kind, value]).encode())
