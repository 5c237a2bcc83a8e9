"""A machine that stays with a cluster: it takes part again after a crash, a cut, or a restart of the head."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NoReturn

from hostring.errors import HandshakeError, RendezvousError
from hostring.launch.joining import Place, job_of, join_or_come_back, wait_for_all
from hostring.launch.token import Token

MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 15.0  # between two attempts
TRY_S = 5.0  # for the head to answer, in one of them
_SHORT_S = 20.0  # a rank that ends sooner is not started again at once

Run = Callable[[Place, bytes], int]
"""Runs this machine's rank with the head's job. Returns its exit code."""


class Staying:
    """One machine's part in the cluster of a token.

    Args:
        run: see `Run`. say: told what happens, for people.
    """

    def __init__(self, token: Token, name: str, run: Run, say: Callable[[str], None]) -> None:
        self._token, self._name, self._run, self._say = token, name, run, say
        self._pause_s = MIN_PAUSE_S

    def first(self) -> tuple[Place, bytes | None]:
        """Join, and wait for all others. Returns the job that the head has for this machine, None where it has none.

        Raises:
            HostringError: see `join` and `wait_for_all`.
        """
        return self._entered(False)

    def stay(self, place: Place, job: bytes) -> NoReturn:
        """Run the job; then come back and run it again, until this process is ended."""
        while True:
            begun = time.monotonic()
            ended = self._run(place, job)
            if time.monotonic() - begun > _SHORT_S:
                self._pause_s = MIN_PAUSE_S
            how = "the head has ended the job" if ended == 0 else f"this rank exited with code {ended}"
            self._say(f"{how}; this machine stays and comes back (Ctrl-C to leave)")
            place, job = self._back()

    def _back(self) -> tuple[Place, bytes]:
        told = ""
        while True:
            time.sleep(self._pause_s)
            self._pause_s = min(MAX_PAUSE_S, 1.5 * self._pause_s)
            try:
                place, job = self._entered(True)
            except (HandshakeError, RendezvousError) as exc:
                kind = type(exc).__name__
                if kind != told:
                    self._say(f"waiting for the head: {exc}")
                told = kind
                continue
            if job is not None:
                return place, job

    def _entered(self, was_here: bool) -> tuple[Place, bytes | None]:
        place = join_or_come_back(self._token, self._name, was_here=was_here, timeout=TRY_S)
        back = "back" if place.rejoins else "joined"
        self._say(f"{back} as rank {place.rank} of {place.token.world_size}")
        if place.claim is not None:
            self._say("waiting for the others, for as long as the token lives")
        wait_for_all(place)
        with contextlib.suppress(ConnectionError):
            return place, job_of(place)
        raise RendezvousError("the machine that opened the cluster is gone")
