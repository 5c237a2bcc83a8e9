"""Point-to-point messages, on links of their own: what a group's `send` and `recv` start."""

from __future__ import annotations

import select
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from hostring.arrays.dtypes import Array
from hostring.engine.binding import flat
from hostring.engine.control import Control
from hostring.engine.counters import Counters
from hostring.engine.matching import MessageWork
from hostring.engine.message_driver import MessageDriver
from hostring.engine.message_traffic import MessageTraffic
from hostring.errors import HostringError
from hostring.transports.link import Link


class Messenger:
    """All point-to-point traffic of one rank."""

    def __init__(self, rank: int, links: Mapping[int, Link], control: Control, counters: Counters, epoch: int) -> None:
        self._traffic = MessageTraffic(rank, links, control, counters, epoch)
        self._driver = MessageDriver(self._traffic, control)

    def send(
        self, data: Array, dst: int, tag: int, seconds: float, background: bool = False, owner: Any = None
    ) -> MessageWork:
        """Queue an array for `dst`. As much as the link takes is sent at once."""
        link = self._traffic.link(dst)
        work = MessageWork(f"send to rank {dst}, tag {tag}", seconds, self._driver)
        work.wanted, work.tag, work.owner = dst, tag, data if owner is None else owner
        self._traffic.send(link, work, flat(data))
        self._driver.nudge(background and not work.is_completed())
        return work

    def recv(
        self,
        into: Array,
        src: int | None,
        tag: int,
        seconds: float,
        result: Any,
        put_back: Callable[[], Any] | None,
        background: bool = False,
    ) -> MessageWork:
        """Post a receive into an array. It is served at once when its message is already here."""
        if src is not None:
            self._traffic.link(src)
        work = MessageWork(
            f"recv from {'any rank' if src is None else f'rank {src}'}, tag {tag}", seconds, self._driver
        )
        work.into, work.wanted, work.tag, work.result, work.put_back = flat(into), src, tag, result, put_back
        self._traffic.post(work)
        self._driver.nudge(background and not work.is_completed())
        return work

    @property
    def runs_in_background(self) -> bool:
        """Whether a thread of its own drives what nobody waits for."""
        thread = self._driver.thread
        return thread is not None and thread.is_alive()

    def abort(self, cause: HostringError) -> None:
        """End everything that is under way with `cause`."""
        self._traffic.end(cause)
        self._driver.nudge(False)

    def forsake(self, cause: HostringError) -> None:
        """In a forked child: refuse every call."""
        self._traffic.abandon(cause)

    def close(self, seconds: float = 5.0) -> None:
        """Send what was accepted, then end the background thread. The links are closed by whoever made them."""
        deadline = perf_counter() + seconds
        while self._traffic.cause is None and self._traffic.push() and perf_counter() < deadline:
            select.select([], [], [], 0.001)
        if self._traffic.cause is None:
            rank = self._traffic.rank
            self.abort(HostringError(f"rank {rank} closed the group", rank))
        self._driver.close(seconds)
